"""`--to compressed-tensors` against the compressed-tensors package and against what llm-compressor wrote."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file

from freetoken import formats
from freetoken.checkpoint.experts import ExpertScan
from freetoken.checkpoint.export import Export
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.safetensors import read_header
from freetoken.errors import CheckpointError, ConfigError, FormatError, FreeTokenError, UnsupportedError
from tests.support.checkpoints import LAYERS, bf16, fp32, qwen3_config, qwen3_tensors, write_folder, write_qwen3
from tests.support.converted import convert_folder, export_folder
from tests.support.oracle import dequantize_folder, dequantize_matrix, map_experts, read_tensors, take_expert

SOURCES = ["deepseekv3", "gptoss", "qwen3moe"]
PACKED = ["fp8_block", "mxfp4", "nvfp4"]
REAL = {  # what llm-compressor made of a source -> the source, the format
    "mxfp4a16-llmcompressor-gptoss": ("bf16-transformers-gptoss", "mxfp4"),
    "mxfp4a16-llmcompressor-qwen3moe": ("bf16-transformers-qwen3moe", "mxfp4"),
    "nvfp4a16-llmcompressor-deepseekv3": ("bf16-transformers-deepseekv3", "nvfp4"),
    "nvfp4a16-llmcompressor-qwen3moe": ("bf16-transformers-qwen3moe", "nvfp4"),
}


def scan_of(folder: Path) -> ExpertScan:
    return scan_any(open_any(folder))


def section_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return found


def expert_modules(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Module -> suffix -> tensor, of experts."""
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in read_tensors(folder).items():
        if ".experts." in name and ".shared_experts." not in name:
            module, _, suffix = name.rpartition(".")
            modules.setdefault(module, {})[suffix] = tensor
    return modules


