"""`benchmarks/gpu_decode.py` and the models it builds: shapes, records, routes, rows and limits; never a time."""

import contextlib
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_decode
import numpy as np
import pytest
import rates
import synthetic
import torch
from gpu_decode import KEY, Counters, Decoder, Table, distinct, limits, parse_cache, put_on, read_counters, time_blocks
from rates import Rates, byte_seconds
from synthetic import SHAPES, ModelShape, Routing, Synthetic, draw_routes, fill, make_plan, rotate_record, stubbed

from freetoken import formats
from freetoken.banks import Bank, ShardedBank
from freetoken.errors import CapacityError, ConfigError
from freetoken.formats.record import RecordLayout, shard_bounds
from freetoken.integration import compiled
from freetoken.integration.operator import layer_of
from freetoken.integration.plan import find_experts
from freetoken.kernels import reference
from freetoken.memory import budget
from freetoken.offload.pinning import Pinned
from tests.support.experts import check_close, make_expert

TINY = SHAPES["tiny"]
SMALL = {
    "gpt_oss": {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 8,
    },
    "deepseek_v4": {
        "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 5,
        "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8,
        "sliding_window": 8,
    },
}  # fmt: skip
"""Other families, whose experts have biases, or whose first layers route by a table of tokens."""


def small(family: str) -> ModelShape:
    return ModelShape(family, "made for tests", "mxfp4", SMALL[family])


@pytest.mark.parametrize(
    ("name", "layers", "experts", "top_k", "hidden", "width", "nbytes"),
    [
        ("qwen3-30b-a3b", 48, 128, 8, 2048, 768, 2_654_336),
        ("gpt-oss-120b", 36, 128, 4, 2880, 2880, 13_253_888),
        ("deepseek-v4-flash", 43, 256, 6, 4096, 2048, 13_369_472),
    ],
)
def test_shapes(name: str, layers: int, experts: int, top_k: int, hidden: int, width: int, nbytes: int) -> None:
    """A public model's numbers; the bytes of a record follow from them."""
    shape = SHAPES[name]
    whole, cut = (make_plan(shape, formats.get(shape.format), n, torch.bfloat16) for n in (None, 2))

    for plan, count in ((whole, layers), (cut, 2)):
        assert (plan.layers, plan.n_experts, plan.top_k) == (count, experts, top_k)
        assert plan.layout == RecordLayout(formats.get(shape.format), hidden, width, name == "gpt-oss-120b")
        assert plan.need(1).banks == count * experts * nbytes
    assert 0 < cut.dense_bytes < whole.dense_bytes < 20e9


@pytest.mark.parametrize("layers", [0, 4, -1])
def test_shape_cannot_be_cut_to_more_or_no_layers(layers: int) -> None:
    with pytest.raises(ConfigError, match="has 3 layers"):
        TINY.config(layers)


def test_what_does_not_fit_is_refused_before_any_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available", lambda root="/": budget.Budget(1 << 16, "a test"))
    monkeypatch.setattr(synthetic, "make_bank", lambda *_: pytest.fail("a bank was made"))

    with pytest.raises(CapacityError, match="building 3 layers of 8 nvfp4 experts"):
        Synthetic(TINY, formats.get("nvfp4"))


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", formats.names())
def test_records_are_valid_and_all_different(name: str, pieces: int) -> None:
    """Also where a node holds a slice of each."""
    layout = RecordLayout(formats.get(name), 64, 384, bias=True)
    bounds = shard_bounds(layout.format, 384, pieces)
    banks = [ShardedBank(layout, 8, bounds, (None,) * pieces) for _ in range(3)]
    fill(banks, 0, 2)

    assert not any(bank.missing for bank in banks)
    for shards in zip(*(bank.shards for bank in banks), strict=True):
        found = [record for shard in shards for record in shard.records]
        assert len({record.tobytes() for record in found}) == len(found) == 24
        for record in found:
            expert = shards[0].layout.unpack(record)
            assert not any(layout.format.find_bad(matrix) for matrix in (expert.gate, expert.up, expert.down))
            again = np.empty_like(record)
            shards[0].layout.pack(expert, again)
            assert np.array_equal(record, again)


