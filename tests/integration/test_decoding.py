"""`generate` in captured steps gives the tokens of transformers' own loop, whatever is asked and whatever fails."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, DynamicCache, GenerationConfig, StoppingCriteria, StoppingCriteriaList

import freetoken
from freetoken.decode import graph
from freetoken.device.base import Device
from freetoken.device.simulated import SimulatedDevice
from freetoken.errors import ClosedError, ConfigError, DeviceError, FreeTokenError, StepError, UnsupportedError
from freetoken.executor import BoundLayer
from freetoken.integration.device import open_device
from freetoken.integration.fixed_cache import FixedForward, _Memory, cache_argument
from freetoken.offload.experts import DeviceExperts
from freetoken.offload.host import HandOff, HostExperts
from tests.integration.test_device import experts_of
from tests.integration.test_families import LOADS
from tests.support.devices import DEVICES, open_for_test, with_interpreter
from tests.support.families import make_config, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

NEW = 8
STRATEGIES = ("cpu", "offload", "hybrid", "resident")


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from open_for_test(request.param, lambda: with_interpreter(5))


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FREETOKEN_GPU_RESERVE", "0")
        patch.setattr("freetoken.offload.calibrate._REPLAYS", 1)
        yield


def place(folder: Path, device: Device, strategy: str = "cpu") -> Any:
    cache = 0.5 if strategy in ("offload", "hybrid") else "auto"
    how = {"max_fetch": 0.5} if strategy == "hybrid" else {}
    return freetoken.load(folder, device=device, strategy=strategy, cache=cache, dtype=torch.float32, **how)[0]


@pytest.fixture(scope="module")
def placed(tiny: Path, device: Device) -> Any:
    """Of the strategy that is quickest here. Tests that change it place their own."""
    return place(tiny, device)


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each step that is launched as a graph."""
    launch, seen = DeviceExperts.launch, list[int]()

    def count(*args: Any) -> int:
        seen.append(launch(*args))
        return seen[-1]

    monkeypatch.setattr(DeviceExperts, "launch", count)
    return seen


@pytest.fixture
def why(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "freetoken.integration")
    return caplog


def prompts(rows: int, device: Device, tokens: int = 7) -> dict[str, torch.Tensor]:
    """Of different lengths, padded on the left."""
    ids = torch.randint(3, 60, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    mask = torch.ones_like(ids)
    for row in range(rows):
        mask[row, : row * 3 % 5] = 0
    on = device.torch_device
    return {"input_ids": ids.masked_fill(mask == 0, 0).to(on), "attention_mask": mask.to(on)}


def plainly(model: Any, **how: Any) -> Any:
    """By transformers' own loop, on the same model."""
    torch.manual_seed(11)
    return type(model).generate(model, **how)


def check_same(model: Any, replays: list[int], steps: int | None = None, **how: Any) -> torch.Tensor:
    """The same tokens, and the same random numbers afterwards; steps: that were replayed, None for any number."""
    on = model.device
    expected = plainly(model, **how)
    following = torch.rand(3, device=on)
    replays.clear()
    torch.manual_seed(11)
    found: torch.Tensor = model.generate(**how)
    assert torch.equal(found, expected)
    assert torch.equal(torch.rand(3, device=on), following)
    assert replays if steps is None else len(replays) == steps
    return found


# -- the same tokens


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy(tiny: Path, device: Device, replays: list[int], strategy: str) -> None:
    model = place(tiny, device, strategy)
    for rows in (1, 3):
        check_same(model, replays, 3, **prompts(rows, device), max_new_tokens=4)


def test_every_size(placed: Any, device: Device, replays: list[int]) -> None:
    """Up and down again: what one text has left is nothing to the next."""
    for rows in (1, 2, 5, 8, 3, 1):
        check_same(placed, replays, NEW - 1, **prompts(rows, device), max_new_tokens=NEW)


def test_windows_and_a_cache_that_grows(
    gpt_oss: Path, device: Device, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph, "SHORTEST", 8)
    monkeypatch.setattr("freetoken.integration.decoding._AHEAD", 3)
    model = place(gpt_oss, device)
    check_same(model, replays, 29, **prompts(2, device, 5), max_new_tokens=30)
    check_same(model, replays, 3, **prompts(2, device, 9), max_new_tokens=4, do_sample=True)
    assert set(model.generate._decoder._kept.graph._steps) == {(2, 16), (2, 64)}, "what saw a smaller cache is gone"


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8},
        {"min_p": 0.05, "repetition_penalty": 1.4, "min_new_tokens": 5},
        {"typical_p": 0.9, "num_return_sequences": 2},
    ],
)
def test_sampling(placed: Any, device: Device, replays: list[int], how: dict[str, Any]) -> None:
    for rows in (1, 3):
        check_same(placed, replays, **prompts(rows, device), max_new_tokens=NEW, do_sample=True, **how)


