"""Which tile runs, that it is checked before it is trusted, and calls: long ones, concurrent ones, after a fork."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken import executor, formats, settings
from freetoken.banks import Bank, ShardedBank
from freetoken.crowding import CrowdWatch
from freetoken.errors import ConfigError, FreeTokenError, UnsupportedError
from freetoken.executor import Activation, BoundLayer, Executor, KernelChoice, check_kernel, kernel_choices
from freetoken.formats import Format
from freetoken.formats.record import RecordLayout, shard_bounds
from freetoken.kernels import reference
from freetoken.kernels._isa import LEVELS, available_levels
from freetoken.memory.placement import Placement
from tests.support.experts import check_close, make_expert, make_routes

HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 96, 5, 2
GPT_OSS = Activation("swiglu_clamped", 1.702, 7.0)
ALL_FORMATS = [formats.get(name) for name in formats.names()]
EVERY_FORMAT = pytest.mark.parametrize("fmt", ALL_FORMATS, ids=lambda fmt: fmt.name)


def make_bank(fmt: Format, bias: bool = False, count: int = EXPERTS, width: int = WIDTH) -> Bank:
    bank = Bank(RecordLayout(fmt, HIDDEN, width, bias), count)
    for e in range(count):
        bank.put(e, make_expert(fmt, HIDDEN, width, bias=bias, seed=e))
    return bank


def make_input(n_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, weights = make_routes(n_tokens, TOP_K, EXPERTS, seed=seed)
    x = np.random.default_rng([seed, 1]).standard_normal((n_tokens, HIDDEN)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(ids).long(), torch.from_numpy(weights)


def expected_of(
    bank: Bank,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    how: Activation = Activation(),  # noqa: B008
) -> np.ndarray:
    records = (bank.records, bank.layout, x.float().numpy(), ids.numpy().astype(np.int32), weights.numpy())
    return reference.run_layer(*records, how.kind, how.alpha, how.limit)


def run_python(script: str) -> dict[str, Any]:
    """What a script prints as JSON, run from the folder that holds these tests."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bind(fmt: Format, dtype: torch.dtype = torch.float32, threads: int = 2) -> BoundLayer:
    return Executor(tuple(range(threads)), dtype).bind(make_bank(fmt), Activation())


# --- which tile --------------------------------------------------------------------------------------------------


@EVERY_FORMAT
@pytest.mark.parametrize("act", settings.CPU_ACT.choices)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_choices_go_down_from_the_best_tier_to_scalar(fmt: Format, act: str, dtype: torch.dtype) -> None:
    choices = kernel_choices(fmt, act, dtype)
    levels = [LEVELS.index(choice.kernel.level) for choice in choices]
    assert levels == sorted(set(levels), reverse=True)
    assert choices[-1].kernel.level == "scalar"
    assert all(choice.kernel.level in available_levels() for choice in choices)
    acts = {choice.act for choice in choices}
    if act == "auto":
        has_int15 = fmt.name not in ("bf16", "fp8_block") and "avx2" in available_levels()
        wanted = {"int15", "fp32"} if has_int15 else {"bf16", "fp32"}
        assert acts <= (wanted if dtype == torch.bfloat16 else {"fp32"})
        assert choices[0].act == "int15" or not has_int15 or dtype != torch.bfloat16
    elif act in ("int8", "int15") and fmt.name in ("bf16", "fp8_block"):
        assert acts == {"bf16"}
    else:
        assert acts == {act}
    for choice in choices:
        assert choice.rounding == (choice.act if choice.act in ("bf16", "fp8") else "none")
        assert choice.kernel.act == choice.act or choice.rounding != "none"
        assert choice.kernel.act not in ("int8", "int15") or choice.act == choice.kernel.act


