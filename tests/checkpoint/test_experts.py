"""Experts found by their tensors' names and read: every tool's folder, every dialect, and everything that is refused.

What is read is compared bit for bit with tests/support/oracle.py, which is checked here against compressed-tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from freetoken.banks import Bank
from freetoken.checkpoint.experts import ExpertGroup, ExpertScan
from freetoken.checkpoint.inspect import check_config
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.safetensors import open_checkpoint
from freetoken.checkpoint.scan import scan
from freetoken.errors import CheckpointError
from freetoken.executor import Activation, Executor
from tests.support.checkpoints import (
    DIALECTS,
    EXPERTS,
    HIDDEN,
    LAYERS,
    MODELOPT,
    NATIVE_MXFP4,
    WIDTH,
    Tensor,
    Tensors,
    bf16,
    compressed_fp8,
    compressed_tensors,
    experts,
    forbid_banks,
    fp8,
    fp32,
    matrix,
    qwen3_config,
    qwen3_tensors,
    write_folder,
    write_qwen3,
)
from tests.support.oracle import dequantize_folder, dequantize_matrix, e2m1, gridwise, read_tensors, take_expert

PREFIX = "model.layers.0.mlp.experts"
QUANTIZED = [d for d in DIALECTS if d != "bf16"]


def scan_folder(folder: Path) -> ExpertScan:
    return scan(open_checkpoint(folder))


def same_bits(found: Any, expected: torch.Tensor | None) -> bool:
    if expected is None or found is None:
        return expected is None and found is None
    wanted = expected.float().contiguous().numpy()
    return found.dtype == np.float32 and found.shape == wanted.shape and found.tobytes() == wanted.tobytes()


def check_group(group: ExpertGroup, plain: dict[str, torch.Tensor]) -> None:
    """Every expert of a group equals the oracle's, bit for bit; the sign of zero counts."""
    for e in range(group.n_experts):
        expert, expected = group.read(e), take_expert(plain, group.prefix, e)
        for name in ("gate", "up", "down"):
            assert same_bits(getattr(expert, name).dequantize(), expected[name]), f"{group.prefix}.{e} {name}"
            assert same_bits(getattr(expert, f"{name}_bias"), expected[f"{name}_bias"]), f"{group.prefix}.{e} {name}"


# --- what real tools wrote -------------------------------------------------------------------------------------------

SHARED = {  # format, spelling, bias, fused, transposed, layers
    "fp4-deepseekv4-constructed": ("ds_fp4", "deepseek", False, False, False, 2),
    "fp8block-llmcompressor-qwen3moe256": ("fp8_block", "compressed-tensors", False, False, False, 2),
    "fp8block-transformers-qwen3moe256": ("fp8_block", "transformers", False, False, False, 2),
    "bf16-transformers-deepseekv3": ("bf16", "plain", False, False, False, 1),
    "bf16-transformers-deepseekv4": ("bf16", "plain", False, False, False, 2),
    "bf16-transformers-gptoss": ("bf16", "plain", True, True, True, 2),
    "bf16-transformers-mixtral": ("bf16", "plain", False, False, False, 2),
    "bf16-transformers-qwen3moe": ("bf16", "plain", False, False, False, 2),
    "mxfp4-native-gptoss-repacked": ("mxfp4", "gpt-oss", True, True, False, 2),
    "mxfp4a16-llmcompressor-gptoss": ("mxfp4", "compressed-tensors", True, False, False, 2),
    "mxfp4a16-llmcompressor-qwen3moe": ("mxfp4", "compressed-tensors", False, False, False, 2),
    "nvfp4-llmcompressor-qwen3moe": ("nvfp4", "compressed-tensors", False, False, False, 2),
    "nvfp4-modelopt-gptoss": ("nvfp4", "modelopt", True, True, True, 2),
    "nvfp4-modelopt-mixtral": ("nvfp4", "modelopt", False, False, False, 2),
    "nvfp4-modelopt-qwen3moe": ("nvfp4", "modelopt", False, False, False, 2),
    "nvfp4a16-llmcompressor-deepseekv3": ("nvfp4", "compressed-tensors", False, False, False, 1),
    "nvfp4a16-llmcompressor-qwen3moe": ("nvfp4", "compressed-tensors", False, False, False, 2),
    "nvfp4a16-modelopt-qwen3moe": ("nvfp4", "modelopt", False, False, False, 2),
}
REFUSED = {
    "w4a16-llmcompressor-qwen3moe256": "format 'pack-quantized'",
}


def test_the_tables_name_every_folder(shared_dir: Path) -> None:
    folders = {f.parent.name for f in (shared_dir / "checkpoints").glob("*/config.json")}
    assert folders == SHARED.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", SHARED)
