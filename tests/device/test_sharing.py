"""How transfers share a link and memory."""

from __future__ import annotations

import pytest

from freetoken.device.sharing import Sharing, fair_rates

LINK, HOST = frozenset({"link", "host"}), frozenset({"host"})


@pytest.mark.parametrize(
    ("flows", "rates"),
    [
        ([], []),
        ([LINK], [50]),
        ([HOST], [120]),
        ([LINK, LINK], [25, 25]),
        ([LINK, HOST], [50, 70]),
        ([LINK, HOST, HOST, HOST], [30, 30, 30, 30]),
        ([LINK, LINK, HOST], [25, 25, 70]),
    ],
)
def test_fair_rates(flows: list[frozenset[str]], rates: list[float]) -> None:
    assert fair_rates(flows, {"link": 50, "host": 120}) == pytest.approx(rates)


def test_transfers_over_time() -> None:
    """Two copies of 100 at 25 each; when one of 50 more is alone it has the link for itself."""
    sharing = Sharing({"link": 50, "host": 120})
    first = sharing.begin(0.0, 100, LINK)
    second = sharing.begin(0.0, 150, LINK)
    assert sharing.end_of_next() == pytest.approx(4.0)
    assert sharing.take_finished(2.0) == []
    assert sharing.take_finished(4.0) == [first]
    assert sharing.end_of_next() == pytest.approx(5.0)
    memory = sharing.begin(4.5, 1000, HOST)
    assert sharing.end_of_next() == pytest.approx(5.0)
    assert sharing.take_finished(5.0) == [second]
    assert sharing.end_of_next() == pytest.approx(5.0 + (1000 - 35) / 120)
    assert sharing.take_finished(sharing.end_of_next() or 0) == [memory]
    assert sharing.end_of_next() is None