def by_compressed_tensors(folder: Path, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """fp32 of one matrix, unpacked and scaled by the compressed-tensors package as the folder's config says.

    nvfp4 in float64: its own decompression works in bf16 and rounds what is in between.
    """
    (scheme,) = QuantizationConfig.model_validate(section_of(folder)).config_groups.values()
    if scheme.format == "nvfp4-pack-quantized":
        rows, half = parts["weight_packed"].shape
        codes = unpack_fp4_from_uint8(parts["weight_packed"], rows, 2 * half, dtype=torch.float64)
        scale, divisor = parts["weight_scale"].double(), parts["weight_global_scale"].double()
        found = dequantize(codes, scale, args=scheme.weights, global_scale=divisor, dtype=torch.float64)
        return found.float()
    state = {suffix: tensor for suffix, tensor in parts.items() if suffix != "bias"}
    return BaseCompressor.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"].float()


@pytest.mark.parametrize("fmt", PACKED)
@pytest.mark.parametrize("name", SOURCES)
def test_compressed_tensors_reads_the_numbers_that_we_read(
    shared_dir: Path, tmp_path: Path, name: str, fmt: str
) -> None:
    export_folder(shared_dir / "checkpoints" / f"bf16-transformers-{name}", tmp_path / "m", fmt)
    modules, found = expert_modules(tmp_path / "m"), scan_of(tmp_path / "m")
    seen = 0
    for group in found.groups:
        assert group.format.name == fmt
        for e in range(group.n_experts):
            expert = group.read(e)
            for what in ("gate", "up", "down"):
                theirs = by_compressed_tensors(tmp_path / "m", modules[f"{group.prefix}.{e}.{what}_proj"]).numpy()
                np.testing.assert_array_equal(getattr(expert, what).dequantize(), theirs)
                assert theirs.std() > 0.01
                seen += 1
    assert seen == len(modules)


@pytest.mark.parametrize("fmt", PACKED)
def test_their_config_class_takes_the_section(shared_dir: Path, tmp_path: Path, fmt: str) -> None:
    export_folder(shared_dir / "checkpoints" / "bf16-transformers-qwen3moe", tmp_path / "m", fmt)
    config = QuantizationConfig.model_validate(section_of(tmp_path / "m"))
    assert config.quantization_status == QuantizationStatus.COMPRESSED
    assert config.format in BaseCompressor.registered_names()
    assert config.config_groups["group_0"].targets == ["Linear"]


@pytest.mark.parametrize("name", REAL)
def test_tensors_of_experts_are_those_of_the_real_tool(shared_dir: Path, tmp_path: Path, name: str) -> None:
    source, fmt = REAL[name]
    real = shared_dir / "checkpoints" / name
    export_folder(shared_dir / "checkpoints" / source, tmp_path / "m", fmt)
    described = [
        {n: (t.dtype, t.shape) for n, t in read_header(folder / "model.safetensors").items() if ".experts." in n}
        for folder in (tmp_path / "m", real)
    ]
    assert described[0] == described[1]
    ours, theirs = section_of(tmp_path / "m"), section_of(real)
    assert set(theirs.pop("ignore")) <= set(ours.pop("ignore"))
    assert theirs.pop("version")
    assert ours == theirs


@pytest.mark.parametrize("name", REAL)
def test_the_error_is_no_larger_than_the_real_tools(shared_dir: Path, tmp_path: Path, name: str) -> None:
    source, fmt = REAL[name]
    export_folder(shared_dir / "checkpoints" / source, tmp_path / "m", fmt)
    plain = dequantize_folder(shared_dir / "checkpoints" / source)
    errors = []
    for folder in (tmp_path / "m", shared_dir / "checkpoints" / name):
        found = dequantize_folder(folder)
        names = [n for n in plain if ".mlp.experts." in n and "bias" not in n]
        errors.append(sum(float((found[n] - plain[n].float()).square().sum()) for n in names))
        for n in plain:
            if "bias" in n and ".experts." in n:
                assert torch.equal(found[n].float(), plain[n].float())
    assert 0 < errors[0] <= 1.01 * errors[1]


def test_gate_and_up_share_a_global_and_use_the_range(shared_dir: Path, tmp_path: Path) -> None:
    """As other engines want it; the larger of the two fills e4m3's range."""
    export_folder(shared_dir / "checkpoints" / "bf16-transformers-qwen3moe", tmp_path / "m", "nvfp4")
    modules = expert_modules(tmp_path / "m")
    globals_ = set()
    for name, parts in modules.items():
        if name.endswith("gate_proj"):
            up = modules[name.replace("gate_proj", "up_proj")]
            assert torch.equal(parts["weight_global_scale"], up["weight_global_scale"])
            assert max(float(p["weight_scale"].float().max()) for p in (parts, up)) == 448
            globals_.add(float(parts["weight_global_scale"]))
    assert len(globals_) > 8, "each expert has its own"


@pytest.mark.parametrize("fmt", PACKED)
def test_everything_left_alone_is_copied_and_named(shared_dir: Path, tmp_path: Path, fmt: str) -> None:
    source = shared_dir / "checkpoints" / "bf16-transformers-deepseekv3"
    export_folder(source, tmp_path / "m", fmt)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "m"))
    dense = {name for name in before if ".mlp.experts." not in name}
    assert dense == {name for name in after if ".mlp.experts." not in name}
    for name in dense:
        assert before[name].dtype == after[name].dtype
        assert torch.equal(before[name], after[name])
    weights = {n.removesuffix(".weight") for n in dense if n.endswith(".weight") and before[n].dim() == 2}
    assert set(section_of(tmp_path / "m")["ignore"]) == weights - {"model.embed_tokens"}
    assert (tmp_path / "m" / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    config, plain = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "m", source))
    assert config.pop("quantization_config")
    assert config == plain


