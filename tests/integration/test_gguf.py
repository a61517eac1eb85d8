"""Models in GGUF against the same models in safetensors: equal to the bit, text and perplexity included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

import freetoken
from freetoken.checkpoint.gguf import open_gguf
from freetoken.cli import main
from freetoken.errors import CheckpointError, ConfigError, UnsupportedError
from freetoken.fidelity import perplexity, read_tokens
from freetoken.integration.generate import generate_text
from tests.support.checkpoints import forbid_banks, qwen3_config
from tests.support.gguf import EXACT, Encode, Tensors, encode, encode_ours, gguf_tensors, write_gguf
from tests.support.oracle import dequantize_folder, map_experts, read_tensors
from tests.support.trained import Trained


def logits(model: Any, n: int = 40) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.arange(n)[None] + 3).logits
    return result


@pytest.fixture(scope="module")
def tensors(tiny: Path) -> Tensors:
    return gguf_tensors(qwen3_config(), dequantize_folder(tiny), Type.Q8_0)


def test_qwen3moe_is_what_safetensors_are(tmp_path: Path, tiny: Path, tensors: Tensors) -> None:
    """In both dtypes, from one file and from three."""
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    parts = write_gguf(tmp_path / "s.gguf", qwen3_config(), tensors, parts=3)
    for dtype, path in ((torch.float32, file), (None, parts)):
        model, tokenizer = freetoken.load(path, dtype=dtype)
        other, _ = freetoken.load(tiny, expert_format="q8_0", dtype=dtype)
        assert tokenizer is None, "none was written"
        assert model.dtype == (dtype or torch.bfloat16)
        torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)
        assert freetoken.report(model).formats == ("q8_0",)


def test_the_config_is_the_one_transformers_makes(tmp_path: Path, tensors: Tensors) -> None:
    """Whatever it reads from a file, but for fp32 numbers, of which it keeps the noise, and what it passes over."""
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    ours = AutoConfig.for_model(**open_gguf(file).config).to_dict()
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name).to_dict()
    noisy, passed_over = {"rms_norm_eps"}, {"moe_intermediate_size", "vocab_size"}
    differ = {key for key, value in theirs.items() if ours.get(key) != value}
    assert differ - {"_name_or_path", "architectures"} <= noisy | passed_over
    assert {key: ours[key] for key in (*noisy, *passed_over)} == {
        "rms_norm_eps": 1e-6,
        "moe_intermediate_size": 32,
        "vocab_size": 96,
    }


def test_qwen3moe_is_what_transformers_makes_of_the_file(tmp_path: Path, tensors: Tensors) -> None:
    """Its own loader, names, dequantization and experts, given a config with the width that it passes over."""
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    config = AutoConfig.for_model(**open_gguf(file).config)
    stock = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, config=config, dtype=torch.float32, experts_implementation="eager"
    )
    model, _ = freetoken.load(file, dtype=torch.float32)
    torch.testing.assert_close(logits(model), logits(stock), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", EXACT)
def test_our_codes_in_blocks_give_our_logits(tmp_path: Path, tiny: Path, name: str) -> None:
    ours = gguf_tensors(qwen3_config(), dequantize_folder(tiny), EXACT[name], encode_experts=encode_ours)
    model, _ = freetoken.load(write_gguf(tmp_path / "m.gguf", qwen3_config(), ours), dtype=torch.float32)
    other, _ = freetoken.load(tiny, expert_format=name, dtype=torch.float32)
    assert freetoken.report(model).formats == (name,)
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize(("kind", "fmt"), [(Type.BF16, "bf16"), (Type.Q8_0, "q8_0")])
def test_gpt_oss_is_what_safetensors_are(tmp_path: Path, gpt_oss: Path, kind: Type, fmt: str, merged: bool) -> None:
    config = json.loads((gpt_oss / "config.json").read_text())
    file = write_gguf(tmp_path / "m.gguf", config, gguf_tensors(config, read_tensors(gpt_oss), kind, merged))
    model, _ = freetoken.load(file, dtype=torch.float32)
    other, _ = freetoken.load(gpt_oss, dtype=torch.float32, expert_format=fmt)
    torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=0)
    assert freetoken.report(model).formats == (fmt,)


def test_gpt_oss_in_mxfp4(tmp_path: Path, gpt_oss: Path) -> None:
    """The same codes by both ways: bf16 holds every value of these mxfp4 blocks."""
    config = json.loads((gpt_oss / "config.json").read_text())
    file = write_gguf(tmp_path / "m.gguf", config, gguf_tensors(config, read_tensors(gpt_oss), Type.MXFP4))
    model, _ = freetoken.load(file, dtype=torch.float32)
    other, _ = freetoken.load(file, dtype=torch.float32, expert_format="bf16")
    assert freetoken.report(model).formats == ("mxfp4",)
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-5, atol=1e-5)


def test_k_quants_become_another_format(tmp_path: Path, tensors: Tensors, tiny: Path) -> None:
    """A type without a format of ours, in experts and in the dense part."""
    weights = dequantize_folder(tiny)
    odd = gguf_tensors(qwen3_config(), weights, Type.Q5_1)
    odd["output.weight"] = encode(weights["lm_head.weight"].float().numpy(), Type.Q5_0)
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), odd)
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps.weight' is Q5_1; .* expert_format='q8_0'"):
        freetoken.load(file)
    model, _ = freetoken.load(file, expert_format="q8_0", dtype=torch.float32)
    exact, _ = freetoken.load(write_gguf(tmp_path / "e.gguf", qwen3_config(), tensors), dtype=torch.float32)
    ours, wanted = logits(model), logits(exact)
    assert 0 < (ours - wanted).norm() / wanted.norm() < 0.1


@pytest.mark.parametrize(
    ("name", "shape", "words"),
    [
        ("output_norm.weight", (32,), r"'output_norm.weight' has shape \[32\], the metadata build \[64\]"),
        ("rope_freqs.weight", (8,), r"'rope_freqs.weight' \(F32 \[8\]\) belongs to nothing in Qwen3MoeForCausalLM"),
        ("blk.0.attn_v.weight", None, "1 tensors of the model are missing, first 'model.layers.0.self_attn.v_proj"),
    ],
)
def test_a_dense_part_that_does_not_fit(
    tmp_path: Path,
    tensors: Tensors,
    name: str,
    shape: tuple[int, ...] | None,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbid_banks(monkeypatch)
    changed = dict(tensors)
    changed.pop(name, None)
    if shape is not None:
        changed[name] = Type.F32, np.ones(shape, np.float32)
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), changed)
    with pytest.raises(CheckpointError, match=words):
        freetoken.load(file)


def test_more_experts_in_metadata_than_in_tensors(tmp_path: Path, tensors: Tensors) -> None:
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(num_experts=8), tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf says num_experts 8, .* has 4 experts"):
        freetoken.load(file)
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(num_experts_per_tok=5), tensors)
    with pytest.raises(CheckpointError, match=r"m\.gguf says num_experts_per_tok 5"):
        freetoken.load(file)


def test_what_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"models/m\.gguf does not exist"):
        freetoken.load("models/m.gguf")


def test_without_the_gguf_package(tmp_path: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UnsupportedError, match="pip install gguf"):
        freetoken.load(file)


def test_a_wrong_tokenizer(tmp_path: Path, tensors: Tensors) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text(json.dumps({"added_tokens": [], "model": {"vocab": {"a": 0}, "merges": ["a b"]}}))
    file = write_gguf(tmp_path / "m.gguf", qwen3_config(), tensors, broken)
    with pytest.raises(CheckpointError, match=r"m\.gguf: transformers [\d.]+ cannot use its tokenizer"):
        freetoken.load(file)


# --- the demo model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(shared_dir: Path) -> Path:
    return shared_dir / "models" / "demo"


@pytest.fixture(scope="module")
def demo_gguf(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = json.loads((demo / "config.json").read_text())
    tensors = gguf_tensors(config, dequantize_folder(demo), Type.Q8_0)
    return write_gguf(tmp_path_factory.mktemp("demo") / "demo.gguf", config, tensors, demo / "tokenizer.json")


def text_of(model: Any, tokenizer: Any) -> str:
    return generate_text(
        model, tokenizer, "Once upon a time", max_new_tokens=40, temperature=0, top_p=1, seed=None,
        expert_bytes_per_token=0, on_text=lambda text: None,
    ).text  # fmt: skip


def test_the_demo_says_the_same(demo: Path, demo_gguf: Path, shared_dir: Path, tmp_path: Path) -> None:
    model, tokenizer = freetoken.load(demo_gguf)
    other, own = freetoken.load(demo, expert_format="q8_0")
    part = (shared_dir / "models" / "heldout_test.txt").read_text()[:6000]
    (tmp_path / "text.txt").write_text(part)
    tokens = read_tokens(tmp_path / "text.txt", tokenizer)
    np.testing.assert_array_equal(tokens, read_tokens(tmp_path / "text.txt", own))
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (own.eos_token, own.pad_token, None)
    assert tokenizer.model_max_length == own.model_max_length
    assert text_of(model, tokenizer) == text_of(other, own)
    assert perplexity(model, tokens, 256) == perplexity(other, tokens, 256)


def perplexity_of(path: Path, trained: Trained, expert_format: str | None = None) -> float:
    model, _ = freetoken.load(path, expert_format=expert_format)
    return perplexity(model, trained.heldout[:2049]).perplexity


@pytest.mark.parametrize(
    ("name", "encode_experts"), [("bf16", encode), ("q8_0", encode), ("q4_0", encode), ("mxfp4", encode_ours)]
)
def test_perplexity_is_that_of_the_format(tmp_path: Path, trained: Trained, name: str, encode_experts: Encode) -> None:
    """To the bit that of safetensors: gguf's quantizers choose what ours do, but for MXFP4."""
    tensors = gguf_tensors(trained.config, trained.weights, EXACT[name], encode_experts=encode_experts)
    file = write_gguf(tmp_path / "m.gguf", trained.config, tensors)
    assert perplexity_of(file, trained) == perplexity_of(trained.folder, trained, name)


