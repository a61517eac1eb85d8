"""How transfers share what they go through, for the simulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def fair_rates(flows: Sequence[frozenset[str]], capacity: Mapping[str, float]) -> list[float]:
    """Bytes a second that each flow gets, by max-min fairness: all grow alike until something that they use is full.

    flows: the resources that each goes through. capacity: of each resource, bytes a second.
    """
    rates = [0.0] * len(flows)
    left = dict(capacity)
    growing = set(range(len(flows)))
    while growing:
        users = {name: sum(name in flows[i] for i in growing) for name in left}
        name = min((n for n in left if users[n]), key=lambda n: left[n] / users[n])
        share = left[name] / users[name]
        for i in [i for i in growing if name in flows[i]]:
            rates[i] = share
            growing.discard(i)
            for used in flows[i]:
                left[used] = max(0.0, left[used] - share)
    return rates


@dataclass(eq=False)
class Flow:
    """A transfer on its way. through: resources. left: bytes."""

    through: frozenset[str]
    left: float
    rate: float = 0.0


class Sharing:
    """Transfers that are on their way now, and how far they are."""

    def __init__(self, capacity: Mapping[str, float]) -> None:
        self._capacity = dict(capacity)
        self._flows: list[Flow] = []
        self._at = 0.0

    def begin(self, now: float, nbytes: float, through: frozenset[str]) -> Flow:
        """A new transfer; all others become slower, those that use the same."""
        self._advance(now)
        flow = Flow(through, nbytes)
        self._flows.append(flow)
        self._share()
        return flow

    def end_of_next(self) -> float | None:
        """When the next transfer ends if none begins; None without any."""
        return min((self._at + flow.left / flow.rate for flow in self._flows), default=None)

    def take_finished(self, now: float) -> list[Flow]:
        """Those that have ended by now; the others become faster."""
        self._advance(now)
        done = [flow for flow in self._flows if flow.left <= flow.rate * 1e-9]  # a nanosecond
        if done:
            self._flows = [flow for flow in self._flows if flow not in done]
            self._share()
        return done

    def _advance(self, now: float) -> None:
        for flow in self._flows:
            flow.left -= flow.rate * (now - self._at)
        self._at = now

    def _share(self) -> None:
        for flow, rate in zip(self._flows, fair_rates([f.through for f in self._flows], self._capacity), strict=True):
            flow.rate = rate