@pytest.mark.parametrize("name", [*SOURCES, "deepseekv4", "mixtral"])
def test_bf16_is_the_plain_checkpoint(shared_dir: Path, tmp_path: Path, name: str) -> None:
    source = shared_dir / "checkpoints" / f"bf16-transformers-{name}"
    assert export_folder(source, tmp_path / "m", "bf16").format == "bf16"
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "m"))
    assert before.keys() == after.keys()
    for tensor in before:
        assert torch.equal(before[tensor], after[tensor]), tensor
    assert (tmp_path / "m" / "config.json").read_text().strip() == (source / "config.json").read_text().strip()


@pytest.mark.parametrize("name", ["mxfp4-native-gptoss-repacked", "mxfp4a16-llmcompressor-gptoss"])
def test_gpt_oss_unpacked_is_laid_out_as_stock_wants_it(shared_dir: Path, tmp_path: Path, name: str) -> None:
    source = shared_dir / "checkpoints" / name
    if "native" not in name:  # its attention is packed, too
        with pytest.raises(CheckpointError, match=r"self_attn\.\w+ outside the experts is mxfp4"):
            export_folder(source, tmp_path / "m", "bf16")
        return
    export_folder(source, tmp_path / "m", "bf16")
    found, wanted = dequantize_folder(tmp_path / "m"), dequantize_folder(source)
    assert found.keys() == wanted.keys()
    for tensor in wanted:
        assert torch.equal(found[tensor].float(), wanted[tensor].float()), tensor


# --- sources that are packed -----------------------------------------------------------------------------------------


def test_modelopts_codes_are_written_on(shared_dir: Path, tmp_path: Path) -> None:
    """Its attention, too: the same bytes under other names, and a divisor for the factor."""
    source = shared_dir / "checkpoints" / "nvfp4-modelopt-qwen3moe"
    export_folder(source, tmp_path / "m")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "m" / "model.safetensors")
    packed = [name.removesuffix(".weight") for name, tensor in before.items() if tensor.dtype == torch.uint8]
    assert any("self_attn" in module for module in packed)
    for module in packed:
        assert torch.equal(before[f"{module}.weight"], after[f"{module}.weight_packed"])
        scales = [t[f"{module}.weight_scale"].view(torch.uint8) for t in (before, after)]
        assert torch.equal(*scales)
        product = after[f"{module}.weight_global_scale"].double() * before[f"{module}.weight_scale_2"].double()
        assert abs(float(product) - 1) <= 2**-24
    assert not [name for name in after if "input_scale" in name or "weight_scale_2" in name]
    assert not [name for name in section_of(tmp_path / "m")["ignore"] if "self_attn" in name]
    assert scan_of(tmp_path / "m").groups[0].format.name == "nvfp4"


@pytest.mark.parametrize("name", ["nvfp4-llmcompressor-qwen3moe", "nvfp4a16-llmcompressor-qwen3moe",
                                  "mxfp4a16-llmcompressor-gptoss", "fp8block-llmcompressor-qwen3moe256"])  # fmt: skip
def test_what_is_compressed_tensors_already_keeps_its_numbers(shared_dir: Path, tmp_path: Path, name: str) -> None:
    source = shared_dir / "checkpoints" / name
    export_folder(source, tmp_path / "m")
    before, after = read_tensors(source), read_tensors(tmp_path / "m")
    assert after.keys() == {n for n in before if "input_global_scale" not in n}
    for n, tensor in after.items():
        same = before[n].to(tensor.dtype) if n.endswith("weight_scale") else before[n]
        assert torch.equal(same.view(torch.uint8), tensor.view(torch.uint8)), n
    assert set(section_of(tmp_path / "m")["ignore"]) == set(section_of(source)["ignore"])


def test_globals_that_differ_become_one(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "s", qwen3_config(quantization_config={"quant_method": "modelopt",
                          "quant_algo": "NVFP4", "ignore": []}), qwen3_tensors("modelopt"))  # fmt: skip
    export_folder(source, tmp_path / "m")
    before, after = dequantize_folder(source), dequantize_folder(tmp_path / "m")
    modules = expert_modules(tmp_path / "m")
    for e in range(4):
        gate, up, down = (f"model.layers.0.mlp.experts.{e}.{what}_proj" for what in ("gate", "up", "down"))
        assert torch.equal(modules[gate]["weight_global_scale"], modules[up]["weight_global_scale"])
        for module, bound in ((gate, 0.06), (up, 0.06), (down, 2**-22)):
            error = (after[f"{module}.weight"] - before[f"{module}.weight"]).norm() / before[f"{module}.weight"].norm()
            assert error < bound


