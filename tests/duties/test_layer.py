"""Expert layers as duties: the same bits as a call of the layer, on a standing team of threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from freetoken import formats
from freetoken.banks import Bank
from freetoken.device.base import Flag, make_flags
from freetoken.duties import Duty, Line, Worker
from freetoken.duties._layer import LayerWork
from freetoken.executor import kernel_choices
from freetoken.formats.record import Expert, RecordLayout
from freetoken.kernels._experts import ExpertLayer, Scratch
from freetoken.kernels._shards import ShardedLayer

torch = pytest.importorskip("torch")
H, INTERMEDIATE, E, K = 128, 96, 8, 3


def make_layer(seed: int, intermediate: int = INTERMEDIATE) -> ExpertLayer:
    rng = np.random.default_rng(seed)
    fmt = formats.get("q8_0")
    layout = RecordLayout(fmt, H, intermediate, False)
    bank = Bank(layout, E)
    for e in range(E):
        shapes = [(intermediate, H), (intermediate, H), (H, intermediate)]
        bank.put(e, Expert(*(fmt.quantize(rng.standard_normal(s, np.float32)) for s in shapes), None, None, None))
    choice = kernel_choices(fmt, "auto", torch.bfloat16)[0]
    return ExpertLayer(bank.records, layout, choice.kernel)


class Buffers:
    """What one layer reads and writes."""

    def __init__(self, tokens: int) -> None:
        self.x = np.zeros((tokens, H), np.float32)
        self.ids = np.full((tokens, K), -1, np.int32)
        self.weights = np.zeros((tokens, K), np.float32)
        self.out = np.zeros((tokens, H), np.float32)

    def fill(self, rng: np.random.Generator) -> None:
        self.x[:] = rng.standard_normal(self.x.shape, np.float32)
        self.ids[:] = rng.integers(-1, E, self.ids.shape)
        self.weights[:] = rng.random(self.weights.shape, np.float32)

    def expected(self, layer: Any) -> Any:
        out = np.empty_like(self.out)
        layer.run(self.x, self.ids, self.weights, out, Scratch(), 1)
        return out


def run_thread(worker: Worker) -> threading.Thread:
    thread = threading.Thread(target=worker.run, daemon=True)
    thread.start()
    return thread


def until(condition: Any) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-5)


def take(flag: Flag) -> None:
    """As the device does."""
    until(lambda: flag.value == 1)
    flag.value = 0


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("tokens", [1, 4])
def test_layers_of_steps_on_a_team(threads: int, tokens: int) -> None:
    """48 steps of 3 layers that share their scratch, posted two ahead."""
    layers = [make_layer(i) for i in range(2)] + [
        ShardedLayer([make_layer(7, 64), make_layer(8, 32)], (0, 1), [(), ()])
    ]
    buffers, scratch = Buffers(tokens), Scratch()
    bells, answers = make_flags(3), make_flags(3)
    works = [
        LayerWork(layer, buffers.x, buffers.ids, buffers.weights, buffers.out, scratch, threads) for layer in layers
    ]
    duties = [Duty("experts", i, work, answers[i], bells[i]) for i, work in enumerate(works)]
    worker = Worker("experts", threads)
    line = Line(duties)
    thread = run_thread(worker)
    rng = np.random.default_rng(5)
    posted = 0
    for step in range(1, 49):
        while posted < min(step + 1, 48):
            posted += 1
            worker.post(line, 2 * posted, posted)
        for i, layer in enumerate(layers):
            buffers.fill(rng)
            buffers.out[:] = np.nan
            bells[i].value += 2
            take(answers[i])
            np.testing.assert_array_equal(buffers.out, buffers.expected(layer), err_msg=f"step {step}, layer {i}")
    until(lambda: worker.done == 48)
    worker.stop()
    thread.join(20)
    assert not thread.is_alive()


def test_a_team_larger_than_the_work_was_made_for() -> None:
    layer, buffers = make_layer(1), Buffers(2)
    buffers.fill(np.random.default_rng(1))
    bell, answer = make_flags(2)
    work = LayerWork(layer, buffers.x, buffers.ids, buffers.weights, buffers.out, Scratch(), 2)
    worker = Worker("experts", 6)
    thread = run_thread(worker)
    worker.post(Line([Duty("experts", 0, work, answer, bell)]), 2, 1)
    bell.value = 2
    take(answer)
    np.testing.assert_array_equal(buffers.out, buffers.expected(layer))
    worker.stop()
    thread.join(20)


def switches() -> dict[str, int]:
    """Thread -> how often it gave up its core, of all threads of this process."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
        found[task.name] = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return found


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux: it counts context switches")
def test_an_idle_team_sleeps() -> None:
    """None of its threads runs while there is nothing to do; one that spins or naps is switched all the time."""
    others = set(switches())
    layer, buffers = make_layer(1), Buffers(1)
    bell, answer = make_flags(2)
    worker = Worker("experts", 3)
    thread = run_thread(worker)
    work = LayerWork(layer, buffers.x, buffers.ids, buffers.weights, buffers.out, Scratch(), 3)
    worker.post(Line([Duty("experts", 0, work, answer, bell)]), 2, 1)
    bell.value = 2
    take(answer)
    until(lambda: worker.phase == "idle")
    team = set(switches()) - others
    assert len(team) >= 3

    def asleep() -> bool:
        before = switches()
        time.sleep(0.3)
        after = switches()
        return all(after[task] == before[task] for task in team)

    until(asleep)
    worker.stop()
    thread.join(20)