@EVERY_FORMAT
@pytest.mark.parametrize("tier", LEVELS)
def test_a_forced_tier_is_never_exceeded(fmt: Format, tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_CPU_ISA", tier)
    if tier not in available_levels():
        with pytest.raises(UnsupportedError, match=rf"this CPU has no {tier}; it has scalar"):
            Executor((0,), torch.float32).bind(make_bank(fmt), Activation())
        return
    layer = bind(fmt)
    assert LEVELS.index(layer.choice.kernel.level) <= LEVELS.index(tier)
    if tier == "scalar":
        assert layer.choice.kernel.level == "scalar"
    x, ids, weights = make_input(3)
    check_close(layer.run(x, ids, weights).numpy(), expected_of(layer.bank, x, ids, weights), 4e-6)


def test_a_tier_that_this_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "available_levels", lambda: ("scalar", "avx2"))
    monkeypatch.setenv("FREETOKEN_CPU_ISA", "avx512")
    with pytest.raises(UnsupportedError, match="this CPU has no avx512; it has scalar, avx2") as caught:
        Executor((0,), torch.float32)
    assert caught.value.available == "scalar, avx2"  # type: ignore[attr-defined]
    monkeypatch.setenv("FREETOKEN_CPU_ISA", "auto")
    choices = kernel_choices(formats.get("nvfp4"), "auto", torch.bfloat16)
    assert {choice.kernel.level for choice in choices} <= {"scalar", "avx2"}


@EVERY_FORMAT
@pytest.mark.parametrize("act", settings.CPU_ACT.choices[1:])
def test_a_forced_activation_precision(fmt: Format, act: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_CPU_ACT", act)
    layer = bind(fmt)
    in_force = "bf16" if act in ("int8", "int15") and fmt.name in ("bf16", "fp8_block") else act
    assert layer.choice.act == in_force
    x, ids, weights = make_input(7)
    out, expected = layer.run(x, ids, weights).numpy(), expected_of(layer.bank, x, ids, weights)
    check_close(out, expected, reference.ERROR_BOUND[in_force])
    if in_force != "fp32":  # it is the lower precision that ran
        assert np.linalg.norm(out - expected) > 10 * reference.ERROR_BOUND["fp32"] * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["FREETOKEN_CPU_ISA", "FREETOKEN_CPU_ACT"])
def test_a_setting_of_no_meaning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "fast")
    with pytest.raises(ConfigError, match=rf"{name}='fast' is not one of auto, ") as caught:
        Executor((0,), torch.float32)
    assert caught.value.name == name  # type: ignore[attr-defined]


# --- checked before it is trusted --------------------------------------------------------------------------------


@EVERY_FORMAT
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("how", [Activation(), GPT_OSS], ids=["silu", "swiglu"])
def test_every_choice_passes_the_check_of_a_good_bank(fmt: Format, bias: bool, how: Activation) -> None:
    bank = make_bank(fmt, bias)
    for act in settings.CPU_ACT.choices[1:]:
        for choice in kernel_choices(fmt, act, torch.float32):
            assert check_kernel(bank, how, choice) < reference.ERROR_BOUND[choice.act]


def test_an_incomplete_bank_is_refused() -> None:
    bank = Bank(RecordLayout(formats.get("nvfp4"), HIDDEN, WIDTH), 3)
    bank.put(1, make_expert(bank.layout.format, HIDDEN, WIDTH))
    with pytest.raises(FreeTokenError, match=r"incomplete: experts \[0, 2\] were never loaded"):
        Executor((0,), torch.float32).bind(bank, Activation())


def break_tiles(monkeypatch: pytest.MonkeyPatch, wrong: set[str]) -> list[str]:
    """Tiles of these levels read another expert's record: real runs with wrong numbers. Returns the levels tried."""
    tried: list[str] = []
    real = executor._bind

    def bind_wrong(bank: Bank, activation: Activation, choice: KernelChoice) -> object:
        tried.append(choice.kernel.level)
        if choice.kernel.level in wrong:
            other = Bank(bank.layout, bank.n_experts)
            for e in range(bank.n_experts):
                other.put(e, bank.get((e + 1) % bank.n_experts))
            bank = other
        return real(bank, activation, choice)

    monkeypatch.setattr(executor, "_bind", bind_wrong)
    return tried


