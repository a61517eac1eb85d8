"""Steps on the simulated device: whatever happens, none hangs, and no answer is lost, given twice or taken early."""

from __future__ import annotations

import gc
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from freetoken.device.simulated import SimulatedDevice, SimulatedHangError
from freetoken.duties import Duty, Steps, Worker
from freetoken.errors import DeviceError, StepError
from tests.duties.scenario import BrokenError, Scenario

SCENARIOS, STEPS = 1000, 100
"""100,000 steps in all."""


def test_steps_neither_hang_nor_lose_or_duplicate_an_answer() -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCENARIOS):
        chance = random.Random(~seed)
        scenario = Scenario(seed, deadline=chance.choice([0.0, 0.05]))
        upset(scenario, chance)
        raised = scenario.generate(STEPS)
        for error in raised:
            seen[re.sub(r"[\d.]+", "N", str(error))[:40]] += 1
        seen["steps"] += STEPS
        seen["compared"] += scenario.compared
        scenario.calm_down()
        scenario.generate(1)  # raises what is left over from before
        assert scenario.generate(2) == []
        scenario.check_flags()
        assert scenario.steps.usable
        twice = [what for what, n in Counter(scenario.work).items() if n > 1]
        assert not twice, f"done more than once: {twice[:5]}"
        scenario.steps.close()
        assert scenario.experts.done == scenario.experts.posted
    print(dict(seen))
    assert seen["steps"] == 100_000
    assert seen["compared"] > 150_000
    for what in ("step N: layer N, experts failed", "step N: layer N, rows failed", "cancelled", "launch failed"):
        assert sum(n for text, n in seen.items() if what in text) > 50, what
    assert sum(n for text, n in seen.items() if "its work has not" in text or "experts: its" in text) > 20


def upset(scenario: Scenario, chance: random.Random) -> None:
    """Some steps fail, take long, are cancelled, interrupted or not launched."""
    for _ in range(chance.randrange(4)):
        step, name = chance.randrange(STEPS), chance.choice(["experts", "rows"])
        slow = 0.08 if scenario.steps.deadline else 0.02
        scenario.plan[step, name, chance.randrange(scenario.layers)] = chance.choice([BrokenError("no"), slow])
    for _ in range(chance.randrange(3)):
        scenario.at(chance.random() * 0.05, scenario.steps.cancel)
    if chance.random() < 0.3:
        scenario.at(chance.random() * 0.05, lambda: setattr(scenario.device, "interrupt", KeyboardInterrupt()))
    if chance.random() < 0.3:
        fault = chance.choice(["launch", "launched"])
        scenario.at(chance.random() * 0.05, lambda: scenario.device.inject(fault))


def one_layer(
    queue_nodes: int, kernels: int, deadline: float = 0.0
) -> tuple[SimulatedDevice, Steps, Worker, Any, Duty]:
    device = SimulatedDevice(0, queue_nodes=queue_nodes)
    worker = Worker("experts")
    steps = Steps(device, [worker], deadline)
    bell, answer = device.flags(2)

    def build(stream: Any) -> None:
        stream.ring(bell)
        stream.wait(answer)
        for _ in range(kernels):
            stream.kernel(lambda: None)
        stream.ring(steps.finished_flag)

    return device, steps, worker, device.capture(build), Duty("experts", 3, lambda: None, answer, bell)


@pytest.mark.parametrize("queue_nodes", [1, 2, 16])
def test_the_old_order_hangs_and_is_caught(queue_nodes: int) -> None:
    """The duty is posted after the launch, which blocks: its graph does not fit behind the wait."""
    device, steps, worker, graph, duty = one_layer(queue_nodes, 20)
    step = steps.bind(graph, {worker: [duty]})

    def launch_in_the_old_order() -> None:
        device.launch(graph)
        worker.post(step.lines[worker], 2, 1)

    with pytest.raises(SimulatedHangError, match="launch of 23 nodes blocks for ever"):
        launch_in_the_old_order()


@pytest.mark.parametrize("queue_nodes", [1, 2, 16])
def test_an_answer_by_the_launching_thread_hangs_and_is_caught(queue_nodes: int) -> None:
    device, _, _, graph, duty = one_layer(queue_nodes, 20)

    def launch_and_answer() -> None:
        device.launch(graph)
        duty.answer.value = 1

    with pytest.raises(SimulatedHangError, match="blocks for ever"):
        launch_and_answer()


