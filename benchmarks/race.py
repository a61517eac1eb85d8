"""Races freetoken's experts against other packages' on the same bytes, in one run, and prints one Markdown table.

    python benchmarks/race.py --python ggml=/another/venv/bin/python

All sides of a format are processes with banks of their own; they take turns, a round begins with another side each
time, and around each run is a look at the roof, the fastest of several plain reads of memory that is nobody's bank. A
side that is not installed, has no kernel for a format, dies or is silent is named below the table, with the reason.
"""

import argparse
import math
import signal
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import psutil
from layers import Shape, roof
from sides import PROGRAMS, Side, SideError, choose_pythons

from freetoken import formats, topology
from freetoken.errors import CapacityError, FormatError
from freetoken.memory.budget import Need, require
from freetoken.memory.mapping import map_bytes
from freetoken.units import format_bytes

OURS = "freetoken"
ROOF_BYTES = 1 << 30
"""Of memory that is read for the roof."""
SPARE_BYTES = 1 << 30
"""Of memory that stays free whatever is raced."""
PROCESS_BYTES = 1 << 29
"""What an interpreter with its packages takes."""
SAME = 0.02
"""By how much the bytes that two sides read for a token may differ."""


@dataclass
class Lane:
    """What was measured of a side: layers of a token per second, bytes per second, and shares of the roof, by round."""

    side: Side
    layers: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Median bytes per second."""
        return statistics.median(self.layers) * self.side.token_bytes


@dataclass
class Result:
    """Of one format: what was measured by side, and why the others are missing.

    foreign: share of the processors that was used meanwhile by what is not raced.
    """

    lanes: dict[str, Lane] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    foreign: float = 0.0

    def drop(self, side: str, why: str) -> None:
        """Go on without a side."""
        self.lanes.pop(side).side.close()
        self.missing[side] = why

    def foreign_seconds(self) -> float:
        """CPU time of this machine so far, less what this process and the sides have used."""
        everything = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        sides = sum(lane.side.cpu_seconds() for lane in self.lanes.values())
        idle = everything.idle + getattr(everything, "iowait", 0.0) + getattr(everything, "guest", 0.0)
        return sum(everything) - idle - sum(own[:4]) - sides


@dataclass(frozen=True)
class Race:
    """What is raced, and how long."""

    shape: Shape
    nbytes: int
    threads: int
    rounds: int
    seconds: float
    limit: float
    sides: tuple[str, ...]
    pythons: dict[str, str]

    def layers(self, name: str) -> int:
        """Layers of a format that the banks' bytes make, at least one."""
        return max(1, -(-self.nbytes // self._layer_bytes(name)))

    def banks(self, name: str) -> int:
        """Bytes of a side's banks."""
        return self.layers(name) * self._layer_bytes(name)

    def _layer_bytes(self, name: str) -> int:
        return self.shape.experts * self.shape.layout(formats.get(name)).nbytes

    def run(self, name: str) -> Result:
        """Race one format."""
        with ExitStack() as stack:
            found = Result()
            for side in self.sides:
                self._enter(name, side, found, stack)
            self._judge_bytes(name, found)
            memory = map_bytes(min(ROOF_BYTES, self.nbytes))
            memory[:] = 1

            def look() -> float:
                return roof([memory], self.threads)

            start, used = time.perf_counter(), found.foreign_seconds()
            for number in range(self.rounds + 1):
                order = list(found.lanes)
                turn = number % max(1, len(order))
                before = look()
                for side in order[turn:] + order[:turn]:
                    lane = found.lanes[side]
                    try:
                        layers = lane.side.run(self.seconds)
                    except SideError as failure:
                        found.drop(side, str(failure))
                        continue
                    after = look()
                    if number:
                        lane.layers.append(layers)
                        lane.shares.append(layers * lane.side.token_bytes / ((before + after) / 2))
                    before = after
            used, seconds = found.foreign_seconds() - used, time.perf_counter() - start
            found.foreign = max(0.0, used / seconds / psutil.cpu_count())
            return found

    def _enter(self, name: str, side: str, found: Result, stack: ExitStack) -> None:
        """Start a side that fits into memory beside those that run."""
        banks, layers = self.banks(name), self.layers(name)
        need = Need(banks=banks, transient=banks // layers + PROCESS_BYTES, spare=SPARE_BYTES)
        require(need, what=f"{name} of {side}, after {len(found.lanes)} others,")
        shape = self.shape
        task = (name, shape.hidden, shape.width, shape.experts, shape.top_k, layers, self.threads)
        try:
            process = Side(side, self.pythons[side], task, self.limit)
        except SideError as reason:
            found.missing[side] = str(reason)
            return
        stack.callback(process.close)
        found.lanes[side] = Lane(process)

    def _judge_bytes(self, name: str, found: Result) -> None:
        """Leave out sides that read other bytes than the format's."""
        expected = self.shape.top_k * self.shape.layout(formats.get(name)).nbytes
        for side, lane in list(found.lanes.items()):
            if abs(lane.side.token_bytes / expected - 1) > SAME:
                found.drop(side, f"reads {lane.side.token_bytes:,} bytes for a token, expected {expected:,}")


def table(results: dict[str, Result]) -> list[str]:
    """Markdown: a row for each format and side, the fastest first."""
    lines = ["| format | side | GB/s | share of the roof | freetoken's multiple |", "|---|---|---|---|---|"]
    for name, result in results.items():
        ours = result.lanes.get(OURS)
        for side, lane in sorted(result.lanes.items(), key=lambda item: -item[1].rate):
            multiple = ""
            if ours is not None and side != OURS:
                ratios = (mine / theirs for mine, theirs in zip(ours.layers, lane.layers, strict=True))
                multiple = f"{statistics.median(ratios):.2f}"
            share = statistics.median(lane.shares)
            lines.append(f"| {name} | {side} | {lane.rate / 1e9:.1f} | {share:.2f} | {multiple} |")
    return lines


def grouped(facts: Iterable[tuple[str, str, str]]) -> list[str]:
    """Lines `- side (formats): fact`, from (side, format, fact)."""
    found: dict[tuple[str, str], list[str]] = {}
    for side, name, fact in facts:
        found.setdefault((side, fact), []).append(name)
    return [f"- {side} ({', '.join(names)}): {fact}" for (side, fact), names in sorted(found.items())]


def processor() -> str:
    """The processor's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown processor"
    )


def report(race: Race, results: dict[str, Result]) -> str:
    """The table, who is missing, and what was raced on what."""
    missing = grouped((side, name, why) for name, result in results.items() for side, why in result.missing.items())
    raced = grouped(
        (side, name, lane.side.note) for name, result in results.items() for side, lane in result.lanes.items()
    )
    machine = (
        f"{processor()}, {race.threads} threads; {race.shape}; banks of {race.nbytes / 2**30:g} GiB for each side; "
    )
    machine += f"medians of {race.rounds} rounds of {race.seconds:g} s"
    foreign = ", ".join(f"{name} {result.foreign:.2f}" for name, result in results.items())
    machine += f". Share of the processors that others used meanwhile: {foreign}"
    parts = [table(results), *([["Missing:", "", *missing]] if missing else []), ["Raced:", "", *raced], [machine]]
    return "\n\n".join("\n".join(lines) for lines in parts)


def parse(arguments: list[str] | None) -> tuple[Race, list[str]]:
    """What to race, and in which formats."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--formats", nargs="+", choices=formats.names(), default=list(formats.names()), metavar="FORMAT")
    add("--sides", nargs="+", choices=tuple(PROGRAMS), default=tuple(PROGRAMS), metavar="SIDE")
    add("--shape", nargs=4, type=int, default=(2048, 768, 128, 8), metavar=tuple("HIEK"))
    add("--gib", type=float, default=2, help="GiB of banks for each side, rounded up to whole layers")
    add("--threads", type=int, default=len(topology.read().workers()))
    add("--rounds", type=int, default=5)
    add("--seconds", type=float, default=1, help="of a side in a round")
    add("--limit", type=float, default=300, help="seconds after which a silent side is given up")
    add("--python", action="append", default=[], metavar="NAME=PATH", help="another interpreter for a side")
    given = parser.parse_args(arguments)
    try:
        pythons = choose_pythons(given.python)
    except ValueError as error:
        parser.error(f"--python {error}")
    numbers = (*given.shape, given.gib, given.threads, given.rounds, given.seconds, given.limit)
    if not all(0 < n < math.inf for n in numbers):
        parser.error("every number must be above 0, and finite")
    if given.shape[3] > given.shape[2]:
        parser.error(f"a token cannot have {given.shape[3]} of {given.shape[2]} experts")
    race = Race(
        Shape(*given.shape), math.ceil(given.gib * 2**30), given.threads, given.rounds, given.seconds, given.limit,
        tuple(given.sides), pythons,
    )  # fmt: skip
    try:
        for name in given.formats:
            race.layers(name)
    except FormatError as error:
        parser.error(f"--shape: {error}")
    return race, given.formats


def main(arguments: list[str] | None = None) -> None:
    race, names = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results: dict[str, Result] = {}
    try:
        for name in names:
            print(f"{name}: {race.layers(name)} layers, {format_bytes(race.banks(name))} a side", file=sys.stderr)
            results[name] = race.run(name)
    except CapacityError as error:
        sys.exit(f"{error} Or take less with --gib, or fewer with --sides.")
    except KeyboardInterrupt:
        sys.exit(130)
    print(report(race, results))
    if not any(result.lanes for result in results.values()):
        sys.exit("no side could race")


if __name__ == "__main__":
    main()