def test_kinds_of_sampling_come_and_go(
    placed: Any, device: Device, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("freetoken.integration.decoding._SAMPLERS", 2)
    for _ in range(2):
        for k in (3, 4, 5):
            check_same(placed, replays, 3, **prompts(1, device), max_new_tokens=4, do_sample=True, top_k=k)
    assert len(placed.generate._decoder._kept.samplers) == 2


def test_texts_that_end(placed: Any, device: Device, replays: list[int]) -> None:
    """One after the other: padding follows; one step is too many, and its random numbers are given back."""
    given = prompts(3, device) | {"max_new_tokens": 12}
    free = plainly(placed, **given)[:, 7:]
    ends = [int(free[0, 2]), int(free[1, 5]), int(free[2, 3])]
    found = check_same(placed, replays, **given, eos_token_id=ends)
    assert (found[:, 7:] == 0).any()
    check_same(placed, replays, **given, eos_token_id=ends, do_sample=True, temperature=0.3)
    check_same(placed, replays, 3, **prompts(1, device), max_new_tokens=12, eos_token_id=[int(plainly(
        placed, **prompts(1, device), max_new_tokens=12)[0, 9])])  # fmt: skip


def test_one_token(placed: Any, device: Device, replays: list[int]) -> None:
    check_same(placed, replays, 0, **prompts(2, device), max_new_tokens=1)


def test_stop_strings(gpt_oss: Path, device: Device, replays: list[int]) -> None:
    model = place(gpt_oss, device)
    tokenizer = AutoTokenizer.from_pretrained(Path(freetoken.__file__).parent / "demo")
    given = prompts(1, device) | {"max_new_tokens": 10, "tokenizer": tokenizer}
    free = plainly(model, **given)
    stop = tokenizer.decode(free[0, 10])
    found = check_same(model, replays, **given, stop_strings=stop)
    assert found.shape[1] < free.shape[1]
    config = GenerationConfig(stop_strings=[stop], max_new_tokens=10, pad_token_id=0, eos_token_id=2)
    check_same(model, replays, **prompts(1, device), generation_config=config, tokenizer=tokenizer)
    assert config.stop_strings == [stop]


class Streamer:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: list[list[int]] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        assert value.device.type == "cpu"
        self.given.append(value.flatten().tolist())

    def end(self) -> None:
        self.ended += 1


@pytest.mark.parametrize("how", [{}, {"no_repeat_ngram_size": 2}], ids=["replayed", "plain"])
def test_streaming(placed: Any, device: Device, how: dict[str, Any]) -> None:
    """The prompt once, then tokens as they come."""
    given = prompts(2, device) | {"max_new_tokens": 5, "eos_token_id": 61} | how
    one, other = Streamer(), Streamer()
    plainly(placed, **given, streamer=one)
    placed.generate(**given, streamer=other)
    assert one.given == other.given and one.ended == other.ended == 1


class Until(StoppingCriteria):  # type: ignore[misc]
    """Ends texts at a length, the first one earlier; compares with a tensor of its own."""

    def __init__(self, device: torch.device) -> None:
        self.lengths = torch.tensor([9, 12], device=device)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return torch.full((2,), input_ids.shape[1], device=self.lengths.device) >= self.lengths


def test_criteria_of_the_callers(placed: Any, device: Device, replays: list[int]) -> None:
    given = prompts(2, device) | {"max_new_tokens": 12, "eos_token_id": 61}
    for _ in range(2):
        criteria = StoppingCriteriaList([Until(device.torch_device)])
        found = check_same(placed, replays, **given, stopping_criteria=criteria, do_sample=True)
        assert found.shape[1] == 12
    found = placed.generate(**prompts(1, device), max_new_tokens=40, max_time=0.0)
    assert found.shape[1] == 8


def test_modes_of_torch(tiny: Path, device: Device, replays: list[int]) -> None:
    """What one has allocated the other writes to."""
    for modes in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
        model = place(tiny, device)
        expected = plainly(model, **prompts(2, device), max_new_tokens=4)
        for mode in modes:
            with mode():
                assert torch.equal(model.generate(**prompts(2, device), max_new_tokens=4), expected)
                assert torch.equal(plainly(model, **prompts(2, device), max_new_tokens=4), expected)


# -- what is left to transformers' own loop


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_beams": 2}, "beam_search"),
        ({"no_repeat_ngram_size": 2}, "NoRepeatNGramLogitsProcessor"),
        ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate, output_scores"),
        ({"use_cache": False}, "there is no cache"),
        ({"cache_implementation": "static"}, "StaticCache"),
        ({"prompt_lookup_num_tokens": 2}, "assisted_generation"),
    ],
)
def test_what_is_not_known(
    placed: Any, device: Device, replays: list[int], why: Any, how: dict[str, Any], words: str
) -> None:
    """One line, once, and the same tokens."""
    given = prompts(1, device) | {"max_new_tokens": 4} | how
    expected = plainly(placed, **given)
    placed.generate._said.clear()
    for _ in range(2):
        found = placed.generate(**given)
        if isinstance(found, torch.Tensor):
            assert torch.equal(found, expected)
        else:
            assert torch.equal(found.sequences, expected.sequences) and len(found.scores) == 4
    lines = [record.getMessage() for record in why.records if "does not replay" in record.getMessage()]
    assert not replays and len(lines) == 1 and words in lines[0]