@pytest.mark.parametrize(
    ("kind", "name", "dtype"), [(Type.F16, "bf16", torch.float16), (Type.MXFP4, "mxfp4", torch.bfloat16)]
)
def test_perplexity_is_that_of_the_values(
    tmp_path: Path, trained: Trained, kind: Type, name: str, dtype: torch.dtype
) -> None:
    """To the bit that of safetensors with the values that gguf chose, in a dtype that holds them exactly.

    Its MXFP4 values are not ours (tests/formats/test_against_gguf.py), and fp16 cuts bits off small bf16 values.
    """

    def choose(matrix: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(gguf.dequantize(encode(matrix.numpy(), kind)[1], kind)).to(dtype)

    chosen = map_experts({n: t.to(torch.bfloat16) for n, t in trained.weights.items()}, choose)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(trained.config))
    save_file(chosen, plain / "model.safetensors")
    file = write_gguf(tmp_path / "m.gguf", trained.config, gguf_tensors(trained.config, trained.weights, kind))
    assert perplexity_of(file, trained) == perplexity_of(plain, trained, name)


def test_the_command_line_takes_a_file(demo_gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(demo_gguf)]) == 0
    assert "q8_0 (GGUF Q8_0); the config declares gguf (q8_0)" in capsys.readouterr().out
    arguments = ["generate", "--model", str(demo_gguf), "--max-new-tokens", "4", "--temperature", "0", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 4
    with pytest.raises(ConfigError, match="unknown expert format"):
        freetoken.load(demo_gguf, expert_format="q9")
