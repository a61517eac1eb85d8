"""Bytes for people."""

import pytest

from freetoken.units import format_bytes


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 bytes"),
        (1025, "1025 bytes"),
        (20_000, "19.5 KiB"),
        (1 << 20, "1.00 MiB"),
        (6.06 * 2**30, "6.06 GiB"),
        (5 * 2**40, "5.00 TiB"),
    ],
)
def test_format_bytes(n: float, text: str) -> None:
    assert format_bytes(n) == text