def test_a_wrong_tile_falls_back_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fmt = formats.get("mxfp4")
    levels = [choice.kernel.level for choice in kernel_choices(fmt, "auto", torch.float32)]
    if len(levels) < 2:
        pytest.skip("this CPU has the scalar tier only")
    tried = break_tiles(monkeypatch, {levels[0]})
    with caplog.at_level(logging.INFO, "freetoken.executor"):
        layer = bind(fmt)
    assert layer.choice.kernel.level == levels[1]
    assert tried == [levels[0], levels[1], levels[1]]
    (warning,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "mxfp4" in warning.getMessage()
    assert "trying the next tier" in warning.getMessage()
    x, ids, weights = make_input(3)
    check_close(layer.run(x, ids, weights).numpy(), expected_of(layer.bank, x, ids, weights), 4e-6)


def test_no_tile_that_agrees_is_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    break_tiles(monkeypatch, set(LEVELS))
    with pytest.raises(UnsupportedError, match=r"no CPU tile for q8_0 agrees .* `ft info`") as caught:
        bind(formats.get("q8_0"))
    assert "\n" not in str(caught.value)
    assert len(caplog.records) == len(kernel_choices(formats.get("q8_0"), "auto", torch.float32))


@pytest.mark.parametrize("error", [float("nan"), float("inf"), 1.0])
def test_an_error_that_is_no_number_counts_as_wrong(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    monkeypatch.setattr(executor, "check_kernel", lambda *args: error)
    with pytest.raises(UnsupportedError, match="agrees with the reference"):
        bind(formats.get("bf16"))


def test_each_format_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    real = check_kernel

    def count(bank: Bank, activation: Activation, choice: KernelChoice) -> float:
        checked.append(f"{bank.layout.format.name} {bank.layout.bias}")
        return real(bank, activation, choice)

    monkeypatch.setattr(executor, "check_kernel", count)
    runs = Executor((0,), torch.float32)
    for fmt in ALL_FORMATS:
        for bias in (False, True, False, True):
            runs.bind(make_bank(fmt, bias), Activation())
    assert sorted(checked) == sorted(f"{fmt.name} {bias}" for fmt in ALL_FORMATS for bias in (False, True))


# --- calls ---------------------------------------------------------------------------------------------------------


@EVERY_FORMAT
def test_many_tokens_are_as_right_as_one(fmt: Format) -> None:
    layer = bind(fmt)
    x, ids, weights = make_input(1300)
    out = layer.run(x, ids, weights)
    check_close(out.numpy(), expected_of(layer.bank, x, ids, weights), 4e-6)
    for n in (0, 511, 512, 513, 1023, 1024, 1299):
        one = layer.run(x[n : n + 1], ids[n : n + 1], weights[n : n + 1])
        torch.testing.assert_close(out[n : n + 1], one, rtol=1e-5, atol=1e-5)


def test_every_call_looks_whether_cores_are_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    made: list[int] = []
    real = CrowdWatch.__init__

    def make(watch: CrowdWatch, workers: int) -> None:
        made.append(workers)
        real(watch, workers)

    monkeypatch.setattr(CrowdWatch, "__init__", make)
    monkeypatch.setattr(CrowdWatch, "look", lambda watch: looked.append(1))
    layer = bind(formats.get("bf16"), threads=3)
    for _ in range(2):
        layer.run(*make_input(1))
    assert (made, len(looked)) == ([3], 2)


@EVERY_FORMAT
def test_the_number_of_threads_changes_no_bit(fmt: Format) -> None:
    for n_tokens in (1, 2, 40):
        x, ids, weights = make_input(n_tokens)
        outs = [bind(fmt, threads=n).run(x, ids, weights) for n in (1, 2, 3)]
        assert torch.equal(outs[0], outs[1])
        assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_each_dtype_comes_back_as_it_went_in(dtype: torch.dtype) -> None:
    layer = bind(formats.get("nvfp4"), dtype)
    x, ids, weights = make_input(5)
    x = x.to(dtype)
    out = layer.run(x, ids, weights)
    assert out.dtype == dtype
    assert out.shape == x.shape
    bound = {torch.float16: 1e-3, torch.bfloat16: 1e-2}.get(dtype, 4e-6)
    check_close(out.double().numpy(), expected_of(layer.bank, x, ids, weights), bound)


def test_views_and_other_integers_are_taken() -> None:
    layer = bind(formats.get("q8_0"))
    x, ids, weights = make_input(6)
    expected = layer.run(x, ids, weights)
    strided = torch.stack([x, -x], -1)[..., 0]
    assert not strided.is_contiguous()
    assert torch.equal(layer.run(strided, ids.int(), weights.double()), expected)
    assert torch.equal(layer.run(x, ids.T.contiguous().T, weights.T.contiguous().T), expected)
    assert torch.equal(layer.run(x[2:4], ids[2:4], weights[2:4]), expected[2:4])
    grad = weights.clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(layer.run(x, ids, grad * 1), expected)


def test_no_tokens_give_no_rows() -> None:
    x, ids, weights = make_input(4)
    assert bind(formats.get("bf16")).run(x[:0], ids[:0], weights[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("width", [HIDDEN - 2, HIDDEN * 2])
def test_another_width_is_refused(width: int) -> None:
    _, ids, weights = make_input(3)
    with pytest.raises(ValueError, match=str(width)):
        bind(formats.get("bf16")).run(torch.zeros(3, width), ids, weights)


def test_routes_that_do_not_fit_are_refused() -> None:
    layer = bind(formats.get("bf16"))
    x, ids, weights = make_input(3)
    for bad_ids, bad_weights in (
        (ids[:2], weights),
        (ids, weights[:, :1]),
        (ids[:, :1], weights),
        (ids[0], weights[0]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            layer.run(x, bad_ids, bad_weights)


def test_calls_from_several_threads_queue_and_are_right() -> None:
    """One executor, two layers, scratch memory shared between them."""
    runs = Executor((0, 1), torch.float32)
    layers = [runs.bind(make_bank(fmt), Activation()) for fmt in (formats.get("nvfp4"), formats.get("bf16"))]
    inputs = [make_input(1 + 37 * (n % 4), seed=n) for n in range(24)]
    expected = [layers[n % 2].run(*args) for n, args in enumerate(inputs)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            found = list(pool.map(lambda n: layers[n % 2].run(*inputs[n]), range(24)))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_call_that_fails_leaves_the_lock_free() -> None:
    layer = bind(formats.get("bf16"))
    with pytest.raises(ValueError, match=r"\w"):
        layer.run(torch.zeros(3, 2), torch.zeros(3, 1).long(), torch.ones(3, 1))
    x, ids, weights = make_input(2)
    assert layer.run(x, ids, weights).shape == (2, HIDDEN)


# --- experts cut into shards ---------------------------------------------------------------------------------------


def cut_bank(fmt: Format, parts: int) -> tuple[Bank, ShardedBank]:
    """The same experts whole and cut, one granule in each shard at least."""
    layout = RecordLayout(fmt, HIDDEN, (parts + 1) * fmt.granule)
    whole = Bank(layout, EXPERTS)
    cut = ShardedBank(layout, EXPERTS, shard_bounds(fmt, layout.intermediate, parts), tuple(range(parts)))
    for e in range(EXPERTS):
        expert = make_expert(fmt, HIDDEN, layout.intermediate, seed=e)
        whole.put(e, expert)
        cut.put(e, expert)
    return whole, cut


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_give_what_the_whole_gives(fmt: Format, dtype: torch.dtype) -> None:
    """In more pieces of the batch than one. Only sums of fp32 differ, and the rounding of the output."""
    whole, cut = cut_bank(fmt, 2)
    x, ids, weights = make_input(700)
    results = []
    for threads in (1, 2, 3):
        runs = Executor(tuple(range(threads)), dtype)
        results.append(runs.bind(cut, Activation()).run(x.to(dtype), ids, weights))
        assert torch.equal(results[0], results[-1])
    expected = Executor((0,), dtype).bind(whole, Activation()).run(x.to(dtype), ids, weights)
    step = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    check_close(results[0].double().numpy(), expected.double().numpy(), 4e-6 + step)


def test_an_incomplete_shard_is_refused() -> None:
    _, cut = cut_bank(formats.get("nvfp4"), 2)
    cut.shards[1]._present[3] = False
    with pytest.raises(FreeTokenError, match=r"incomplete: experts \[3\] were never loaded"):
        Executor((0,), torch.float32).bind(cut, Activation())


def test_readers_of_shards_are_their_teams() -> None:
    whole, cut = cut_bank(formats.get("nvfp4"), 2)
    runs = Executor((0, 1, 2), torch.float32, "", Placement("shard", (4, 7), "", (4, 5, 7), (0, 0, 1)))
    assert [runs.readers(cut, shard) for shard in (0, 1)] == [(4, 5), (7,)]
    assert runs.readers(whole, 0) == (4, 5, 7)
    assert Executor((0, 1), torch.float32).readers(cut, 0) == ()


def test_activations_that_are_rounded_together_are_not_cut_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Executor((0,), torch.float32).shard_step == 1
    monkeypatch.setenv("FREETOKEN_CPU_ACT", "fp8")
    assert Executor((0,), torch.float32).shard_step == reference.FP8_GROUP


SEATS = """
import json, os, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import torch
from freetoken.executor import Activation, Executor
from freetoken.formats import get
from freetoken.memory.placement import Placement
from tests.test_executor import cut_bank, make_input

def masks():
    found = {}
    for task in Path("/proc/self/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        found[task.name] = next(line.split()[1] for line in lines if line.startswith("Cpus_allowed_list"))
    return found

low, high = sorted(os.sched_getaffinity(0))[:2]
before = os.sched_getaffinity(0)
whole, cut = cut_bank(get("nvfp4"), 2)
placement = Placement("shard", (0, 1), "", (0, 1), (0, 1))
runs = Executor((low, high), torch.float32, "", placement)
first = runs.bind(whole, Activation()).run(*make_input(3))
free = masks()
layer = runs.bind(cut, Activation())
layer.run(*make_input(3))
seated = masks()

def from_a_narrow_thread():
    os.sched_setaffinity(0, {low})
    layer.run(*make_input(3))
    return masks()

with ThreadPoolExecutor(1) as pool:
    narrow = pool.submit(from_a_narrow_thread).result()
print(json.dumps({"new": [mask for task, mask in seated.items() if free.get(task) != mask],
                  "caller": os.sched_getaffinity(0) == before, "high": str(high),
                  "wide": len(set(free.values())) == 1, "low": str(low),
                  "narrow": [mask for task, mask in narrow.items() if task not in seated]}))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_threads_keep_to_their_node_and_the_caller_is_left_alone() -> None:
    """In a process of its own: the threads of torch's pool stay where they were put."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    found = run_python(SEATS)
    assert found["wide"], "threads were kept somewhere without shards"
    assert found["new"] == [found["high"]]
    assert found["caller"]
    assert set(found["narrow"]) == {found["low"]}, "a thread was put on a CPU that its caller may not use"


# --- what cannot be done -------------------------------------------------------------------------------------------


def test_copying_and_pickling_say_why_not() -> None:
    layer = bind(formats.get("nvfp4"))
    for action in (copy.deepcopy, pickle.dumps):
        for what in (layer, layer.executor, {"in a": [layer]}):
            with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled; call freetoken\.load") as caught:
                action(what)
            assert "\n" not in str(caught.value)


def test_another_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a real fork does is tested in tests/integration/test_transformers.py."""
    layer = bind(formats.get("nvfp4"))
    monkeypatch.setattr("freetoken.executor.os.getpid", lambda: -1)
    with pytest.raises(UnsupportedError, match="loaded before a fork"):
        layer.run(*make_input(1))