def test_bad_buffers_are_refused() -> None:
    layer, good = make_layer(1), Buffers(2)
    for x, ids, message in [
        (good.x[:1], good.ids, r"x is \(1, 128\)"),
        (good.x, good.ids[:, :0], "at least one token and one route"),
        (good.x, np.zeros((1, K), np.int32), "weights are 2 x 3"),
    ]:
        with pytest.raises(ValueError, match=message):
            LayerWork(layer, x, np.ascontiguousarray(ids), good.weights, good.out, Scratch(), 2)
    with pytest.raises(TypeError):
        LayerWork(None, good.x, good.ids, good.weights, good.out, Scratch(), 2)


def test_scratch_that_grows_while_a_layer_is_computed() -> None:
    layer, buffers, scratch = make_layer(1), Buffers(1), Scratch()
    buffers.fill(np.random.default_rng(1))
    expected = buffers.expected(layer)
    bell, answer = make_flags(2)
    work = LayerWork(layer, buffers.x, buffers.ids, buffers.weights, buffers.out, scratch, 2)
    worker = Worker("experts", 2)
    thread = run_thread(worker)
    line = Line([Duty("experts", 0, work, answer, bell)])
    kept = []
    for step in range(1, 200):
        worker.post(line, 2 * step, step)
        bell.value += 2
        wide = Buffers(step)
        kept.append(LayerWork(layer, wide.x, wide.ids, wide.weights, wide.out, scratch, 2))
        take(answer)
        np.testing.assert_array_equal(buffers.out, expected)
        until(lambda step=step: worker.done == step)
    worker.stop()
    thread.join(20)


@pytest.mark.parametrize("threads", [1, 3])
def test_how_long_a_layer_took_is_there_before_its_answer(threads: int) -> None:
    layer, buffers, took = make_layer(1), Buffers(2), np.zeros(1, np.int64)
    buffers.fill(np.random.default_rng(1))
    bell, answer = make_flags(2)
    work = LayerWork(layer, buffers.x, buffers.ids, buffers.weights, buffers.out, Scratch(), threads, took)
    worker = Worker("experts", threads)
    thread = run_thread(worker)
    for step in (1, 2, 3):
        took[0] = 0
        start = time.monotonic_ns()
        worker.post(Line([Duty("experts", 0, work, answer, bell)]), 2 * step, step)
        if step == 2:
            worker.skip(step)
        bell.value = 2 * step
        take(answer)
        if step == 2:
            assert took[0] == 0, "it was skipped"
        else:
            assert 0 < took[0] <= time.monotonic_ns() - start
    worker.stop()
    thread.join(20)


def test_a_time_is_one_number() -> None:
    buffers = Buffers(1)
    with pytest.raises(ValueError, match="took has 2 numbers, expected one"):
        LayerWork(
            make_layer(1), buffers.x, buffers.ids, buffers.weights, buffers.out, Scratch(), 1, np.zeros(2, np.int64)
        )
