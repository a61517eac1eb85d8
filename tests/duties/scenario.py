"""A random model on the simulated device, whose data shows whether each answer was waited for and given once."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

from freetoken.device.base import Flag, Stream
from freetoken.device.simulated import SimulatedDevice
from freetoken.duties import Duty, StepGraph, Steps, Worker
from freetoken.errors import DeviceError, StepError


class WrongDataError(AssertionError):
    """A graph went on with something else than what its duty had answered."""


class BrokenError(RuntimeError):
    """What the work of a duty raises here."""


class Scenario:
    """Layers with experts on one worker and, in some, rows on another, captured with and without statistics.

    Odd seeds have a tail. A kernel puts a number into a layer's input, unlike any before; the duty turns it into the
    layer's output; a kernel after the wait compares. Rows are read with a bell or, filled from the host's own
    number of the step, without.
    """

    def __init__(self, seed: int, *, deadline: float = 0.0, **device: Any) -> None:
        self.random = random.Random(seed)
        pick = self.random.choice
        options = {"queue_nodes": pick([1, 2, 5, 16, 64, 1024]), "preemption": pick([0.0, 0.0, 0.02])} | device
        self.device = SimulatedDevice(seed, **options)
        self.experts, self.rows = Worker("experts"), Worker("rows")
        self.steps = Steps(self.device, [self.experts, self.rows], deadline)
        self.layers = self.random.randint(1, 5)
        self.rows_with_bell = pick([True, False])
        self.rows_at = self.random.randrange(self.layers)
        self.plan: dict[tuple[int, str, int], object] = {}  # what happens in (step, duty, layer)
        self.work: list[tuple[int, str, int]] = []  # what was done, by what the device asked
        self.begun = self.compared = 0
        self.inputs = [0] * self.layers
        self.outputs = [0] * self.layers
        self.row_input = self.row_output = self.last_row = 0
        self.calm = False
        self.asked: dict[StepGraph, set[tuple[str, int]]] = {}  # duties of a step that are the host's
        self.row_answer = self.device.flags(1)[0]  # of both graphs: the rows lie in one place
        self.tail = self.device.capture(self._end) if seed % 2 else None
        self.graphs = [self._capture(statistics=0), self._capture(statistics=self.random.randint(1, 4))]

    def _capture(self, statistics: int) -> StepGraph:
        bells, answers = self.device.flags(self.layers), self.device.flags(self.layers)
        row_bell, row_answer = self.device.flags(1)[0], self.row_answer
        experts = [
            Duty("experts", i, lambda i=i: self._do("experts", i), answers[i], bells[i])  # type: ignore[misc]
            for i in range(self.layers)
        ]
        bell = row_bell if self.rows_with_bell else None
        rows = [Duty("rows", self.rows_at, lambda: self._do("rows", self.rows_at), row_answer, bell)]

        asked = {("experts", i) for i in range(self.layers)} | {("rows", self.rows_at)}

        def build(stream: Stream) -> None:
            stream.kernel(self._begin)
            if bell:
                stream.ring(bell)
            side = stream.fork()
            for _ in range(statistics):
                side.kernel(lambda: None)
            for i in range(self.layers):
                if i == self.rows_at:
                    # without a bell the next step's rows may come as soon as the answer is taken
                    stream.wait(row_answer, take=self.rows_with_bell)
                    stream.kernel(self._compare_rows)
                    if not self.rows_with_bell:
                        stream.take(row_answer)
                stream.kernel(lambda i=i: self._fill(i))  # type: ignore[misc]
                if self.random.random() < 0.2:
                    self._answer_on_device(stream, i, bells[i], answers[i])
                    asked.discard(("experts", i))
                else:
                    stream.ring(bells[i])
                stream.wait(answers[i])
                stream.kernel(lambda i=i: self._compare(i))  # type: ignore[misc]
            stream.join(side)
            if self.tail is None:
                self._end(stream)

        step = self.steps.bind(self.device.capture(build), {self.experts: experts, self.rows: rows})
        self.asked[step] = asked
        return step

    def _answer_on_device(self, stream: Any, i: int, bell: Flag, answer: Flag) -> None:
        """A kernel that finds nothing to do for the host: it says so, and answers itself."""

        def nothing() -> None:
            self.outputs[i] = self._answer_of(self.inputs[i])
            answer.value = 1

        stream.kernel(nothing)
        stream.ring(bell, answered=True)

    # -- on the device

    def _end(self, stream: Stream) -> None:
        stream.kernel(lambda: None)
        stream.ring(self.steps.finished_flag)

    def _begin(self) -> None:
        self.begun += 1
        self.row_input = self.begun

    def _fill(self, i: int) -> None:
        self.inputs[i] = self.begun * 8 + i

    @staticmethod
    def _answer_of(value: int) -> int:
        return value * 31 + 7

    def _compare(self, i: int) -> None:
        if not self.skipping:
            self.compared += 1
            if self.outputs[i] != self._answer_of(self.inputs[i]):
                raise WrongDataError(f"layer {i}: {self.outputs[i]} for {self.inputs[i]}")

    def _compare_rows(self) -> None:
        if self.skipping:
            return
        self.compared += 1
        if self.rows_with_bell:
            if self.row_output != self._answer_of(self.row_input):
                raise WrongDataError(f"rows: {self.row_output} for {self.row_input}")
        elif self.row_output <= self.last_row:
            raise WrongDataError(f"rows of step {self.row_output} after those of {self.last_row}")
        self.last_row = self.row_output

    @property
    def skipping(self) -> bool:
        """Whether what steps compute now counts for nothing."""
        return self.steps._dirty

    # -- on the host

    def _do(self, name: str, layer: int) -> None:
        worker = self.experts if name == "experts" else self.rows
        happening = 0.0 if self.calm else self.plan.get((worker.number, name, layer), 0.0)
        self.work.append((worker.number, name, layer))
        if isinstance(happening, BaseException):
            raise happening
        assert isinstance(happening, float)
        self.device.spend(happening or self.random.random() * 100e-6, self.random.choice([0, 0, 1 << 20]))
        if name == "experts":
            self.outputs[layer] = self._answer_of(self.inputs[layer])
        else:
            self.row_output = self._answer_of(self.row_input) if self.rows_with_bell else self.rows.number

    # -- the caller

    def at(self, seconds: float, event: Callable[[], object]) -> None:
        """Let something happen, if it is not calm by then."""

        def happen() -> None:
            if not self.calm:
                event()
                self.device.poke()

        self.device.later(seconds, happen)

    def calm_down(self) -> None:
        """From now on nothing goes wrong."""
        self.calm = True
        for fault in ("launch", "launched"):
            while self.device.take_fault(fault):
                pass

    def generate(self, n: int) -> list[BaseException]:
        """Run n steps, two at once, with or without statistics; what was raised, each ending a generation."""
        raised: list[BaseException] = []
        before: tuple[int, StepGraph] | None = None
        for _ in range(n):
            try:
                graph = self.random.choice(self.graphs)
                number = self.steps.launch(graph, self.tail)
                if before is not None:
                    self.wait(*before)
                before = number, graph
            except (StepError, DeviceError, KeyboardInterrupt) as error:
                if (
                    type(error) is not StepError
                    and not isinstance(error, KeyboardInterrupt)
                    and "simulated fault" not in str(error)
                ):
                    raise
                raised.append(error)
                before = None
                end = self.device.time + 1
                while not self.steps.usable:  # until late work returns
                    assert self.device.time < end, raised
                    with contextlib.suppress(KeyboardInterrupt):
                        self.device.clock.pause(1e-3)
        try:
            if before is not None:
                self.wait(*before)
        except (StepError, KeyboardInterrupt) as error:
            raised.append(error)
        return raised

    def wait(self, number: int, graph: StepGraph) -> None:
        """As `Steps.wait`: when that says that all is well, everything was done."""
        self.steps.wait(number)
        missing = self.asked[graph] - {(name, layer) for step, name, layer in self.work if step == number}
        assert not missing, f"step {number} ended well, and nobody did {missing}"

    def check_flags(self) -> None:
        """Nothing is left over after a step that ended well."""
        for graph in self.graphs:
            for duty in graph.duties:
                assert duty.answer.value == 0, f"{duty}: an answer was given that nobody took"