@pytest.mark.parametrize("name", formats.names())
def test_layers_compute_what_their_records_say(name: str) -> None:
    made = Synthetic(TINY, formats.get(name), dtype=torch.float32)
    model, layout, (n, k) = made.model(), made.plan.layout, (made.plan.n_experts, made.plan.top_k)
    x = torch.randn(5, layout.hidden, generator=torch.Generator().manual_seed(1))
    weights = torch.rand(5, k, generator=torch.Generator().manual_seed(2))
    ids = draw_routes(3, 5, 1, n, k)[:, :, 0]

    for number, (module, bound) in enumerate(zip(find_experts(model).values(), made.bound, strict=True)):
        assert layer_of(module) is bound
        (bank,) = bound.bank.shards
        routes = ids[number].int().numpy()
        wanted = reference.run_layer(bank.records, layout, x.numpy(), routes, weights.numpy(), bound.activation.kind)
        assert np.linalg.norm(wanted, axis=1).min() > 0.01
        with torch.inference_mode():
            check_close(module(x, ids[number], weights).numpy(), wanted, reference.ERROR_BOUND[bound.choice.act])


@pytest.mark.parametrize("width", [32, 40])
def test_rotated_records_are_the_same_expert_with_rows_moved(width: int) -> None:
    """gate and up rows move together by whole tiles, down rows by others; a tile with padding stays."""
    layout = RecordLayout(formats.get("bf16"), 64, width, bias=True)
    expert = make_expert(layout.format, 64, width, bias=True)
    source, out = np.empty((2, layout.nbytes), np.uint8)
    layout.pack(expert, source)
    found = set()
    for turn in range(width // 16 * 4):
        out[:] = 0xFF
        rotate_record(layout, source, turn, out)
        made = layout.unpack(out)
        first, second = 16 * (turn // 4), 16 * (turn % 4)
        for name, by, whole in (
            ("gate", first, width // 16 * 16),
            ("up", first, width // 16 * 16),
            ("down", second, 64),
        ):
            old, new = getattr(expert, name).codes, getattr(made, name).codes
            assert np.array_equal(new[:whole], np.roll(old[:whole], -by, axis=0))
            assert np.array_equal(new[whole:], old[whole:])
        assert np.array_equal(made.down_bias, expert.down_bias)
        found.add(out.tobytes())
    assert len(found) == width // 16 * 4


def test_more_experts_are_quantized_where_two_would_repeat() -> None:
    """One tile of gate and four of down: four records of each."""
    banks = [Bank(RecordLayout(formats.get("bf16"), 64, 16), 8) for _ in range(3)]
    fill(banks, 0, 1)
    assert len({record.tobytes() for bank in banks for record in bank.records}) == 24


@pytest.mark.parametrize("family", SMALL)
def test_other_families_decode(family: str) -> None:
    made = Synthetic(small(family), formats.get("mxfp4"))
    model = made.model()
    layers = made.plan.config.num_hidden_layers
    routing = Routing(model, draw_routes(layers, 12, 2, 4, 2), "cpu")
    decoder = Decoder(model, 2, 12, torch.device("cpu"))
    with torch.inference_mode():
        decoder.read(torch.arange(8).reshape(2, 4))
        for _ in range(6):
            decoder.step()
        out = model(decoder.token)
    assert out.logits.isfinite().all()
    assert len(made.bound) == layers
    assert decoder.position.tolist() == [[10], [10]]
    assert int(routing.step) == 11


def test_models_are_alike_and_independent() -> None:
    made = Synthetic(TINY, formats.get("nvfp4"))
    state = torch.random.get_rng_state()
    first, second = made.model(), made.model()

    assert torch.equal(torch.random.get_rng_state(), state)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b) and a.data_ptr() != b.data_ptr()
        assert a.isfinite().all()
    assert not any(p.requires_grad for p in first.parameters())
    ids = torch.arange(6)[None]
    with torch.inference_mode():
        assert torch.equal(first(ids).logits, second(ids).logits)


def test_seed_decides_records_and_routes() -> None:
    a, b, c = (Synthetic(TINY, formats.get("q8_0"), seed=seed) for seed in (0, 0, 1))
    assert all(np.array_equal(x, y) for x, y in zip(a.memory, b.memory, strict=True))
    assert not any(np.array_equal(x, y) for x, y in zip(a.memory, c.memory, strict=True))
    draws = [draw_routes(2, 50, 1, 16, 4, skew=1, locality=0.5, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


@pytest.mark.parametrize(("skew", "locality"), [(0, 0), (1.2, 0), (0, 0.5), (1.2, 0.9), (0, 1)])
def test_experts_of_a_token_differ(skew: float, locality: float) -> None:
    ids = draw_routes(3, 40, 2, 8, 4, skew=skew, locality=locality)
    assert ids.shape == (3, 40, 2, 4)
    assert ids.min() >= 0 and ids.max() < 8
    assert (ids.sort(dim=3).values.diff(dim=3) > 0).all()


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.5])
def test_single_draws_follow_zipf(skew: float) -> None:
    """Of one expert a token, the law itself; each layer has another order."""
    n, experts = 20_000, 16
    ids = draw_routes(2, n, 1, experts, 1, skew=skew)[:, :, 0, 0]
    shares = np.arange(1, experts + 1) ** -skew
    shares /= shares.sum()
    counts = [np.bincount(layer.numpy(), minlength=experts) for layer in ids]
    for found in counts:
        deviation = np.abs(np.sort(found)[::-1] / n - shares)
        assert (deviation < 5 * np.sqrt(shares / n) + 1e-3).all()
    assert skew == 0 or counts[0].argmax() != counts[1].argmax()


@pytest.mark.parametrize("locality", [0.0, 0.3, 0.5, 1.0])
def test_stated_share_stays(locality: float) -> None:
    """Those that stay, and of the others as many as chance brings back: (K - m)**2 / (E - m) for m that stay."""
    experts, k = 64, 8
    ids = draw_routes(4, 2000, 2, experts, k, locality=locality)
    shared = (ids[:, 1:, :, :, None] == ids[:, :-1, :, None, :]).any(4).sum(3)
    low, share = divmod(k * locality, 1)

    def expected(m: float) -> float:
        return m + (k - m) ** 2 / (experts - m)

    wanted = (1 - share) * expected(low) + share * expected(low + 1 if share else low)
    assert abs(shared.double().mean() - wanted) < 0.05
    assert shared.min() >= int(low)
    counts = np.bincount(ids[:, ::20].flatten().numpy(), minlength=experts)
    assert locality == 1 or counts.max() < 2 * counts.mean()


def test_experts_are_those_drawn() -> None:
    """Step for step, prompt or not, for every sequence and layer; and the routers' own again once it is removed."""
    made = Synthetic(TINY, formats.get("bf16"))
    model, ids = made.model(), draw_routes(3, 7, 2, 8, 2, seed=5)
    seen: list[torch.Tensor] = []
    routing = Routing(model, ids, "cpu")
    for module in find_experts(model).values():
        module.register_forward_pre_hook(lambda _, args: seen.append(args[1].clone()))  # after the routing's
    decoder = Decoder(model, 2, 32, torch.device("cpu"))
    with torch.inference_mode():
        decoder.read(torch.zeros(2, 4, dtype=torch.int64))
        for _ in range(5):
            decoder.step()
    prompt = torch.stack(seen[:3]).view(3, 2, 4, 2)
    steps = torch.stack(seen[3:]).view(5, 3, 2, 2)
    assert torch.equal(prompt, ids[:, :4].transpose(1, 2))
    for number in range(5):
        assert torch.equal(steps[number], ids[:, (4 + number) % 7])
    assert int(routing.step) == 9 % 7

    routing.restart()
    seen.clear()
    with torch.inference_mode():
        decoder.step()
        routing.remove()
        decoder.step()
    assert torch.equal(torch.stack(seen[:3]), ids[:, 0])
    assert int(routing.step) == 1


def test_stub_gives_zeros_and_goes_away() -> None:
    model = Synthetic(TINY, formats.get("bf16")).model()
    module = next(iter(find_experts(model).values()))
    x, ids, weights = torch.randn(3, 64).bfloat16(), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    with torch.inference_mode():
        before = module(x, ids, weights)
        with stubbed(model):
            nothing = module(x, ids, weights)
        after = module(x, ids, weights)
    assert nothing.shape == x.shape and nothing.dtype == x.dtype and not nothing.any()
    assert before.any() and torch.equal(before, after)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v4"])
def test_prompt_and_steps_give_the_logits_of_one_call(family: str) -> None:
    """Beyond the window of layers that slide, and with experts that the routers choose; a wider window is seen."""
    shape = TINY if family == "qwen3_moe" else small(family)
    model = Synthetic(shape, formats.get("nvfp4"), dtype=torch.float32).model()
    ids = torch.randint(96, (2, 30), generator=torch.Generator().manual_seed(3))
    found: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda *args: found.append(args[2][:, -1].clone()))

    def decode(decoder: Decoder) -> torch.Tensor:
        found.clear()
        decoder.read(ids[:, :11])
        for at in range(11, 30):
            assert torch.equal(decoder.token[:, 0], found[-1].argmax(1))
            decoder.token.copy_(ids[:, at : at + 1])
            decoder.step()
        return torch.stack(found, 1)

    with torch.inference_mode():
        wanted = model(ids).logits[:, 10:]
        decoder = Decoder(model, 2, 32, torch.device("cpu"))
        torch.testing.assert_close(decode(decoder), wanted, rtol=1e-3, atol=1e-4)
        if family == "gpt_oss":
            decoder.restart()
            assert decoder.fixed is not None and decoder.fixed._window is not None
            decoder.fixed._window += 4
            assert (decode(decoder) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("is_stub", [False, True])
def test_compiled_steps_are_those_that_run(family: str, is_stub: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drawn experts, whose step moves on, and with experts that do nothing."""
    monkeypatch.setenv("FREETOKEN_COMPILE", "on")
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    made = Synthetic(TINY if family == "qwen3_moe" else small(family), formats.get("mxfp4"), dtype=torch.float32)
    plan = made.plan
    model = made.model()
    routing = Routing(model, draw_routes(plan.layers, 16, 1, plan.n_experts, plan.top_k), "cpu")
    decoder, found = Decoder(model, 1, 40, torch.device("cpu")), []
    assert decoder.fixed is not None
    for compiles in (False, True):
        decoder.restart()
        routing.restart()
        with torch.no_grad(), stubbed(model) if is_stub else contextlib.nullcontext():
            decoder.steps(3)
            with decoder.fixed.compiled(1, 40) if compiles else contextlib.nullcontext():
                for _ in range(20):
                    decoder.step()
                    found.append((int(decoder.token), int(decoder.position), int(routing.step)))
    assert found[:20] == found[20:]
    assert decoder.fixed._compiled is not None and decoder.fixed._compiled._graphs == 4, (
        "hooks of the last layer differ"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_replayed_steps_are_those_that_run(family: str) -> None:
    """With drawn experts, whose step a replay moves on; experts do nothing, which any device can."""
    made = Synthetic(TINY if family == "qwen3_moe" else small(family), formats.get("mxfp4"))
    device, plan = torch.device("cuda", 0), made.plan
    model = made.model(device)
    routing = Routing(model, draw_routes(plan.layers, 16, 1, plan.n_experts, plan.top_k), device)
    decoder, found = Decoder(model, 1, 40, device), []
    for captured in (False, True):
        decoder.restart()
        routing.restart()
        with torch.inference_mode(), stubbed(model):
            decoder.steps(2 if captured else 3)
            if captured:
                decoder.capture()  # which runs a step
            found.append([])
            for _ in range(30):
                decoder.step()
                found[-1].append((int(decoder.token), int(decoder.position), int(routing.step)))
    assert found[0] == found[1]
    assert found[1][-1][1:] == (33, 33 % 16)


def test_blocks_are_as_many_as_asked() -> None:
    steps: list[int] = []
    decoder = SimpleNamespace(device=torch.device("cpu"), steps=steps.append)
    assert len(time_blocks(decoder, 3)) == 3  # type: ignore[arg-type]
    assert steps == [8, 8, 8]


def test_counters_are_of_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(hits: int, misses: int, fetched: int, streamed: int) -> Counters:
        statistics = SimpleNamespace(hits=hits, misses=misses, fetched_bytes=fetched)
        usage = SimpleNamespace(slots=7, statistics=statistics, streamed_bytes=streamed)
        monkeypatch.setattr(gpu_decode.freetoken, "report", lambda _: SimpleNamespace(device=usage))
        return read_counters(None)

    before, after = read(10, 5, 500, 30), read(40, 15, 1500, 80)
    found = after.since(before)
    assert found == Counters(7, 30, 10, 1050)
    assert found.hit_rate == 0.75
    assert found.moved_for_each(10) == 105
    assert before.since(before).hit_rate is None


def test_banks_are_pinned_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[object] = []
    pinned = Pinned(("pinned", "refused"), (100, 30), "the driver says no")
    layer = SimpleNamespace(experts=SimpleNamespace(wait_until_pinned=lambda: calls.append("waited") or pinned))
    monkeypatch.setattr(gpu_decode, "place", lambda model, **given: calls.append(given))
    monkeypatch.setattr(gpu_decode, "layer_of", lambda module: layer if isinstance(module, torch.nn.Linear) else None)
    model = torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Linear(2, 2))

    put_on(model, torch.device("cpu"), "cpu", None)
    assert calls == []
    put_on(model, torch.device("cuda", 1), "offload", 0.25)
    put_on(model, torch.device("cuda", 0), "resident", None)
    assert calls[0] == {"device": "cuda:1", "strategy": "offload", "cache": 0.25}
    assert calls[2] == {"device": "cuda:0", "strategy": "resident", "cache": "auto"}
    assert calls[1] == calls[3] == "waited"
    assert "layers 1 refused, 30 bytes (the driver says no)" in capsys.readouterr().err


@pytest.mark.parametrize("usage", [None, SimpleNamespace(slots=0, statistics=None)])
def test_model_without_slots_counts_nothing(usage: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode.freetoken, "report", lambda _: SimpleNamespace(device=usage))
    found = read_counters(None)
    assert found.since(found).hit_rate is found.moved_for_each(4) is found.slots is None


def test_distinct_experts_of_a_step() -> None:
    """Two layers of two steps of two tokens: (3, 2) in the first, (4, 4) in the second."""
    ids = torch.tensor([[[[0, 1], [1, 2]], [[0, 1], [1, 0]]], [[[0, 1], [2, 3]], [[4, 5], [7, 6]]]])
    assert distinct(ids) == 2.5 + 4


FAST = Rates(host=100.0, link=50.0, device=4000.0)


@pytest.mark.parametrize(
    ("strategy", "fetched", "given", "wanted"),
    [
        ("cpu", None, FAST, 10.0),
        ("resident", None, FAST, 0.25),
        ("offload", 500.0, FAST, 10.0),
        ("offload", 1.0, FAST, 0.25),
        ("offload", None, FAST, None),
        ("offload", 500.0, Rates(100.0), None),
        ("resident", None, Rates(100.0), None),
        ("cpu", None, Rates(100.0), 10.0),
        ("hybrid", 100.0, FAST, 6.0),
        ("hybrid", None, Rates(10.0, 100.0, 100.0), 10.0),
        ("hybrid", 100.0, Rates(100.0), None),
    ],
)
def test_least_time_of_bytes(strategy: str, fetched: float | None, given: Rates, wanted: float | None) -> None:
    assert byte_seconds(strategy, 1000.0, fetched, 600.0, given) == wanted


def test_limits() -> None:
    assert limits(4, 0.5, 1.5) == (4 / 1.5, 2.0)
    assert limits(4, 0.5, None) == (None, None)


@pytest.mark.parametrize(
    ("text", "wanted"), [("auto", "auto"), ("96", 96), ("0.25", 0.25), ("25%", 0.25), ("4GiB", "4GiB")]
)
def test_caches(text: str, wanted: object) -> None:
    found = parse_cache(text)
    assert found == wanted and type(found) is type(wanted)


ARGUMENTS = ["--model", "tiny", "--device", "cpu", "--tokens", "16", "--warmup", "3", "--layers", "2", "--threads", "1"]


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The formats whose banks were built."""
    found: list[str] = []

    def make(shape: ModelShape, fmt: Any, *args: Any, **kwargs: Any) -> Synthetic:
        found.append(fmt.name)
        return Synthetic(shape, fmt, *args, **kwargs)

    monkeypatch.setattr(gpu_decode, "Synthetic", make)
    monkeypatch.setattr(rates, "roof", lambda memory, threads: 1e9)
    return found


def test_rows_are_measured_once(tmp_path: Path, builds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A second run measures only what is missing; a row torn by a crash is measured again and harms no other."""
    file = tmp_path / "table.jsonl"
    arguments = [*ARGUMENTS, "--prefill", "9", "--batch", "2", "--skew", "1", "--locality", "0.5", "--out", str(file)]
    gpu_decode.main([*arguments, "--format", "nvfp4"])
    assert builds == ["nvfp4"]
    first = file.read_text()

    gpu_decode.main([*arguments, "--format", "nvfp4", "bf16"])
    assert builds == ["nvfp4", "bf16"]
    assert file.read_text().startswith(first)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(row["what"], row["format"]) for row in rows] == [
        (what, name) for name in ("nvfp4", "bf16") for what in ("decode", "prefill")
    ]
    assert all(set(KEY) <= set(row) for row in rows)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^\| (?:decode|prefill 9) \| ", printed, re.MULTILINE)) == 2 + 4

    file.write_text(first[:-20])
    gpu_decode.main([*arguments, "--format", "nvfp4"])
    assert builds == ["nvfp4", "bf16", "nvfp4"]
    lines = file.read_text().splitlines()
    assert len(lines) == 3 and json.loads(lines[0]) == rows[0]
    assert json.loads(lines[2])["what"] == "prefill"
    assert "is no row and is left alone" in capsys.readouterr().err

    gpu_decode.main([*arguments, "--format", "nvfp4", "--seed", "1"])
    assert builds[3:] == ["nvfp4"]


def test_row_says_speed_bytes_and_limits(tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts its readings: 1 s a block, so 8 tokens/s of each sequence, and as much for the stub."""
    clock = iter(range(10_000))
    monkeypatch.setattr(gpu_decode.time, "perf_counter", lambda: float(next(clock)))
    file = tmp_path / "table.jsonl"
    gpu_decode.main([*ARGUMENTS, "--prefill", "9", "--batch", "2", "--out", str(file)])
    decode, prefill = (json.loads(line) for line in file.read_text().splitlines())
    nbytes = RecordLayout(formats.get("nvfp4"), 64, 32).nbytes
    ids = draw_routes(2, 3 + 16, 2, 8, 2)[:, 3:]
    routed = sum(len(set(step.flatten().tolist())) for layer in ids for step in layer) / 16 * nbytes

    assert (decode["tokens_per_s"], decode["p10"], decode["p90"], decode["stub_ms"]) == (16, 16, 16, 125)
    assert decode["routed_bytes_per_token"] == pytest.approx(routed / 2)
    assert decode["limit_bytes"] == pytest.approx(2 / (routed / 1e9))
    assert decode["limit"] == pytest.approx(2 / (0.125 + routed / 1e9))
    assert decode["share"] == pytest.approx(16 / decode["limit"])
    assert decode["fetched_bytes_per_token"] is decode["hit_rate"] is decode["slots"] is None
    assert prefill["seconds"] == prefill["compute_seconds"] == 1
    assert prefill["tokens_per_s"] == prefill["limit"] == 18
    read = draw_routes(2, 9, 2, 8, 2).flatten(1)
    assert prefill["copy_seconds"] == pytest.approx(sum(len(set(r.tolist())) for r in read) * nbytes / 1e9)


def test_table_without_a_file() -> None:
    table, row = Table(None), dict.fromkeys(KEY, 1)
    assert table.find(row) is None
    table.add(row | {"tokens_per_s": 2})
    assert table.find(row) == row | {"tokens_per_s": 2}
    assert table.find(row | {"batch": 2}) is None


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tokens", "9"], "multiple of 8"),
        (["--tokens", "0"], "multiple of 8"),
        (["--locality", "1.5"], "from 0 to 1"),
        (["--layers", "7"], "tiny has 3 layers"),
        (["--strategy", "offload"], "need a GPU"),
        (["--graph", "stub"], "need a GPU"),
    ],
)
def test_bad_arguments(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_decode.main([*ARGUMENTS, *more])
    assert message in capsys.readouterr().err


def test_failed_row_is_named_and_not_kept(
    tmp_path: Path, builds: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object) -> None:
        raise CapacityError("no room for so many slots", needed=2, available=1, where="a test")

    monkeypatch.setattr(gpu_decode, "put_on", refuse)
    file = tmp_path / "table.jsonl"
    with pytest.raises(SystemExit, match="1 of the rows"):
        gpu_decode.main([*ARGUMENTS, "--out", str(file)])
    assert "no room for so many slots" in capsys.readouterr().err
    assert not file.exists()
