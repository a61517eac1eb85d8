"""Life inside transformers: every way to generate, compile, two models at once, deletion, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import os
import pickle
import re
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

import freetoken
from freetoken import formats
from freetoken.banks import Bank
from freetoken.errors import CheckpointError, FreeTokenError, UnsupportedError
from freetoken.executor import Activation, Executor
from freetoken.formats.record import RecordLayout
from freetoken.integration.activation import find_activation
from freetoken.integration.operator import attach_layer, experts_forward, layer_of
from tests.support.checkpoints import EXPERTS, HIDDEN, LAYERS, VOCABULARY, write_qwen3
from tests.support.experts import make_expert
from tests.support.oracle import dequantize_folder, new_cache, stock_model

PROMPT = torch.tensor([[1, 5, 17, 33, 60, 8]])


def load(folder: Path, **arguments: Any) -> Any:
    return freetoken.load(folder, **{"dtype": torch.float32} | arguments)[0]


def generate(model: Any, ids: torch.Tensor = PROMPT, **arguments: Any) -> list[list[int]]:
    mask = (ids != 0).long()
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | arguments
    found: list[list[int]] = model.generate(input_ids=ids, attention_mask=mask, **settings).tolist()
    return found


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Pipelines and continuous batching log advice at WARNING; that is theirs."""
    level = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(level)


# --- generating ------------------------------------------------------------------------------------------------------


def test_it_is_an_ordinary_transformers_model(model: Any) -> None:
    assert type(model) is transformers.Qwen3MoeForCausalLM
    assert model.get_experts_implementation() == {"": "freetoken"}
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training


def test_greedy_tokens_are_stocks(model: Any, stock: Any) -> None:
    found = generate(model, max_new_tokens=40)
    assert found == generate(stock, max_new_tokens=40)
    assert len(set(found[0])) > 8  # no loop that anything would fall into


def test_greedy_tokens_of_a_padded_batch_are_stocks(model: Any, stock: Any) -> None:
    ids = torch.tensor([[1, 5, 17, 33, 60, 8], [0, 0, 0, 1, 44, 21]])
    assert generate(model, ids) == generate(stock, ids)


def test_sampling_with_a_seed_gives_stocks_tokens(model: Any, stock: Any) -> None:
    def sample(which: Any, seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        return generate(which, do_sample=True, temperature=1.5, top_p=0.95, top_k=0)

    assert sample(model, 3) == sample(stock, 3)
    assert sample(model, 3) == sample(model, 3)
    assert sample(model, 3) != sample(model, 4)


def test_beams_are_stocks(model: Any, stock: Any) -> None:
    settings = {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.8}
    found = generate(model, **settings)
    assert found == generate(stock, **settings)
    assert len({tuple(row) for row in found}) == 3


def test_a_static_cache_gives_the_same_tokens(model: Any) -> None:
    assert generate(model, cache_implementation="static", disable_compile=True) == generate(model)


def test_generate_batch(model: Any) -> None:
    prompts = [[1, 5, 17, 33], [1, 60], [8, 9, 10, 11, 12, 13, 14]]
    settings = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32)  # else it fills the memory
    with quiet_transformers():
        outputs = model.generate_batch(
            inputs=prompts, generation_config=settings, continuous_batching_config=small, warmup=False
        )
    found = sorted(list(out.generated_tokens) for out in outputs.values())
    expected = sorted(generate(model, torch.tensor([p]), max_new_tokens=6)[0][len(p) :] for p in prompts)
    assert found == expected


def test_a_pipeline(model: Any, stock: Any, tokenizer: Any) -> None:
    def run(which: Any) -> str:
        pipe = transformers.pipeline("text-generation", model=which, tokenizer=tokenizer, device="cpu")
        return str(pipe("w5 w17 w33", max_new_tokens=8, do_sample=False)[0]["generated_text"])

    with quiet_transformers():
        found, expected = run(model), run(stock)
    assert found.startswith("w5 w17 w33")
    assert found == expected