def test_ds_fp4_is_written_as_mxfp4(shared_dir: Path, tmp_path: Path) -> None:
    source = shared_dir / "checkpoints" / "bf16-transformers-deepseekv4"
    assert export_folder(source, tmp_path / "a", "ds_fp4").format == "mxfp4"
    export_folder(source, tmp_path / "b", "mxfp4")
    files = [folder / "model.safetensors" for folder in (tmp_path / "a", tmp_path / "b")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("fmt", PACKED)
def test_numbers_do_not_depend_on_threads(tmp_path: Path, fmt: str) -> None:
    source = write_qwen3(tmp_path / "s")
    for threads in (1, 3):
        export_folder(source, tmp_path / f"{threads}", fmt, threads)
    one, three = ((tmp_path / str(n) / "model.safetensors").read_bytes() for n in (1, 3))
    assert one == three


def test_wide_sources_and_sharing_with_load(tmp_path: Path) -> None:
    """fp32 experts are rounded to bf16 and quantized, as by load; fp32 dense tensors stay what they are."""
    rng = np.random.default_rng(0)
    tensors = qwen3_tensors()
    wide = {
        n: ("F32", rng.standard_normal(t[1].shape, np.float32) * 0.05) if ".experts." in n else t
        for n, t in tensors.items()
    }
    source = write_folder(tmp_path / "s", qwen3_config(), wide)
    export_folder(source, tmp_path / "m", "mxfp4")
    changed = map_experts(
        dequantize_folder(source),
        lambda w: dequantize_matrix(
            {
                "weight_packed": torch.from_numpy(
                    (q := formats.get("mxfp4").quantize(w.bfloat16().float().numpy())).codes
                ),
                "weight_scale": torch.from_numpy(q.scales),
            }
        ),
    )
    found = dequantize_folder(tmp_path / "m")
    for e in range(4):
        ours, wanted = (take_expert(w, "model.layers.1.mlp.experts", e) for w in (found, changed))
        for what in ("gate", "up", "down"):
            assert torch.equal(ours[what], wanted[what])


def test_only_a_few_experts_are_held(shared_dir: Path, tmp_path: Path) -> None:
    source = shared_dir / "models" / "fidelity"
    work = Export(scan_of(source), formats.get("nvfp4"))
    expert = work.found.groups[0].nbytes // work.found.groups[0].n_experts
    largest = max(tensor.nbytes for tensor, _ in work.copies)
    seen: list[int] = []
    tracemalloc.start()
    try:
        work.write(tmp_path / "m", 1, seen.append)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < largest + 12 * expert + (4 << 20)
    assert peak < work.nbytes / 2
    assert sum(seen) == work.nbytes


# --- refused ---------------------------------------------------------------------------------------------------------


def nothing_stays(folder: Path, *names: str) -> None:
    assert sorted(p.name for p in folder.iterdir()) == sorted(names)


@pytest.mark.parametrize("fmt", ["q4_0", "q8_0"])
def test_formats_that_it_cannot_say(tmp_path: Path, fmt: str) -> None:
    source = write_qwen3(tmp_path / "s")
    with pytest.raises(ConfigError, match=f"no way to write {fmt} experts.* bf16, ds_fp4, fp8_block, mxfp4, nvfp4"):
        export_folder(source, tmp_path / "m", fmt)
    nothing_stays(tmp_path, "s")


DENSE: dict[str, tuple[str, str]] = {
    "nvfp4-modelopt-qwen3moe": ("mxfp4", r"self_attn\.\w+ outside the experts is nvfp4 \(modelopt\)"),
    "fp8block-transformers-qwen3moe256": ("nvfp4", r"is fp8_block \(transformers\).*, or choose fp8_block$"),
}


@pytest.mark.parametrize("name", DENSE)
def test_a_packed_dense_part_of_another_format(shared_dir: Path, tmp_path: Path, name: str) -> None:
    fmt, words = DENSE[name]
    with pytest.raises(CheckpointError, match=words) as caught:
        export_folder(shared_dir / "checkpoints" / name, tmp_path / "m", fmt)
    assert "\n" not in str(caught.value)
    nothing_stays(tmp_path)


def test_a_packed_dense_part_that_no_format_goes_beside(shared_dir: Path, tmp_path: Path) -> None:
    """Then none is offered: blocks of 64 x 64 are not llm-compressor's."""
    source = shared_dir / "checkpoints" / "fp4-deepseekv4-constructed"
    for fmt in ("fp8_block", "mxfp4"):
        with pytest.raises(CheckpointError, match=r"\(deepseek\).*convert the checkpoint that this one was made from$"):
            export_folder(source, tmp_path / "m", fmt)
    nothing_stays(tmp_path)


def test_a_converted_folder_is_no_source(tmp_path: Path) -> None:
    convert_folder(write_qwen3(tmp_path / "s"), tmp_path / "c")
    with pytest.raises(UnsupportedError, match=r"c is a converted folder, .*: give the folder of safetensors that it"):
        export_folder(tmp_path / "c", tmp_path / "m")
    nothing_stays(tmp_path, "c", "s")


def test_names_that_nobody_knows_one_by_one(tmp_path: Path) -> None:
    """Granite's fused tensors."""
    tensors = {
        f"model.layers.{n}.block_sparse_moe.{name}.weight": bf16(np.ones(shape))
        for n in range(LAYERS)
        for name, shape in (("input_linear", (4, 64, 64)), ("output_linear", (4, 64, 32)))
    }
    source = write_folder(tmp_path / "s", qwen3_config(model_type="granitemoe"), tensors)
    with pytest.raises(UnsupportedError, match=r"block_sparse_moe\.input_linear\.weight: how other engines name"):
        export_folder(source, tmp_path / "m", "nvfp4")
    nothing_stays(tmp_path, "s")


def test_scales_that_differ_within_a_block(tmp_path: Path) -> None:
    """One per row, as fp8 per channel has: no grid of 128 x 128 says that."""
    work = Export(scan_of(write_qwen3(tmp_path / "s")), formats.get("fp8_block"))
    matrix = formats.get("fp8_block").quantize(np.ones((32, 64), np.float32))
    assert matrix.scales is not None
    matrix.scales[5] += 1
    with pytest.raises(FormatError, match="x: its scales differ within 128 rows"):
        work.writers[0].arrays(matrix, "x")


@pytest.mark.parametrize("value", [0.0, 1e-39])
def test_a_global_without_a_reciprocal(tmp_path: Path, value: float) -> None:
    tensors = qwen3_tensors("modelopt")
    name = "model.layers.1.mlp.experts.2.down_proj.weight_scale_2"
    tensors[name] = fp32(value)
    config = qwen3_config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    source = write_folder(tmp_path / "s", config, tensors)
    with pytest.raises(FreeTokenError, match=r"global scale|reciprocal"):
        export_folder(source, tmp_path / "m")
    nothing_stays(tmp_path, "s")


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    tensors = qwen3_tensors()
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tensors[name] = bf16(np.full((32, 64), np.nan))
    source = write_folder(tmp_path / "s", qwen3_config(), tensors)
    with pytest.raises(CheckpointError, match=name):
        export_folder(source, tmp_path / "m", "nvfp4")
    nothing_stays(tmp_path, "s")


def test_a_config_that_contradicts(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "s", qwen3_config(num_experts=5), qwen3_tensors())
    with pytest.raises(CheckpointError, match="num_experts 5"):
        export_folder(source, tmp_path / "m", "nvfp4")