def test_stop_strings_of_the_models_own(gpt_oss: Path, device: Device, replays: list[int], why: Any) -> None:
    model = place(gpt_oss, device)
    model.generation_config.stop_strings = ["never"]
    with pytest.raises(ValueError, match="tokenizer"):  # as transformers has it
        model.generate(**prompts(1, device), max_new_tokens=3)
    assert "stop strings" in why.text and not replays


def test_more_rows_than_a_step_has(placed: Any, device: Device, replays: list[int]) -> None:
    check_same(placed, replays, 0, **prompts(9, device), max_new_tokens=3)


def test_caches_and_loops_of_the_callers(placed: Any, device: Device, replays: list[int]) -> None:
    given = prompts(1, device) | {"max_new_tokens": 4}
    expected = plainly(placed, **given)
    cache = DynamicCache(config=placed.config)
    assert torch.equal(placed.generate(**given, **{cache_argument(placed): cache}), expected)
    assert cache.get_seq_length() == 10

    def mine(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return input_ids + 1

    assert torch.equal(placed.generate(**given, custom_generate=mine), given["input_ids"] + 1)
    assert not replays


def test_hooks_and_training_are_no_graphs(tiny: Path, device: Device, replays: list[int], why: Any) -> None:
    model = place(tiny, device)
    seen = []
    hook = model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    model.generate(**prompts(1, device), max_new_tokens=4)
    assert len(seen) == 4 and "hooks are registered on Linear" in why.text
    hook.remove()
    hook = model.lm_head.register_forward_pre_hook(lambda *_: seen.append(2))
    model.generate(**prompts(1, device), max_new_tokens=4)
    assert seen.count(2) == 4
    hook.remove()
    model.train()
    model.generate(**prompts(1, device), max_new_tokens=4)
    model.eval()
    assert not replays
    check_same(model, replays, 3, **prompts(1, device), max_new_tokens=4, synced_gpus=False)
    model.set_attn_implementation("eager")
    check_same(model, replays, 3, **prompts(1, device), max_new_tokens=4)


def test_parameters_that_move(tiny: Path, device: Device, replays: list[int]) -> None:
    """What was captured reads where they lay."""
    model = place(tiny, device)
    before = check_same(model, replays, 3, **prompts(1, device), max_new_tokens=4)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0), requires_grad=False)
    after = check_same(model, replays, 3, **prompts(1, device), max_new_tokens=4)
    assert not torch.equal(before, after)