def test_the_demo_model_continues_as_it_did_where_it_was_trained(shared_dir: Path) -> None:
    """Greedy ids in fp32, recorded on another machine by stock transformers."""
    import json

    folder = shared_dir / "models" / "demo"
    samples = json.loads((folder / "eval.json").read_text())["samples"]
    model, tokenizer = freetoken.load(folder, dtype=torch.float32)
    for sample in samples[:2]:
        ids = tokenizer(sample["prompt"], return_tensors="pt").input_ids
        known = sample["greedy_ids"]
        expected = known if known[: ids.shape[1]] == ids[0].tolist() else ids[0].tolist() + known
        found = generate(model, ids, max_new_tokens=40)[0]
        assert found == expected[: len(found)]


# --- compiled --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch.compile's own
def test_a_decode_step_compiles_into_one_graph(model: Any) -> None:
    def two_steps(forward: Any) -> list[torch.Tensor]:
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        name = next(iter(new_cache(model)))
        logits = []
        with torch.no_grad():
            out = model(input_ids=PROMPT, use_cache=True, **{name: cache})
            for position in (6, 7):
                token = out.logits[:, -1:].argmax(-1)
                out = forward(input_ids=token, position_ids=torch.tensor([[position]]), use_cache=True, **{name: cache})
                logits.append(out.logits)
        return logits

    torch._dynamo.reset()
    eager = two_steps(model.forward)
    for compiled in (
        torch.compile(model.forward, fullgraph=True, backend="aot_eager"),
        torch.compile(model, fullgraph=True, backend="aot_eager"),
    ):
        for found, expected in zip(two_steps(compiled), eager, strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch._dynamo.reset()


def test_the_operator_passes_torchs_own_checks(model: Any) -> None:
    module = model.model.layers[0].mlp.experts
    x, ids = torch.randn(3, HIDDEN), torch.tensor([[0, 1], [2, 3], [1, 0]])
    arguments = (x, ids, torch.rand(3, 2), module._freetoken_handle)
    torch.library.opcheck(torch.ops.freetoken.experts.default, arguments, test_utils=("test_schema", "test_faketensor"))


# --- several models, and where experts are ---------------------------------------------------------------------------


def test_two_models_of_different_formats_in_one_process(tiny: Path, model: Any) -> None:
    before = generate(model)
    other = load(tiny, expert_format="mxfp4", dtype=torch.bfloat16)
    names = [{layer_of(m).bank.layout.format.name for m in which.modules() if layer_of(m)} for which in (model, other)]
    assert names == [{"bf16"}, {"mxfp4"}]
    with torch.no_grad():
        a, b = model(input_ids=PROMPT).logits, other(input_ids=PROMPT).logits.float()
    assert 0.01 < (a - b).norm() / a.norm() < 1
    del other
    gc.collect()
    assert generate(model) == before


def test_experts_are_not_part_of_torchs_state(model: Any, tiny: Path) -> None:
    names = {n for n, _ in [*model.named_parameters(), *model.named_buffers()]} | set(model.state_dict())
    assert not [n for n in names if ".experts" in n]
    dense = sum(t.numel() for n, t in dequantize_folder(tiny).items() if ".experts." not in n)
    assert sum(p.numel() for p in model.parameters()) == dense
    assert not [p for p in model.parameters() if p.is_meta]
    layers = [m for m in model.modules() if layer_of(m) is not None]
    assert len(layers) == LAYERS
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    assert stream.tell() < 2 * 4 * dense


def test_moving_to_the_cpu_moves_no_bank(tiny: Path) -> None:
    mine = load(tiny)
    before = [layer_of(m).bank.records.ctypes.data for m in mine.modules() if layer_of(m)]
    tokens = generate(mine)
    assert mine.to("cpu") is mine
    assert mine.eval() is mine
    assert [layer_of(m).bank.records.ctypes.data for m in mine.modules() if layer_of(m)] == before
    assert generate(mine) == tokens


def test_a_deleted_model_frees_its_banks(tiny: Path) -> None:
    mine = load(tiny)
    generate(mine)
    records = [weakref.ref(layer_of(m).bank.records) for m in mine.modules() if layer_of(m)]
    mappings = [weakref.ref(layer_of(m).bank.records.base.base) for m in mine.modules() if layer_of(m)]
    assert len(records) == LAYERS
    assert all(r() is not None for r in [*records, *mappings])
    del mine
    gc.collect()
    assert not [r for r in [*records, *mappings] if r() is not None]


def test_a_deleted_model_gives_its_memory_back(tiny: Path) -> None:
    """With a bank of 256 MB in place of one of its own."""
    mine = load(tiny)
    layout = RecordLayout(formats.get("bf16"), HIDDEN, 32)
    bank = Bank(layout, (256 << 20) // layout.nbytes)
    expert = make_expert(layout.format, HIDDEN, 32)
    layout.pack(expert, bank.records[0])
    bank.records[1:] = bank.records[0]
    bank._present[:] = True
    module = mine.model.layers[0].mlp.experts
    attach_layer(module, layer_of(module).executor.bind(bank, Activation()))
    del bank, module
    generate(mine)
    gc.collect()
    rss = psutil.Process().memory_info().rss
    del mine
    gc.collect()
    assert rss - psutil.Process().memory_info().rss > 240 << 20


# --- what cannot be done says so in one line -------------------------------------------------------------------------


def check_one_line(error: BaseException, *words: str) -> None:
    message = str(error)
    assert "\n" not in message
    assert len(message) < 250
    for word in words:
        assert word in message


REFUSED = {
    "deepcopy": (copy.deepcopy, "cannot be copied or pickled"),
    "pickle": (pickle.dumps, "cannot be copied or pickled"),
    "torch.save": (lambda m: torch.save(m, io.BytesIO()), "cannot be copied or pickled"),
    "deepcopy of experts": (lambda m: copy.deepcopy(m.model.layers[0].mlp.experts), "cannot be copied or pickled"),
    "pickle of a layer": (lambda m: pickle.dumps(layer_of(m.model.layers[0].mlp.experts)), "cannot be copied"),
    "pickle of an executor": (lambda m: pickle.dumps(layer_of(m.model.layers[0].mlp.experts).executor), "copied"),
    "half": (lambda m: m.half(), "not supported for quantized model"),
    "float": (lambda m: m.float(), "not supported for quantized model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_to_a_model(model: Any, case: str) -> None:
    action, words = REFUSED[case]
    before = generate(model)
    with pytest.raises((FreeTokenError, ValueError)) as caught:
        action(model)
    check_one_line(caught.value, words)
    assert generate(model) == before


def test_saving_is_refused_and_writes_no_weights(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as caught:
        model.save_pretrained(tmp_path / "out")
    check_one_line(caught.value, "cannot be saved", "keep the checkpoint")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_there_are_no_gradients(model: Any) -> None:
    embedded = model.get_input_embeddings()(PROMPT).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    with pytest.raises(RuntimeError, match="no autograd formula") as caught:
        logits.sum().backward()
    check_one_line(caught.value)


def in_child(action: Any) -> str:
    """What an action says in a forked child, or "hang"."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            answer = "it worked"
        except BaseException as error:  # noqa: BLE001  the child must end here, whatever happens
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    answers: list[bytes] = []
    reader = threading.Thread(target=lambda: answers.append(os.read(read, 4096)))
    reader.start()
    reader.join(20)
    if not answers:
        os.kill(pid, 9)
        reader.join()
        answers = [b"hang"]
    os.waitpid(pid, 0)
    os.close(read)
    return answers[0].decode()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_after_fork_is_refused_at_once(model: Any) -> None:
    before = generate(model, torch.arange(3, 67)[None])  # long enough for torch to have started its threads
    expected = "UnsupportedError: this model was loaded before a fork and cannot run in the child; load it in the child"
    layer = layer_of(model.model.layers[0].mlp.experts)
    actions = [
        lambda: model(input_ids=PROMPT),
        lambda: model.model(input_ids=PROMPT),
        lambda: generate(model),
        lambda: layer.run(torch.ones(1, HIDDEN), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1)),
    ]
    for action in actions:
        assert in_child(action).startswith(expected)
    assert generate(model, torch.arange(3, 67)[None]) == before


def test_loading_in_several_threads(tiny: Path, model: Any) -> None:
    """transformers patches itself while it builds a model; loads take turns there."""
    with ThreadPoolExecutor(3) as pool:
        loaded = list(pool.map(lambda _: freetoken.load(tiny, dtype=torch.float32)[0], range(6)))
    expected = generate(model)
    assert [generate(other) for other in loaded] == [expected] * 6


def test_two_threads_on_one_model_are_both_right(model: Any) -> None:
    prompts = [torch.tensor([[1, 5, 17, 33]]), torch.tensor([[1, 60, 9, 2, 44, 71]])] * 3
    expected = [generate(model, p, max_new_tokens=16) for p in prompts]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda p: generate(model, p, max_new_tokens=16), prompts)) == expected


# --- the experts function --------------------------------------------------------------------------------------------


def test_an_index_beyond_the_experts_is_skipped(model: Any) -> None:
    """Expert parallelism marks experts of other ranks by num_experts."""
    module = model.model.layers[0].mlp.experts
    torch.manual_seed(0)
    x, weights = torch.randn(4, HIDDEN), torch.rand(4, 2)
    ids = torch.tensor([[0, 1], [2, EXPERTS], [EXPERTS, EXPERTS], [-1, 3]])
    out = experts_forward(module, x, ids, weights)
    kept = torch.where((ids >= 0) & (ids < EXPERTS), weights, 0)
    expected = experts_forward(module, x, ids.clamp(0, EXPERTS - 1), kept)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert torch.equal(out[2], torch.zeros(HIDDEN))


def test_experts_without_a_bank(model: Any) -> None:
    """A model built from a loaded model's config inherits the implementation, but no experts."""
    config = copy.deepcopy(model.config)
    other = type(model)(config)
    with pytest.raises(FreeTokenError) as caught:
        other(input_ids=PROMPT)
    check_one_line(caught.value, "Qwen3MoeExperts has no expert bank", "freetoken.load")


def test_a_layer_whose_model_is_gone() -> None:
    with pytest.raises(FreeTokenError) as caught:
        torch.ops.freetoken.experts(
            torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1), torch.tensor(10**9)
        )
    check_one_line(caught.value, "is gone")


def test_activations_on_meta_are_refused(model: Any) -> None:
    layer = layer_of(model.model.layers[0].mlp.experts)
    with pytest.raises(UnsupportedError) as caught:
        layer.run(torch.zeros(1, HIDDEN, device="meta"), torch.zeros(1, 1), torch.ones(1, 1))
    check_one_line(caught.value, "meta device")


@pytest.mark.gpu
def test_a_dense_part_on_a_gpu_gives_the_same_tokens(tiny: Path, model: Any) -> None:
    """Banks stay where they are; activations cross over and back."""
    moved = freetoken.load(tiny, dtype=torch.float32)[0].cuda()
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = moved.generate(input_ids=PROMPT.cuda(), attention_mask=torch.ones_like(PROMPT).cuda(), **settings)
    assert found.tolist() == generate(model)


# --- activations -----------------------------------------------------------------------------------------------------


class FakeExperts(torch.nn.Module):
    """As much of an experts module as is looked at."""

    is_concatenated = True
    is_transposed = False
    has_gate = True
    has_bias = False

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


class FakeGptOssExperts(FakeExperts):
    is_concatenated = False

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class FakeClampedExperts(FakeExperts):
    """Clamps, then SiLU: near enough to plain SiLU to be taken for it by its name or on small numbers."""

    clamp = 10.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate.clamp(max=self.clamp)) * up.clamp(-self.clamp, self.clamp)


class FakeClampedLateExperts(FakeExperts):
    """SiLU, then the clamp: the same but near the limit."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


class FakeGeluExperts(FakeExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate) * up


class FakeSwappedExperts(FakeExperts):
    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        up, gate = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up


def test_known_activations_are_found() -> None:
    assert find_activation(FakeExperts()) == Activation("silu")
    assert find_activation(FakeGptOssExperts(alpha=1.702, limit=7.0)) == Activation("swiglu_clamped", 1.702, 7.0)
    assert find_activation(FakeClampedExperts(limit=10)) == Activation("silu_limited", limit=10.0)
    assert find_activation(FakeClampedExperts(swiglu_limit=7.0, clamp=7.0)) == Activation("silu_limited", limit=7.0)
    assert find_activation(FakeClampedExperts(limit=2e4, clamp=2e4)) == Activation("silu_limited", limit=2e4)
    assert find_activation(FakeExperts(limit=2e4)) == Activation("silu"), "a limit that is not applied"
    assert find_activation(FakeClampedExperts(limit=math.inf, clamp=math.inf)) == Activation("silu")
    assert find_activation(FakeGptOssExperts(alpha=1.5, limit=9)) == Activation("swiglu_clamped", 1.5, 9.0)


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (FakeClampedExperts(), "activation that no kernel has"),
        (FakeClampedExperts(alpha=1.0, limit=9.0), "activation that no kernel has"),
        (FakeClampedLateExperts(limit=10.0), "activation that no kernel has"),
        (FakeGeluExperts(), "activation that no kernel has"),
        (FakeSwappedExperts(), "activation that no kernel has"),
        (FakeExperts(has_gate=False), "without a gate"),
        (FakeExperts(has_post_expert_norm=True), "a norm after each expert"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, torch.nn.Module) else "",
)
def test_what_no_kernel_has_is_refused_by_its_class(module: torch.nn.Module, words: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        find_activation(module)
    check_one_line(caught.value, type(module).__name__, words)


def test_undecorated_experts_are_refused_by_their_class(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remote code that does not use transformers' dispatch keeps its own forward: it must not load."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    class UndecoratedExperts(torch.nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.empty(EXPERTS, 64, HIDDEN))

    monkeypatch.setattr(modeling_qwen3_moe, "Qwen3MoeExperts", UndecoratedExperts)
    with pytest.raises((UnsupportedError, CheckpointError)) as caught:
        freetoken.load(tiny)
    check_one_line(caught.value, "Qwen3MoeForCausalLM has no experts module")


# --- loading ---------------------------------------------------------------------------------------------------------


def test_nothing_is_printed_where_there_is_no_terminal(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""


def test_the_number_of_threads_changes_no_bit(tiny: Path) -> None:
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        found = [load(tiny, expert_format="nvfp4", threads=n)(input_ids=ids).logits for n in (1, 2)]
    assert torch.equal(*found)


def test_a_model_in_16_bits_runs(tiny: Path, stock: Any) -> None:
    with torch.no_grad():
        exact = stock(input_ids=PROMPT).logits
        for dtype in (torch.bfloat16, torch.float16):
            out = load(tiny, dtype=dtype)(input_ids=PROMPT).logits
            assert out.dtype == dtype
            assert (out.float() - exact).norm() / exact.norm() < 0.1


def test_experts_share_one_executor(model: Any) -> None:
    layers = [layer_of(m) for m in model.modules() if layer_of(m) is not None]
    assert len({id(layer.executor) for layer in layers}) == 1
    assert isinstance(layers[0].executor, Executor)
    assert re.fullmatch(r"<bank 4 x \d+ bytes, bf16>", repr(layers[0].bank))


def test_logits_of_a_long_prompt_are_stocks(tiny: Path, tmp_path: Path) -> None:
    """Longer than one pass over a layer takes."""
    folder = write_qwen3(tmp_path / "long", max_position_embeddings=1024)
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCABULARY, (2, 600)))
    with torch.no_grad():
        found = load(folder)(input_ids=ids).logits
        expected = stock_model(folder, dequantize_folder(folder), tmp_path / "stock")(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-4