def test_the_old_order_works_where_the_queue_is_long_which_is_why_it_was_believed() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20)
    step = steps.bind(graph, {worker: [duty]})
    device.launch(graph)
    worker.post(step.lines[worker], 2, 1)
    while not device.is_idle():
        device.clock.pause(1e-6)


@pytest.mark.parametrize("queue_nodes", [1, 2, 16, 64, 5000])
def test_the_new_order_never_does(queue_nodes: int) -> None:
    _, steps, worker, graph, duty = one_layer(queue_nodes, 6000)
    step = steps.bind(graph, {worker: [duty]})
    for _ in range(3):
        steps.wait(steps.launch(step))
    assert worker.done == 3


def test_a_duty_that_calls_the_device_is_caught() -> None:
    device, steps, worker, graph, duty = one_layer(64, 1)
    step = steps.bind(graph, {worker: [Duty("rows", None, device.is_idle, duty.answer, duty.bell)]})
    with pytest.raises(StepError, match="rows failed: SimulatedHangError: the work of a duty called is_idle"):
        steps.wait(steps.launch(step))


def test_a_failed_duty_is_named_at_the_next_boundary_and_the_next_generation_works() -> None:
    scenario = Scenario(3)
    scenario.plan[5, "experts", 0] = BrokenError("no room")
    raised = scenario.generate(10)
    assert len(raised) == 1
    error = raised[0]
    assert isinstance(error, StepError) and isinstance(error.__cause__, BrokenError)
    assert str(error) == "step 5: layer 0, experts failed: BrokenError: no room"
    assert error.facts == {
        "step": 5, "side": "host", "layer": 0, "duty": "experts", "waited": 0.0, "usable": True,
    }  # fmt: skip
    assert scenario.generate(20) == []


@pytest.mark.parametrize("queue_nodes", [4, 64])
def test_a_duty_that_never_returns_is_given_up(queue_nodes: int) -> None:
    """Also where the launch itself waits for it."""
    device, steps, worker, graph, duty = one_layer(queue_nodes, 20, deadline=2.0)
    step = steps.bind(graph, {worker: [replace(duty, work=lambda: device.spend(float("inf")))]})
    with pytest.raises(
        StepError, match=r"its work has not returned for [\d.]+ s, and the graph waits for flag 1"
    ) as caught:
        steps.wait(steps.launch(step))
    facts = caught.value.facts
    assert (facts["side"], facts["layer"], facts["step"], facts["usable"]) == ("host", 3, 1, False)
    assert 2.0 < facts["waited"] < 2.6
    assert not steps.usable
    with pytest.raises(StepError, match="work that was given up is still running in experts"):
        steps.launch(step)
    assert steps.finished == 1, "the step was not released"
    steps.close()


def test_a_late_duty_makes_the_model_usable_again_when_it_returns() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20, deadline=2.0)
    times = iter([5.0] + [1e-4] * 100)
    step = steps.bind(graph, {worker: [replace(duty, work=lambda: device.spend(next(times)))]})
    with pytest.raises(StepError, match="its work has not returned"):
        steps.wait(steps.launch(step))
    assert not steps.usable
    while not steps.usable:
        device.clock.pause(0.1)
    for _ in range(20):
        steps.wait(steps.launch(step))
    assert duty.answer.value == 0


def test_a_device_that_does_not_ring_is_named() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20, deadline=2.0)
    step = steps.bind(graph, {worker: [duty]})
    steps.wait(steps.launch(step))
    device.inject("silent bell")
    with pytest.raises(StepError, match="layer 3, experts: the device has not rung flag 0") as caught:
        steps.wait(steps.launch(step))
    assert caught.value.facts["side"] == "device"
    # the operation that rings is gone for good, so the graph never ends
    with pytest.raises(StepError, match="do not end within 4 s: the device is still busy"):
        steps.launch(step)
    assert not steps.usable
    with pytest.raises(StepError, match="the device is lost"):
        steps.launch(step)
    steps.close()


def test_a_device_that_does_not_end_is_named() -> None:
    _, steps, _, graph, _ = one_layer(64, 20, deadline=2.0)
    step = steps.bind(graph, {})
    with pytest.raises(StepError, match="all duties are done, and the device has not ended the step") as caught:
        steps.wait(steps.launch(step))
    assert caught.value.facts["side"] == "device"