def test_a_real_folder_is_scanned_and_read_bit_for_bit(shared_dir: Path, name: str) -> None:
    folder = shared_dir / "checkpoints" / name
    found = scan_folder(folder)
    fmt, spelling, bias, fused, transposed, layers = SHARED[name]
    assert len(found.groups) == layers
    plain = dequantize_folder(folder)
    for group in found.groups:
        assert (group.format.name, group.written.spelling.name) == (fmt, spelling)
        scale = 2 if name.endswith("256") else 1
        assert (group.n_experts, group.hidden, group.intermediate) == (8, 128 * scale, 64 * scale)
        assert (group.bias, group.fused, group.transposed) == (bias, fused, transposed)
        assert group.interleaved is (fused and "gptoss" in name)
        group.check_scales()
        check_group(group, plain)
    claimed = {n for n in read_tensors(folder) if re.search(r"(^|\.)experts\.", n)}
    assert found.expert_tensors == claimed


@pytest.mark.parametrize("name", REFUSED)
def test_a_real_folder_that_is_refused(shared_dir: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        scan_folder(shared_dir / "checkpoints" / name)


@pytest.mark.parametrize("name", [n for n in SHARED if "llmcompressor" in n])
def test_the_oracle_agrees_with_compressed_tensors(shared_dir: Path, name: str) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((shared_dir / "checkpoints" / name / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(**{k: group[k] for k in ("targets", "weights", "format")})
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for tensor_name, tensor in read_tensors(shared_dir / "checkpoints" / name).items():
        module, _, suffix = tensor_name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    packed = {m: parts for m, parts in modules.items() if "weight_scale" in parts}
    assert len(packed) > 30
    for module, parts in packed.items():
        parts = {suffix: t for suffix, t in parts.items() if suffix.startswith("weight")}
        theirs = compressor.decompress(dict(parts), scheme)["weight"].float()
        ours = dequantize_matrix(parts)
        if group["format"] == "mxfp4-pack-quantized":
            assert torch.equal(ours, theirs), module
        else:  # theirs rounds to bf16 or fp32 after each factor
            torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=0, msg=module)


# --- the same in dialects written here -------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_dialect_is_read_bit_for_bit(tmp_path: Path, dialect: str) -> None:
    folder = write_qwen3(tmp_path / "m", dialect)
    found = scan_folder(folder)
    assert [g.layer for g in found.groups] == list(range(LAYERS))
    for group in found.groups:
        assert group.format.name == DIALECTS[dialect][1]
        assert (group.n_experts, group.hidden, group.intermediate, group.bias) == (EXPERTS, HIDDEN, WIDTH, False)
        check_group(group, dequantize_folder(folder))
    nbytes = sum(t.nbytes for name, t in read_tensors(folder).items() if ".experts." in name)
    assert sum(group.nbytes for group in found.groups) == nbytes


def test_layers_are_sorted_by_number(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {k: v for n in (10, 2, 1) for k, v in experts(rng, "bf16", f"model.layers.{n}.mlp.experts").items()}
    found = scan_folder(write_folder(tmp_path / "m", qwen3_config(), tensors))
    assert [g.layer for g in found.groups] == [1, 2, 10]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_wider_experts_are_rounded_to_bf16(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = {n: torch.from_numpy(a) for n, (_, a) in experts(np.random.default_rng(0), "bf16", PREFIX).items()}
    values = {n: torch.randn(w.shape, dtype=dtype) for n, w in weights.items()}
    name = {torch.float16: "F16", torch.float32: "F32"}[dtype]
    folder = write_folder(tmp_path / "m", qwen3_config(), {n: (name, v.numpy()) for n, v in values.items()})
    (group,) = scan_folder(folder).groups
    check_group(group, {n: v.bfloat16() for n, v in values.items()})


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_biases_of_each_type(tmp_path: Path, dtype: str) -> None:
    values = {"gate_proj": np.arange(WIDTH) / 4, "up_proj": -np.arange(WIDTH) / 8, "down_proj": np.arange(HIDDEN) / 16}
    cast = {"BF16": bf16, "F16": lambda a: ("F16", a.astype(np.float16)), "F32": lambda a: ("F32", a.astype("f4"))}
    tensors = experts(np.random.default_rng(0), "ct-mxfp4", PREFIX)
    for e in range(EXPERTS):
        tensors |= {f"{PREFIX}.{e}.{p}.bias": cast[dtype](v + e) for p, v in values.items()}
    section = compressed_tensors("mxfp4-pack-quantized")
    (group,) = scan_folder(write_folder(tmp_path / "m", qwen3_config(quantization_config=section), tensors)).groups
    assert group.bias
    expert = group.read(3)
    for found, projection in zip((expert.gate_bias, expert.up_bias, expert.down_bias), values, strict=True):
        np.testing.assert_array_equal(found, (values[projection] + 3).astype(np.float32))


# --- case 8: gate and up with different global scales, in two dialects ----------------------------------------------


def one_expert(dialect: str, gate: float, up: float, down: float) -> Tensors:
    """H = 32, I = 16; every code is 1.0, every block scale 1.0."""
    shapes = {"gate_proj": (16, 32, gate), "up_proj": (16, 32, up), "down_proj": (32, 16, down)}
    out: Tensors = {}
    for projection, (n, k, factor) in shapes.items():
        at = f"{PREFIX}.0.{projection}"
        codes, scales = ("U8", np.full((n, k // 2), 0x22, np.uint8)), ("F8_E4M3", np.full((n, k // 16), 0x38, np.uint8))
        if dialect == "modelopt":
            out |= {f"{at}.weight": codes, f"{at}.weight_scale": scales, f"{at}.weight_scale_2": fp32(factor)}
        else:
            last = fp32(factor, shape=(1,))
            out |= {f"{at}.weight_packed": codes, f"{at}.weight_scale": scales, f"{at}.weight_global_scale": last}
    return out


@pytest.mark.parametrize(("dialect", "factors"), [("modelopt", (0.5, 0.25, 1.0)), ("ct-nvfp4", (2.0, 4.0, 1.0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_8_global_scales_of_gate_and_up(
    tmp_path: Path, dialect: str, factors: tuple[float, float, float], dtype: torch.dtype
) -> None:
    config = {"hidden_size": 32, "quantization_config": DIALECTS[dialect][0]}
    (group,) = scan_folder(write_folder(tmp_path / "m", config, one_expert(dialect, *factors))).groups
    bank = Bank(group.layout(), 1)
    fill_banks([(bank, group)], 1)
    layer = Executor((0,), dtype).bind(bank, Activation())
    out = layer.run(torch.ones(1, 32, dtype=dtype), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))
    assert out.shape == (1, 32)
    torch.testing.assert_close(out.float(), torch.full((1, 32), 2048.0), rtol=0.005, atol=0)


@pytest.mark.parametrize("dialect", ["modelopt", "ct-nvfp4"])
@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_case_8_a_global_scale_that_is_none(tmp_path: Path, dialect: str, factor: float, projection: str) -> None:
    factors = {p: (factor if p == projection else 1.0) for p in ("gate_proj", "up_proj", "down_proj")}
    config = {"hidden_size": 32, "quantization_config": DIALECTS[dialect][0]}
    (group,) = scan_folder(write_folder(tmp_path / "m", config, one_expert(dialect, *factors.values()))).groups
    suffix = "weight_scale_2" if dialect == "modelopt" else "weight_global_scale"
    for check in (group.check_scales, lambda: group.read(0)):
        with pytest.raises(
            CheckpointError, match=rf"'{PREFIX}\.0\.{projection}\.{suffix}': its global scale"
        ) as caught:
            check()
        assert caught.value.tensor == f"{PREFIX}.0.{projection}.{suffix}"  # type: ignore[attr-defined]


# --- case 9: ModelOpt exports that store no activation scale --------------------------------------------------------


def modelopt_tensors() -> Tensors:
    """One layer, two experts, and a shared expert; only weight, weight_scale and weight_scale_2."""
    rng = np.random.default_rng(0)
    tensors = experts(rng, "modelopt", PREFIX, count=2)
    for projection, (n, k) in {"gate_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}.items():
        for suffix, tensor in matrix(rng, "modelopt", n, k).items():
            tensors[f"model.layers.0.mlp.shared_expert.{projection}.{suffix}"] = tensor
    return tensors


WEIGHT_ONLY = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}


def test_case_9_weight_only_by_config_and_by_sidecar_are_the_same(tmp_path: Path) -> None:
    tensors = modelopt_tensors()
    group_of = {"weights": {"num_bits": 4}, "input_activations": None}
    sidecar = {"quantization": {"quant_algo": "NVFP4", "config_groups": {"group_0": group_of}}}
    a = write_folder(tmp_path / "a", qwen3_config(quantization_config=WEIGHT_ONLY), tensors)
    b = write_folder(tmp_path / "b", qwen3_config(), tensors, sidecar)
    outputs = []
    torch.manual_seed(0)
    x, ids = torch.randn(3, HIDDEN), torch.tensor([[0, 1]] * 3)
    for folder in (a, b):
        found = scan_folder(folder)
        (group,) = found.groups
        assert [d.module for d in found.dense] == [
            "model.layers.0.mlp.shared_expert.gate_proj",
            "model.layers.0.mlp.shared_expert.down_proj",
        ]
        check_group(group, dequantize_folder(folder))
        bank = Bank(group.layout(), group.n_experts)
        fill_banks([(bank, group)], 1)
        outputs.append(Executor((0,), torch.float32).bind(bank, Activation()).run(x, ids, torch.ones(3, 2)))
    assert outputs[0].abs().max() > 0
    assert torch.equal(*outputs)


@pytest.mark.parametrize("keep_scales", [True, False])
def test_case_9_a_weight_that_is_not_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_scales: bool
) -> None:
    tensors = modelopt_tensors()
    name = f"{PREFIX}.1.up_proj.weight"
    tensors[name] = bf16(np.ones((WIDTH, HIDDEN)))
    if not keep_scales:
        del tensors[f"{name}_scale"], tensors[f"{name}_scale_2"]
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=MODELOPT), tensors)
    forbid_banks(monkeypatch)
    with pytest.raises(CheckpointError, match=rf"'{re.escape(name)}' is BF16, expected U8") as caught:
        scan_folder(folder)
    assert caught.value.tensor == name  # type: ignore[attr-defined]


def test_case_9_a_scale_of_a_shared_expert_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = modelopt_tensors()
    del tensors["model.layers.0.mlp.shared_expert.down_proj.weight_scale"]
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=WEIGHT_ONLY), tensors)
    forbid_banks(monkeypatch)
    expected = r"model\.layers\.0\.mlp\.shared_expert\.down_proj: no scales \(weight_scale\)"
    with pytest.raises(CheckpointError, match=expected):
        scan_folder(folder)


# --- everything that is refused --------------------------------------------------------------------------------------

Damage = Callable[[Tensors], object]


def put(name: str, tensor: Any) -> Damage:
    return lambda tensors: tensors.update({name: tensor})


def drop(*names: str) -> Damage:
    return lambda tensors: [tensors.pop(name) for name in names]


def drop_expert(expert: int) -> Damage:
    return lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith(f"{PREFIX}.{expert}.")]


def u8(*shape: int) -> Any:
    return "U8", np.zeros(shape, np.uint8)


def zeros(*shape: int) -> Any:
    return bf16(np.zeros(shape))


ZERO, ONE = f"{PREFIX}.0.gate_proj", f"{PREFIX}.1.down_proj"
SCALES, FACTOR = f"{ONE}.weight_scale", f"{ONE}.weight_scale_2"
DAMAGE: dict[str, tuple[str, Damage, str]] = {
    "no expert": ("bf16", drop_expert(1), rf"{PREFIX} is incomplete: expert 1 has no gate_proj"),
    "no matrix": ("bf16", drop(f"{ONE}.weight"), r"expert 1 has no down_proj"),
    "an expert far away": ("bf16", put(f"{PREFIX}.999999999.up_proj.weight", u8(1)), r"expert 4 has no gate_proj"),
    "an expert beyond numbers": ("bf16", put(f"{PREFIX}.{'9' * 900}.w1.weight", u8(1)), r"nothing claims"),
    "one matrix, two names": ("bf16", put(f"{PREFIX}.0.w1.weight", zeros(WIDTH, HIDDEN)), r"'.*\.0\.w1\.weight'"),
    "an unknown tensor": ("bf16", put(f"{ZERO}.rotation", zeros(3)), r"nothing claims '.*rotation'"),
    "an unknown matrix": ("bf16", put(f"{PREFIX}.0.extra.weight", u8(1)), r"nothing claims the expert tensor '.*extra"),
    "an unknown naming": ("bf16", put(f"{PREFIX}.weight", u8(1)), r"nothing claims the expert tensor"),
    "fused and separate": ("bf16", put(f"{PREFIX}.down_proj", zeros(4, HIDDEN, WIDTH)), r"mixes fused and separate"),
    "another dtype": ("bf16", put(f"{ONE}.weight", ("I32", np.zeros((HIDDEN, WIDTH), "i4"))), r"is I32, expected BF16"),
    "another width": ("bf16", put(f"{ONE}.weight", zeros(HIDDEN, 31)), r"shape \[64, 31\], expected \[64, 32\]"),
    "transposed": ("bf16", put(f"{ONE}.weight", zeros(WIDTH, HIDDEN)), r"shape \[32, 64\], expected \[64, 32\]"),
    "a first of three": ("bf16", put(f"{ZERO}.weight", zeros(WIDTH, 4, 16)), r"shape \[32, 4, 16\]"),
    "a later one of three": ("bf16", put(f"{ONE}.weight", zeros(HIDDEN, 2, 16)), r"shape \[64, 2, 16\]"),
    "a bias on one": ("bf16", put(f"{ZERO}.bias", zeros(WIDTH)), r"some matrices have a bias"),
    "a quantized one": ("bf16", put(f"{ZERO}.weight", u8(WIDTH, 32)), r"'.*gate_proj\.weight' is U8, expected BF16"),
    "no scales": ("modelopt", drop(SCALES), r"no scales \(weight_scale\); found weight U8, weight_scale_2 F32"),
    "no global": ("modelopt", drop(FACTOR), r"no global \(weight_scale_2\)"),
    "no codes": ("ct-nvfp4", drop(f"{ONE}.weight_packed"), r"no codes \(weight_packed\)"),
    "no divisor": ("ct-nvfp4", drop(f"{ONE}.weight_global_scale"), r"no global \(weight_global_scale\)"),
    "no exponents": ("ct-mxfp4", drop(SCALES), r"no scales \(weight_scale\)"),
    "scales of fp16": ("modelopt", put(SCALES, ("F16", np.ones((HIDDEN, 2), "f2"))), r"is F16, expected F8_E4M3"),
    "scales of bytes": ("modelopt", put(SCALES, u8(HIDDEN, 2)), r"is U8, expected F8_E4M3"),
    "scales too few": ("ct-mxfp4", put(SCALES, u8(HIDDEN, 2)), r"shape \[64, 2\], expected \[64, 1\]"),
    "two globals": ("modelopt", put(FACTOR, fp32(1, 2, shape=(2,))), r"expected one number"),
    "a global of fp64": ("modelopt", put(FACTOR, ("F64", np.ones(()))), r"is F64, expected F32"),
    "codes too few": ("modelopt", put(f"{ONE}.weight", u8(HIDDEN, 8)), r"shape \[64, 8\], expected \[64, 16\]"),
    "another tool's": ("modelopt", put(f"{ZERO}.weight_packed", u8(WIDTH, 32)), r"nothing claims '.*weight_packed'"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_experts_are_refused_from_headers(tmp_path: Path, case: str) -> None:
    dialect, damage, words = DAMAGE[case]
    tensors = qwen3_tensors(dialect)
    damage(tensors)
    config = qwen3_config(quantization_config=DIALECTS[dialect][0])
    folder = write_folder(tmp_path / "m", config, tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        scan_folder(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert str(folder / "model.safetensors") in message
    assert caught.value.file == str(folder / "model.safetensors")  # type: ignore[attr-defined]


def scales_of(tensors: Tensors, module: str) -> str:
    """The name of the block scales of a module."""
    return next(n for s in ("weight_scale", "weight_scale_inv", "scale") if (n := f"{module}.{s}") in tensors)


def no_numbers(scales: Tensor) -> tuple[Any, Any]:
    """Two values of their type that are no number."""
    nan = {"F8_E4M3": (0x7F, 0xFF), "BF16": (0x7FC0, 0xFF80), "F32": (np.nan, np.inf)}
    return nan.get(scales[0], (255, 255))


@pytest.mark.parametrize("dialect", QUANTIZED)
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_block_scales_that_are_no_number(tmp_path: Path, dialect: str, expert: int) -> None:
    for number in range(2):
        tensors = qwen3_tensors(dialect)
        name = scales_of(tensors, f"{PREFIX}.{expert}.up_proj")
        bad = no_numbers(tensors[name])[number]
        row = WIDTH - 1
        if "fp8" in dialect and "row" not in dialect:  # the first of those that share the last scale
            row = 24 if tensors[name][1].size > 1 else 0
        tensors[name][1].reshape(-1)[-1] = bad
        config = qwen3_config(quantization_config=DIALECTS[dialect][0])
        group = scan_folder(write_folder(tmp_path / f"{number}", config, tensors)).groups[0]
        for check in (group.check_scales, lambda group=group: group.read(expert)):
            with pytest.raises(CheckpointError, match=rf"'{name}': row {row} has") as caught:
                check()
            assert caught.value.tensor == name  # type: ignore[attr-defined]
        group.read(1)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_plain_weights_that_are_no_number(tmp_path: Path, value: float) -> None:
    tensors = qwen3_tensors()
    name = f"{PREFIX}.2.down_proj.weight"
    weights = np.zeros((HIDDEN, WIDTH))
    weights[5, 7] = value
    tensors[name] = bf16(weights)
    group = scan_folder(write_folder(tmp_path / "m", qwen3_config(), tensors)).groups[0]
    with pytest.raises(CheckpointError, match=rf"'{name}': row 5 holds a NaN or infinite weight"):
        group.read(2)


@pytest.mark.parametrize("dialect", QUANTIZED)
def test_a_dense_scale_that_is_no_number(tmp_path: Path, dialect: str) -> None:
    tensors = qwen3_tensors(dialect)
    name = "model.layers.1.self_attn.q_proj"
    del tensors[f"{name}.weight"]
    tensors |= {f"{name}.{s}": t for s, t in matrix(np.random.default_rng(1), dialect, 64, HIDDEN).items()}
    config = qwen3_config(quantization_config=DIALECTS[dialect][0])
    good = scan_folder(write_folder(tmp_path / "good", config, tensors))
    assert [d.module for d in good.dense] == [name]
    good.check_scales()
    scales = scales_of(tensors, name)
    values = tensors[scales][1].reshape(-1)
    row = min(2, len(values) - 1)
    values.reshape(len(tensors[scales][1]) if tensors[scales][1].ndim else 1, -1)[row, 0] = no_numbers(tensors[scales])[
        0
    ]
    found = scan_folder(write_folder(tmp_path / "bad", config, tensors))
    with pytest.raises(CheckpointError, match=rf"'{scales}': row {row} has"):
        found.check_scales()


def test_a_config_of_another_hidden_size(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", qwen3_config(hidden_size=128), qwen3_tensors())
    with pytest.raises(CheckpointError, match=r"hidden size 64, config\.json says hidden_size 128"):
        scan_folder(folder)


def test_experts_of_a_config_that_says_nothing_of_their_format(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", qwen3_config(), qwen3_tensors("modelopt"))
    with pytest.raises(CheckpointError, match=r"is U8, expected BF16 or F16 or F32 \(config\.json declares none"):
        scan_folder(folder)


def test_experts_of_another_format_than_the_config_says(tmp_path: Path) -> None:
    section = compressed_tensors("mxfp4-pack-quantized")
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=section), qwen3_tensors("ct-nvfp4"))
    with pytest.raises(CheckpointError, match=r"declares compressed-tensors \(mxfp4\)"):
        scan_folder(folder)


def test_experts_that_the_config_leaves_alone_are_bf16(tmp_path: Path) -> None:
    section = MODELOPT | {"ignore": ["model.layers.0.mlp.experts*"]}
    rng = np.random.default_rng(0)
    tensors = experts(rng, "bf16", PREFIX) | experts(rng, "modelopt", "model.layers.1.mlp.experts")
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=section), tensors)
    assert [g.format.name for g in scan_folder(folder).groups] == ["bf16", "nvfp4"]
    tensors = experts(rng, "modelopt", PREFIX)
    folder = write_folder(tmp_path / "n", qwen3_config(quantization_config=section), tensors)
    with pytest.raises(CheckpointError, match="is U8, expected BF16"):
        scan_folder(folder)


def test_experts_of_two_formats_in_one_layer(tmp_path: Path) -> None:
    section = compressed_tensors("nvfp4-pack-quantized")
    section["config_groups"]["group_1"] = {"format": "mxfp4-pack-quantized"}
    rng = np.random.default_rng(0)
    tensors = experts(rng, "ct-nvfp4", PREFIX)
    tensors = {n: t for n, t in tensors.items() if not n.startswith(f"{PREFIX}.3.")}
    tensors |= {n: t for n, t in experts(rng, "ct-mxfp4", PREFIX).items() if n.startswith(f"{PREFIX}.3.")}
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=section), tensors)
    with pytest.raises(CheckpointError, match=r"mixed experts in one layer"):
        scan_folder(folder)


def test_a_model_without_experts(tmp_path: Path) -> None:
    tensors: Tensors = {"model.layers.0.mlp.shared_experts.gate_proj.weight": bf16(np.zeros((2, 2)))}
    with pytest.raises(CheckpointError, match=r"no tensors of experts .* load it with transformers alone"):
        scan_folder(write_folder(tmp_path / "m", {"model_type": "llama"}, tensors))


# --- fused experts: gpt-oss ------------------------------------------------------------------------------------------


def native_gptoss() -> Tensors:
    rng = np.random.default_rng(0)

    def part(name: str, rows: int, width: int) -> Tensors:
        return {
            f"{PREFIX}.{name}_blocks": ("U8", rng.integers(0, 256, (EXPERTS, rows, width // 32, 16), np.uint8)),
            f"{PREFIX}.{name}_scales": ("U8", rng.integers(120, 130, (EXPERTS, rows, width // 32)).astype(np.uint8)),
            f"{PREFIX}.{name}_bias": bf16(rng.standard_normal((EXPERTS, rows))),
        }

    return part("gate_up_proj", 2 * WIDTH, HIDDEN) | part("down_proj", HIDDEN, WIDTH)


GPTOSS = {"model_type": "gpt_oss", "hidden_size": HIDDEN, "quantization_config": NATIVE_MXFP4}
UP, DOWN = f"{PREFIX}.gate_up_proj", f"{PREFIX}.down_proj"
FUSED_DAMAGE: dict[str, tuple[Damage, str]] = {
    "no blocks": (drop(f"{DOWN}_blocks"), r"no codes \(blocks\)"),
    "no scales": (drop(f"{UP}_scales"), r"no scales \(scales\)"),
    "no down": (drop(*(f"{DOWN}_{s}" for s in ("blocks", "scales", "bias"))), r"incomplete: it has no down_proj"),
    "no experts": (put(f"{DOWN}_blocks", u8(0, HIDDEN, 1, 16)), r"shape \[0, 64, 1, 16\]"),
    "no bias on down": (drop(f"{DOWN}_bias"), r"some matrices have a bias"),
    "bias too short": (put(f"{DOWN}_bias", zeros(EXPERTS, 8)), r"shape \[4, 8\], expected \[4, 64\]"),
    "bias of fewer experts": (put(f"{DOWN}_bias", zeros(2, HIDDEN)), r"shape \[2, 64\], expected \[4, 64\]"),
    "scales of fewer experts": (put(f"{DOWN}_scales", u8(2, HIDDEN, 1)), r"shape \[2, 64, 1\]"),
    "blocks of more experts": (put(f"{DOWN}_blocks", u8(5, HIDDEN, 1, 16)), r"shape \[5, 64, 1, 16\]"),
    "scales by block": (put(f"{DOWN}_scales", u8(EXPERTS, HIDDEN, 1, 1)), r"shape \[4, 64, 1, 1\]"),
    "blocks of 8 bytes": (put(f"{DOWN}_blocks", u8(EXPERTS, HIDDEN, 1, 8)), r"shape \[4, 64, 1, 8\]"),
    "no dimension": (put(f"{UP}_blocks", u8()), r"shape \[\]"),
    "one dimension": (put(f"{UP}_blocks", u8(7)), r"shape \[7\]"),
}


def test_native_gptoss_is_read_bit_for_bit(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", GPTOSS, native_gptoss())
    (group,) = scan_folder(folder).groups
    assert (group.fused, group.interleaved, group.bias, group.transposed) == (True, True, True, False)
    check_group(group, dequantize_folder(folder))


@pytest.mark.parametrize("case", FUSED_DAMAGE)
def test_damaged_fused_experts_are_refused_from_headers(tmp_path: Path, case: str) -> None:
    damage, words = FUSED_DAMAGE[case]
    tensors = native_gptoss()
    damage(tensors)
    folder = write_folder(tmp_path / "m", GPTOSS, tensors)
    with pytest.raises(CheckpointError, match=words) as caught:
        scan_folder(folder)
    assert "\n" not in str(caught.value)


def test_a_fused_scale_of_255(tmp_path: Path) -> None:
    tensors = native_gptoss()
    tensors[f"{PREFIX}.down_proj_scales"][1][2, 9, 0] = 255
    (group,) = scan_folder(write_folder(tmp_path / "m", GPTOSS, tensors)).groups
    with pytest.raises(CheckpointError, match=r"'.*down_proj_scales': .*row 9 has a block scale of 255"):
        group.check_scales()


@pytest.mark.parametrize("where", [(0, 0), (EXPERTS - 1, -1)])
def test_a_bias_that_is_no_number(tmp_path: Path, where: tuple[int, int]) -> None:
    """Though all scales are fine."""
    tensors = native_gptoss()
    tensors[f"{UP}_bias"][1][where] = 0x7FC0
    (group,) = scan_folder(write_folder(tmp_path / "m", GPTOSS, tensors)).groups
    for check in (group.check_scales, lambda: group.read(where[0]), lambda: group.stored(where[0])):
        with pytest.raises(CheckpointError, match=rf"'{UP}_bias': the bias of expert {where[0]} holds a NaN"):
            check()


def test_a_fused_width_that_the_format_cannot_hold(tmp_path: Path) -> None:
    """Half a block: the width is found in the headers and refused, whatever the scales' shape says."""
    section = compressed_tensors("mxfp4-pack-quantized")
    shapes = {"gate_proj": (16, HIDDEN), "up_proj": (16, HIDDEN), "down_proj": (HIDDEN, 16)}
    tensors: Tensors = {}
    for projection, (n, k) in shapes.items():
        tensors[f"{PREFIX}.0.{projection}.weight_packed"] = u8(n, k // 2)
        tensors[f"{PREFIX}.0.{projection}.weight_scale"] = u8(n, max(k // 32, 1))
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=section), tensors)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scale.* multiple of 32; rows have 16 weights"):
        scan_folder(folder)


# --- fused experts: fp8, as transformers saves them -------------------------------------------------------------------


def fused_fp8(width: int, hidden: int, block: tuple[int, int], transposed: bool, seed: int = 0) -> Tensors:
    """Gate and up in one tensor, under one grid that need not part where they do."""
    rng = np.random.default_rng(seed)

    def part(name: str, scales: str, n: int, k: int) -> Tensors:
        grid = (EXPERTS, -(-n // block[0]), -(-k // block[1]))
        codes, values = rng.integers(0, 0x70, (EXPERTS, n, k), np.uint8), rng.uniform(0.5, 2, grid).astype(np.float32)
        if transposed:
            codes, values = codes.transpose(0, 2, 1), values.transpose(0, 2, 1)
        return {f"{PREFIX}.{name}": ("F8_E4M3", codes), f"{PREFIX}.{scales}": ("F32", values)}

    both = part("gate_up_proj", "gate_up_proj_scale_inv", 2 * width, hidden)
    return both | part("down_proj", "down_proj_scale_inv", hidden, width)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("width", "hidden"), [(88, 200), (64, 128), (192, 300), (8, 20)])
def test_a_grid_that_crosses_from_gate_to_up(tmp_path: Path, width: int, hidden: int, transposed: bool) -> None:
    tensors = fused_fp8(width, hidden, (128, 128), transposed)
    config = {"model_type": "qwen3_moe", "hidden_size": hidden, "quantization_config": fp8([128, 128])}
    (group,) = scan_folder(write_folder(tmp_path / "m", config, tensors)).groups
    assert (group.hidden, group.intermediate, group.fused, group.transposed) == (hidden, width, True, transposed)
    group.check_scales()
    for e in range(EXPERTS):
        expert, both = group.read(e), {}
        for name in ("gate_up_proj", "down_proj"):
            codes, scales = (tensors[f"{PREFIX}.{name}{end}"][1][e] for end in ("", "_scale_inv"))
            parts = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn), torch.from_numpy(scales.copy())
            both[name] = gridwise(*((p.T for p in parts) if transposed else parts), (128, 128)).float()
        assert same_bits(expert.gate.dequantize(), both["gate_up_proj"][:width])
        assert same_bits(expert.up.dequantize(), both["gate_up_proj"][width:])
        assert same_bits(expert.down.dequantize(), both["down_proj"])


def test_a_finer_grid_is_taken_where_its_scales_agree(tmp_path: Path) -> None:
    tensors = fused_fp8(64, 128, (64, 64), False)
    config = {"model_type": "qwen3_moe", "hidden_size": 128, "quantization_config": fp8([64, 64])}
    (group,) = scan_folder(write_folder(tmp_path / "m", config, tensors)).groups
    for check in (group.check_scales, lambda: group.read(0)):
        with pytest.raises(CheckpointError, match=r"gate_up_proj_scale_inv': .*scales per 64 columns differ inside"):
            check()
    grid = tensors[f"{PREFIX}.gate_up_proj_scale_inv"][1]
    grid[:, :, 1] = grid[:, :, 0]
    (group,) = scan_folder(write_folder(tmp_path / "n", config, tensors)).groups
    group.check_scales()
    codes = torch.from_numpy(tensors[f"{PREFIX}.gate_up_proj"][1][1].copy()).view(torch.float8_e4m3fn)
    expected = gridwise(codes, torch.from_numpy(grid[1].copy()), (64, 64)).float()
    assert same_bits(group.read(1).gate.dequantize(), expected[:64])


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (fp8([128, 64]), r"shape \[4, 2, 2\], expected \[4, 2, 4\] for 176 rows of 200 weights in blocks of 128 x 64"),
        (fp8(None), r"expected \[4, 1, 1\] .* in blocks of all x all"),
        (compressed_fp8("channel"), r"no scales \(weight_scale\)|nothing claims|expected \[4, 176, 1\]"),
        (None, r"is F8_E4M3, expected BF16"),
    ],
)
def test_a_grid_that_the_config_does_not_say(tmp_path: Path, section: dict[str, Any] | None, words: str) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 200, "quantization_config": section}
    with pytest.raises(CheckpointError, match=words):
        scan_folder(write_folder(tmp_path / "m", config, fused_fp8(88, 200, (128, 128), False)))


def test_an_fp8_weight_that_is_no_number(tmp_path: Path) -> None:
    tensors = qwen3_tensors("fp8")
    name = f"{PREFIX}.1.down_proj.weight"
    tensors[name][1][5, 3] = 0x7F
    group = scan_folder(write_folder(tmp_path / "m", qwen3_config(quantization_config=fp8([24, 128])), tensors)).groups[
        0
    ]
    group.check_scales()
    with pytest.raises(CheckpointError, match=rf"'{name}': row 5 holds a NaN weight"):
        group.read(1)


# --- the dense part and whole layers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["pre_quant_scale", "weight_zero_point", "weight_g_idx"])
def test_a_tensor_beside_a_packed_weight_that_nothing_claims(tmp_path: Path, suffix: str) -> None:
    tensors = qwen3_tensors("fp8")
    name = "model.layers.1.self_attn.q_proj"
    tensors |= {f"{name}.{s}": t for s, t in matrix(np.random.default_rng(1), "fp8", 64, HIDDEN).items()}
    tensors[f"{name}.{suffix}"] = bf16(np.ones(HIDDEN))
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=fp8([24, 128])), tensors)
    with pytest.raises(CheckpointError, match=rf"nothing claims '{name}\.{suffix}'"):
        scan_folder(folder)


def test_scales_of_a_cache_are_not_used(tmp_path: Path) -> None:
    tensors = qwen3_tensors("fp8")
    name = "model.layers.1.self_attn.k_proj"
    tensors |= {f"{name}.{s}": t for s, t in matrix(np.random.default_rng(1), "fp8", 32, HIDDEN).items()}
    tensors[f"{name}.k_scale"] = fp32(1.0)
    found = scan_folder(write_folder(tmp_path / "m", qwen3_config(quantization_config=fp8([24, 128])), tensors))
    assert [d.module for d in found.dense] == [name]


def test_blocks_that_the_shape_of_scales_does_not_tell_apart(tmp_path: Path) -> None:
    """64 rows in blocks of 24 or of 30 are three each."""
    section = compressed_fp8("block", block_structure=[24, 128])
    other = compressed_fp8("block", block_structure=[30, 128])["config_groups"]["group_0"]
    section["config_groups"]["group_1"] = other | {"targets": ["re:.*k_proj"]}
    tensors = qwen3_tensors("ct-fp8-block")
    name = "model.layers.1.self_attn.q_proj"
    tensors |= {f"{name}.{s}": t for s, t in matrix(np.random.default_rng(1), "ct-fp8-block", 64, HIDDEN).items()}
    folder = write_folder(tmp_path / "m", qwen3_config(quantization_config=section), tensors)
    with pytest.raises(
        CheckpointError, match=rf"'{name}\.weight_scale' .* fits blocks of \(24, 128\) and of \(30, 128\)"
    ):
        scan_folder(folder)


def test_columns_of_scales_that_no_record_holds(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 200, "quantization_config": fp8([128, 96])}
    folder = write_folder(tmp_path / "m", config, fused_fp8(88, 200, (128, 96), False))
    with pytest.raises(CheckpointError, match=r"experts: .*blocks of 96 columns do not fit"):
        scan_folder(folder)


def test_a_layer_without_its_experts(tmp_path: Path) -> None:
    tensors = {n: t for n, t in qwen3_tensors().items() if not n.startswith("model.layers.1.mlp.experts")}
    found = scan_folder(write_folder(tmp_path / "m", qwen3_config(), tensors))
    with pytest.raises(CheckpointError, match=r"layer 1 has 'model\.layers\.1\.mlp\.gate\.weight' and no experts"):
        check_config(found)
    del tensors["model.layers.1.mlp.gate.weight"]
    tensors["model.layers.1.mlp.gate_proj.weight"] = bf16(np.zeros((WIDTH, HIDDEN)))
    check_config(scan_folder(write_folder(tmp_path / "n", qwen3_config(), tensors)))  # a dense layer


def test_the_oracle_has_the_e2m1_values_of_the_ocp_specification() -> None:
    packed = torch.arange(256, dtype=torch.uint8)[None]
    values = e2m1(packed).reshape(256, 2)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values.tolist() == [[table[byte & 15], table[byte >> 4]] for byte in range(256)]