def test_switched_off(tiny: Path, device: Device, monkeypatch: pytest.MonkeyPatch, replays: list[int]) -> None:
    monkeypatch.setenv("FREETOKEN_GRAPH", "off")
    model = place(tiny, device)
    assert "generate" not in vars(model)
    check_same(model, replays, 0, **prompts(1, device), max_new_tokens=4)


def test_a_family_with_another_cache(tmp_path: Path, device: Device, replays: list[int], why: Any) -> None:
    """A warning, as this is slower than it could be."""
    stock = make_model(make_config("qwen3_next", LOADS["qwen3_next"]))
    stock.save_pretrained(tmp_path / "m")
    model = place(tmp_path / "m", device)
    check_same(model, replays, 0, **prompts(2, device), max_new_tokens=4)
    assert [record.levelname for record in why.records if "linear_attention" in record.getMessage()] == ["WARNING"]


# -- faults


def test_a_model_that_waits_for_values(tiny: Path, device: Device, replays: list[int], why: Any) -> None:
    """It is found once."""
    model = place(tiny, device)
    forward, calls = model.model.norm.forward, []

    def waits(x: torch.Tensor) -> torch.Tensor:
        calls.append(float(x.sum()))
        return forward(x)

    model.model.norm.forward = waits
    check_same(model, replays, 0, **prompts(1, device), max_new_tokens=4, do_sample=True)
    assert "cannot be captured" in why.text
    tried = len(calls)
    plainly(model, **prompts(1, device), max_new_tokens=4)
    more = len(calls) - tried
    model.generate(**prompts(1, device), max_new_tokens=4)
    assert len(calls) == tried + 2 * more, "nothing is tried again"