def test_a_lost_device_is_named() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20, deadline=2.0)
    step = steps.bind(graph, {worker: [duty]})
    device.inject("lost")
    with pytest.raises(StepError, match="the device has not ended the step"):
        steps.wait(steps.launch(step))
    with pytest.raises(DeviceError, match="simulated fault"):
        steps.launch(step)
    assert not steps.usable


def test_closing_while_a_step_is_parked_releases_it() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20)
    number = steps.launch(steps.bind(graph, {worker: [duty]}))
    steps.close()
    assert steps.finished == number and device.is_idle()
    steps.close()
    with pytest.raises(StepError, match="closed"):
        steps.launch(steps.bind(graph, {}))


def test_a_dropped_generation_releases_its_steps() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20)
    step = steps.bind(graph, {worker: [duty]})

    def tokens() -> Any:
        try:
            while True:
                yield steps.launch(step)
        finally:
            steps.cancel()

    generation = tokens()
    number = next(generation)
    del generation
    with pytest.raises(StepError, match=f"step {number} was cancelled"):
        steps.wait(number)
    steps.wait(steps.launch(step))
    assert device.is_idle()


def test_ctrl_c_in_a_wait_cancels_at_once() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20)
    slow = Duty("experts", 3, lambda: device.spend(10.0), duty.answer, duty.bell)
    step = steps.bind(graph, {worker: [slow]})
    number = steps.launch(step)
    device.later(0.5, lambda: setattr(device, "interrupt", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        steps.wait(number)
    assert device.time < 1.0
    steps.wait(steps.launch(step))
    assert steps.usable


def test_flags_may_not_stand_for_two_things() -> None:
    _, steps, worker, graph, duty = one_layer(64, 2)
    with pytest.raises(ValueError, match="is used twice"):
        steps.bind(graph, {worker: [duty, duty]})
    with pytest.raises(ValueError, match=r"workers \['other'\] are not among \['experts'\]"):
        steps.bind(graph, {Worker("other"): [duty]})


def test_workers_are_of_one_steps() -> None:
    device, worker = SimulatedDevice(), Worker("experts")
    steps = Steps(device, [worker], 0)
    with pytest.raises(ValueError, match=r"workers \['experts'\]: each is for one Steps"):
        Steps(device, [worker], 0)
    with pytest.raises(ValueError, match="each is for one Steps, and once"):
        Steps(device, [Worker("rows")] * 2, 0)
    with pytest.raises(ValueError, match="step 1 was never launched, the last one is 0"):
        steps.wait(1)


def test_a_graph_that_is_dropped_runs_to_its_end() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20, deadline=1.0)
    number = steps.launch(steps.bind(graph, {worker: [replace(duty, work=lambda: device.spend(1e-3))]}))
    gc.collect()
    steps.wait(number)


def test_a_cancelled_step_stays_cancelled() -> None:
    """Also when later ones were launched, and the flags were put back for them."""
    _, steps, worker, graph, duty = one_layer(64, 20)
    done: list[int] = []
    step = steps.bind(graph, {worker: [replace(duty, work=lambda: done.append(worker.number))]})
    steps.wait(steps.launch(step))
    first, second = steps.launch(step), steps.launch(step)
    steps.cancel()
    third = steps.launch(step)
    steps.wait(third)
    assert third in done and second not in done
    for number in (first, second):
        with pytest.raises(StepError, match=f"step {number} was cancelled"):
            steps.wait(number)
    steps.wait(1)


@pytest.mark.parametrize("queue_nodes", [2, 64])
def test_closing_while_slow_work_goes_on(queue_nodes: int) -> None:
    """It takes longer than closing waits for: what is left of the step is released, and the device ends."""
    device, steps, worker, graph, duty = one_layer(64, 20)
    second = replace(duty, bell=device.flags(3)[1], answer=device.flags(3)[2])

    def build(stream: Any) -> None:
        for part in (duty, second):
            stream.ring(part.bell)
            stream.wait(part.answer)
        stream.ring(steps.finished_flag)

    graph = device.capture(build)
    step = steps.bind(graph, {worker: [replace(duty, work=lambda: device.spend(7.0)), second]})
    if queue_nodes == 2:  # from inside the launch, as the handler of a signal
        device._room = 2
        device.later(0.1, steps.close)
        with pytest.raises(StepError, match="closed"):
            steps.wait(steps.launch(step) and steps.launch(step))
    else:
        steps.launch(step)
        steps.close()
    while not device.is_idle():
        device.clock.pause(0.1)
    assert worker.done == worker.posted


def test_work_that_closes_waits_or_launches_has_failed() -> None:
    for name in ("close", "drain", "launch", "wait"):
        _, steps, worker, graph, duty = one_layer(64, 20)

        def work(name: str = name, steps: Steps = steps) -> None:
            getattr(steps, name)(*([steps.number] if name in ("launch", "wait") else []))

        step = steps.bind(graph, {worker: [replace(duty, work=work)]})
        with pytest.raises(StepError, match=f"experts failed: DeviceError: the work of a duty called {name}"):
            steps.wait(steps.launch(step))
        steps.close()


def test_what_was_seen_of_an_old_step_does_nothing_to_a_new_one() -> None:
    """The watchdog may be late itself."""
    device, steps, worker, graph, duty = one_layer(64, 20)
    done: list[int] = []
    step = steps.bind(graph, {worker: [replace(duty, work=lambda: (done.append(worker.number), device.spend(1e-3)))]})
    old = steps.launch(step)
    steps.cancel()
    steps.drain()
    new = steps.launch(step)
    steps.release(old)
    assert not steps.fail(old, StepError("late", step=old))
    steps.wait(new)
    assert new in done


def test_an_old_turn_cannot_be_taken_over() -> None:
    _, steps, worker, graph, duty = one_layer(64, 20)
    states: list[int] = []
    step = steps.bind(graph, {worker: [replace(duty, work=lambda: states.append(worker.state))]})
    steps.wait(steps.launch(step))
    states.clear()

    def work() -> None:
        states.append(worker.state)
        assert len(states) < 2 or not worker.answer(states[0], takeover=True)

    step = steps.bind(graph_of(steps), {worker: [duty_of(steps, work)]})
    steps.wait(steps.launch(step))
    steps.wait(steps.launch(step))
    assert len(set(states)) == 2 and not worker.stuck


def graph_of(steps: Steps) -> Any:
    device: Any = steps.device
    bell, answer = device.flags(2)
    device.spare = bell, answer

    def build(stream: Any) -> None:
        stream.ring(bell)
        stream.wait(answer)
        stream.ring(steps.finished_flag)

    return device.capture(build)


def duty_of(steps: Steps, work: Any) -> Duty:
    device: Any = steps.device
    return Duty("experts", 3, work, device.spare[1], device.spare[0])


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_a_failure_without_words_is_one() -> None:
    _, steps, worker, graph, duty = one_layer(64, 20)

    def work() -> None:
        raise MuteError

    with pytest.raises(StepError, match="experts failed: MuteError") as caught:
        steps.wait(steps.launch(steps.bind(graph, {worker: [replace(duty, work=work)]})))
    assert isinstance(caught.value.__cause__, MuteError)


def test_bad_arguments() -> None:
    device, steps, worker, graph, duty = one_layer(64, 20)
    for deadline in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="expected seconds, or 0 for none"):
            Steps(device, [], deadline)
    step = steps.bind(graph, {worker: [duty]})
    other = one_layer(64, 20)[1]
    with pytest.raises(ValueError, match="bound to other steps"):
        other.launch(step)
    with pytest.raises(ValueError, match="is used twice"):
        steps.bind(graph, {worker: [Duty("rows", 0, lambda: None, device.flags(1)[0], duty.answer)]})


@pytest.mark.parametrize("number", [2**31 - 3, 2**32 - 3])
def test_counters_that_wrap(number: int) -> None:
    """Bells and the finished flag are 32 bits."""
    _, steps, worker, graph, duty = one_layer(64, 2)
    duty.bell.value = steps.finished_flag.value = 2 * number
    steps._count_from(0)
    step = steps.bind(graph, {worker: [duty]})
    for _ in range(10):
        steps.wait(steps.launch(step))
    assert worker.done == steps.finished == 10
    steps.cancel()
    steps.wait(steps.launch(step))


def test_a_worker_that_is_behind_holds_launches_up() -> None:
    """The device answers everything itself and never waits for it."""
    device = SimulatedDevice(0, preemption=0.5)
    worker = Worker("experts")
    steps = Steps(device, [worker], 0)
    bell, answer = device.flags(2)

    def build(stream: Any) -> None:
        stream.ring(bell, answered=True)
        stream.ring(steps.finished_flag)

    step = steps.bind(device.capture(build), {worker: [Duty("experts", 0, lambda: None, answer, bell)]})
    for _ in range(300):
        steps.launch(step)
        assert worker.posted - worker.done <= 2
    steps.drain()
    assert steps.finished == 300