@pytest.mark.parametrize("rows", [1, 3])
def test_no_memory_for_a_capture(
    tiny: Path, device: Device, replays: list[int], why: Any, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """Such steps run without a graph, smaller ones with it."""
    model = place(tiny, device)
    capture = DeviceExperts.capture

    def fail(self: Any, forward: Any, valid: torch.Tensor | None, *rest: Any, **how: Any) -> Any:
        if valid is not None and len(valid) > 2:
            raise torch.OutOfMemoryError("no")
        return capture(self, forward, valid, *rest, **how)

    monkeypatch.setattr(DeviceExperts, "capture", fail)
    for _ in range(2):
        how = prompts(rows, device) | {"max_new_tokens": NEW, "do_sample": True, "eos_token_id": [5, 9, 11]}
        check_same(model, replays, None if rows == 1 else 0, **how)
    assert sum("no memory to capture" in record.getMessage() for record in why.records) == (rows > 1)


def test_no_memory_for_a_cache(
    tiny: Path, device: Device, replays: list[int], why: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = place(tiny, device)
    run, calls = FixedForward.run, []

    def fail(self: FixedForward, rows: int, length: int) -> None:
        calls.append(rows)
        if rows > 1:
            raise torch.OutOfMemoryError("no")
        run(self, rows, length)

    monkeypatch.setattr(FixedForward, "run", fail)
    for _ in range(2):
        check_same(model, replays, 0, **prompts(2, device), max_new_tokens=4)
    assert calls == [2] and "no memory for a cache" in why.text
    check_same(model, replays, 3, **prompts(1, device), max_new_tokens=4)


class Breaking(Streamer):
    """Does something at the third token."""

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.given) == 4:
            self.work()


def test_a_streamer_that_raises(placed: Any, device: Device, replays: list[int]) -> None:
    def fail() -> None:
        raise OSError("the pipe is broken")

    with pytest.raises(OSError, match="the pipe is broken"):
        placed.generate(**prompts(1, device), max_new_tokens=NEW, streamer=Breaking(fail))
    check_same(placed, replays, NEW - 1, **prompts(1, device), max_new_tokens=NEW)


def test_a_step_that_is_cancelled(tiny: Path, replays: list[int]) -> None:
    """On a device whose step is on its way by then for sure."""
    device = SimulatedDevice(5)
    model = place(tiny, device)
    cancel = experts_of(model).host.steps.cancel
    with pytest.raises(StepError, match="cancelled"):
        model.generate(**prompts(1, device), max_new_tokens=NEW, streamer=Breaking(cancel))
    check_same(model, replays, NEW - 1, **prompts(1, device), max_new_tokens=NEW)


def test_an_interrupt(tiny: Path, replays: list[int]) -> None:
    """Inside a wait for a step; the model is usable after it, by either loop."""
    device = SimulatedDevice(5)
    model = place(tiny, device)
    given = prompts(2, device) | {"max_new_tokens": NEW}
    expected = plainly(model, **given)

    def interrupt() -> None:
        device.interrupt = KeyboardInterrupt()

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model.generate(**given, streamer=Breaking(interrupt))
        assert torch.equal(plainly(model, **given), expected)
    check_same(model, replays, NEW - 1, **given)


@pytest.fixture
def before_work(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What the host does first in its next layer, the last one first; its work is done in Python here."""
    first: list[Callable[[], object]] = []
    plain = HostExperts.hand_off

    def hand_off(self: HostExperts, number: int, layer: BoundLayer, *how: Any) -> HandOff:
        found = plain(self, number, layer, *how)

        def work() -> None:
            if first:
                first.pop()()
            found.there.out.copy_(layer.run(found.there.x, found.there.ids, found.there.weights))

        return replace(found, duty=replace(found.duty, work=work))

    monkeypatch.setattr(HostExperts, "hand_off", hand_off)
    return first


def test_a_duty_that_fails(tiny: Path, device: Device, replays: list[int], before_work: Any) -> None:
    """The error names the layer; then all is well again."""
    model = place(tiny, device)

    def fail() -> None:
        raise ValueError("of 3")

    with pytest.raises(StepError, match=r"layer \d, experts failed: ValueError: of 3"):
        model.generate(**prompts(1, device), max_new_tokens=NEW, streamer=Breaking(lambda: before_work.append(fail)))
    check_same(model, replays, NEW - 1, **prompts(1, device), max_new_tokens=NEW)


@pytest.fixture
def cuda() -> Iterator[Device]:
    """Faults in real time, whatever the other tests' device is."""
    found = open_device("cuda")
    assert found is not None
    yield found
    gc.collect()
    found.close()


@pytest.mark.gpu
def test_a_duty_that_never_returns(
    tiny: Path, cuda: Device, replays: list[int], before_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is given up after the deadline, by name; when it has returned all is well again."""
    monkeypatch.setenv("FREETOKEN_STEP_DEADLINE", "1")
    model, back = place(tiny, cuda), threading.Event()
    given = prompts(1, cuda) | {"max_new_tokens": NEW}
    with pytest.raises(StepError, match=r"layer \d, experts"):
        model.generate(**given, streamer=Breaking(lambda: before_work.append(back.wait)))
    back.set()
    steps, end = experts_of(model).host.steps, time.monotonic() + 20
    while not steps.usable:
        assert time.monotonic() < end
        time.sleep(0.01)
    check_same(model, replays, NEW - 1, **given)


@pytest.mark.gpu
def test_ctrl_c_in_a_replay(tiny: Path, cuda: Device, replays: list[int], before_work: Any) -> None:
    """The prompt is back while the host's work of the step still goes on."""
    model, back, working = place(tiny, cuda), threading.Event(), threading.Event()
    given = prompts(1, cuda) | {"max_new_tokens": NEW}

    def interrupt() -> None:
        working.wait(20)
        os.kill(os.getpid(), signal.SIGINT)

    def work() -> None:
        working.set()
        back.wait(20)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        model.generate(**given, streamer=Breaking(lambda: before_work.append(work)))
    assert working.is_set() and not back.is_set()
    back.set()
    thread.join()
    check_same(model, replays, NEW - 1, **given)


@pytest.mark.gpu
def test_closing_in_a_replay(tiny: Path, cuda: Device, before_work: Any) -> None:
    """By another thread, while the host works for the step: an error, nothing hangs, and the model says what it is."""
    model, working = place(tiny, cuda), threading.Event()
    experts, given = experts_of(model), prompts(1, cuda) | {"max_new_tokens": NEW}

    def close() -> None:
        working.wait(20)
        experts.close()

    def work() -> None:
        working.set()
        time.sleep(0.3)

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises((StepError, ClosedError)):
        model.generate(**given, streamer=Breaking(lambda: before_work.append(work)))
    thread.join()
    with pytest.raises((StepError, ClosedError)):
        model.generate(**given)


def test_calls_from_threads_and_from_within(placed: Any, device: Device) -> None:
    given = prompts(1, device) | {"max_new_tokens": 4}
    expected = plainly(placed, **given)
    inner = []
    outer = placed.generate(**given, streamer=Breaking(lambda: inner.append(placed.generate(**given))))
    assert torch.equal(outer, expected) and torch.equal(inner[0], expected)
    if isinstance(device, SimulatedDevice):
        return  # has one thread
    found: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(placed.generate(**given))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and all(torch.equal(one, expected) for one in found)


def test_a_deleted_model(tiny: Path, device: Device) -> None:
    """Is freed with its graphs and its cache, at once."""
    model = place(tiny, device)
    model.generate(**prompts(1, device), max_new_tokens=4)
    kept, forward = model.generate, weakref.ref(model.generate._decoder._kept.forward)
    model = weakref.ref(model)
    gc.collect()
    assert model() is None
    with pytest.raises(FreeTokenError, match="was deleted"):
        kept()
    del kept
    gc.collect()
    assert forward() is None


# -- what a graph must not outlive, found by fresh eyes


def test_modes_that_change_numbers(tiny: Path, device: Device, replays: list[int]) -> None:
    """The default dtype says nothing of ours; autocast is left to transformers."""
    model = place(tiny, device)
    given = prompts(2, device) | {"max_new_tokens": NEW}
    torch.set_default_dtype(torch.bfloat16)
    try:
        check_same(model, replays, NEW - 1, **given)
    finally:
        torch.set_default_dtype(torch.float32)
    check_same(model, replays, NEW - 1, **given)
    with torch.autocast(model.device.type, torch.bfloat16):
        check_same(model, replays, 0, **given)
    check_same(model, replays, NEW - 1, **given)


class Smallest(TorchFunctionMode):
    """Has routers choose the experts that they like least."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}), **({"largest": False} if func is torch.topk else {}))


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_that_see_each_operation(tiny: Path, device: Device, replays: list[int]) -> None:
    """A replay would run past them; one that only says where tensors are made is none."""
    model = place(tiny, device)
    given = prompts(1, device) | {"max_new_tokens": NEW}
    for mode in (Smallest(), Seen()):
        with mode:
            check_same(model, replays, 0, **given)
    with torch.device(model.device):
        check_same(model, replays, NEW - 1, **given)


@pytest.mark.parametrize("name", ["FREETOKEN_ATTENTION", "FREETOKEN_COMPILE"])
def test_settings_that_are_wrong(
    name: str, tiny: Path, device: Device, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are said to be at once, and the model is usable when they are right again."""
    model = place(tiny, device)
    given = prompts(1, device) | {"max_new_tokens": NEW}
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ConfigError, match=name):
        place(tiny, device)
    with pytest.raises(ConfigError, match=name):
        model.generate(**given)
    monkeypatch.delenv(name)
    check_same(model, replays, NEW - 1, **given)


def test_switches_of_modules(tiny: Path, device: Device, replays: list[int]) -> None:
    """A flag that a forward reads, as adapters have it; hooks on all modules."""
    model = place(tiny, device)
    given = prompts(1, device) | {"max_new_tokens": NEW}
    norm = model.model.norm
    plain, norm.on = norm.forward, False
    norm.forward = lambda x: plain(-x if norm.on else x)
    for norm.on in (False, True, False):
        check_same(model, replays, NEW - 1, **given)
    seen: list[object] = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: seen.append(args[0]))
    check_same(model, replays, 0, **given)
    handle.remove()
    assert seen


@pytest.mark.parametrize("how", [{"temperature": 1e-39}, {"suppress_tokens": list(range(96))}])
def test_nothing_that_can_be_sampled(placed: Any, device: Device, replays: list[int], how: dict[str, Any]) -> None:
    if isinstance(device, SimulatedDevice):  # elsewhere torch's own refusal loses the device
        with pytest.raises(RuntimeError, match="probability tensor"):
            plainly(placed, **prompts(2, device), max_new_tokens=NEW, do_sample=True, **how)
    with pytest.raises(RuntimeError, match="no token can be sampled"):
        placed.generate(**prompts(2, device), max_new_tokens=NEW, do_sample=True, **how)
    check_same(placed, replays, NEW - 1, **prompts(2, device), max_new_tokens=NEW)


def test_as_many_tokens_as_there_are(placed: Any, device: Device, replays: list[int]) -> None:
    """Nothing is allocated for all that may come."""
    ends = plainly(placed, **prompts(1, device), max_new_tokens=4)[0, -1].item()
    found = check_same(placed, replays, **prompts(1, device), max_new_tokens=10**12, eos_token_id=ends)
    assert found.shape[1] <= 7 + 4


def test_no_memory_while_a_cache_grows(gpt_oss: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever of it has moved: an error, and the texts after it are right."""
    monkeypatch.setattr(graph, "SHORTEST", 8)
    monkeypatch.setattr("freetoken.integration.decoding._AHEAD", 3)
    model = place(gpt_oss, device)
    short, long = ({**prompts(1, device, 3), "max_new_tokens": n} for n in (4, 20))
    expected = plainly(model, **short)
    for nth in range(1, 6):
        assert torch.equal(model.generate(**short), expected)
        with monkeypatch.context() as patch:
            reserve, calls = _Memory.reserve, []

            def fail(*args: Any, reserve: Any = reserve, calls: list[int] = calls, nth: int = nth) -> None:
                calls.append(1)
                if len(calls) == nth:
                    raise torch.OutOfMemoryError("for this test")
                reserve(*args)

            patch.setattr(_Memory, "reserve", fail)
            with contextlib.suppress(torch.OutOfMemoryError):
                model.generate(**long)
        assert torch.equal(model.generate(**short), expected), nth


def test_in_a_fork(tiny: Path) -> None:
    """While another thread decodes: refused at once."""
    model = place(tiny, SimulatedDevice(5))
    model.generate._decoder._lock.acquire()  # as by a thread that does not come along
    child = os.fork()
    if not child:
        try:
            model.generate(torch.tensor([[1, 2]]), max_new_tokens=3)
        except UnsupportedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    model.generate._decoder._lock.release()


def test_texts_before_leave_nothing(placed: Any, tiny: Path, device: Device, replays: list[int]) -> None:
    """A prompt with much padding before one with none; a short cache before a longer one, captured already."""
    ids = prompts(1, device, 9)
    padded = ids | {"attention_mask": (torch.arange(9, device=device.torch_device) > 6).long()[None]}
    check_same(placed, replays, NEW - 1, **padded, max_new_tokens=NEW)
    check_same(placed, replays, NEW - 1, **prompts(1, device, 4), max_new_tokens=NEW)
    model = place(tiny, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "SHORTEST", 4)
        check_same(model, replays, 3, **prompts(1, device), max_new_tokens=4)
        check_same(model, replays, 29, **prompts(1, device), max_new_tokens=30)
        check_same(model, replays, 3, **prompts(1, device), max_new_tokens=4)


def test_random_numbers_after_an_error(placed: Any, device: Device, replays: list[int]) -> None:
    """Are those after the tokens that were seen."""
    given = prompts(1, device) | {"max_new_tokens": NEW, "do_sample": True}

    def fail() -> None:
        raise OSError("the pipe is broken")

    found = []
    for way in (plainly, lambda model, **how: model.generate(**how)):
        torch.manual_seed(11)
        with pytest.raises(OSError, match="the pipe is broken"):
            way(placed, **given, streamer=Breaking(fail))
        found.append(torch.rand(3, device=placed.device))
    assert torch.equal(*found)


def test_closed_before(tiny: Path, device: Device, why: pytest.LogCaptureFixture) -> None:
    model = place(tiny, device)
    experts_of(model).close()
    with pytest.raises(ClosedError):
        model.generate(**prompts(1, device), max_new_tokens=NEW)
    assert experts_of(model)._host is None, "no thread is begun that nobody ends"
    assert not [line for line in why.messages if "cannot be captured" in line]


def test_a_step_that_never_ends(tiny: Path, replays: list[int]) -> None:
    """An error, and from then on errors: nothing waits for it."""
    for fault in ("silent bell", "lost"):
        device = SimulatedDevice(5)
        model = place(tiny, device)
        given = prompts(1, device) | {"max_new_tokens": NEW}
        with pytest.raises((StepError, DeviceError)):
            model.generate(**given, streamer=Breaking(lambda: device.inject(fault, 1)))  # noqa: B023
        for _ in range(2):
            with pytest.raises((StepError, DeviceError), match=r"load the model again|is lost"):
                model.generate(**given)


def test_a_fault_before_the_first_step(tiny: Path, replays: list[int]) -> None:
    """Is raised, and is not taken for a model that cannot be captured."""
    device = SimulatedDevice(5)
    model = place(tiny, device)
    given = prompts(1, device) | {"max_new_tokens": NEW}
    device.inject("launch")
    with pytest.raises(DeviceError, match="simulated fault"):
        model.generate(**given)
    check_same(model, replays, NEW - 1, **given)


def test_what_is_run_before_a_capture_is_not_counted(tiny: Path, device: Device) -> None:
    model = place(tiny, device, "hybrid")
    found = []
    for _ in range(2):
        experts_of(model).reset_statistics()
        model.generate(**prompts(1, device), max_new_tokens=NEW)
        usage = experts_of(model).usage()
        assert usage.statistics is not None
        found.append((usage.statistics.steps, usage.statistics.routed))
    assert found[0] == found[1]


def test_nothing_is_pinned_meanwhile(tiny: Path, device: Device) -> None:
    model, seen = place(tiny, device, "offload"), []
    pinner = experts_of(model)._pinner
    assert pinner is not None
    streamer = Breaking(lambda: seen.append(len(pinner._steps)))
    model.generate(**prompts(1, device), max_new_tokens=4, streamer=streamer)
    assert seen == [1] and not pinner._steps
