"""`ft convert --to compressed-tensors`: a checkpoint for other engines, its experts packed as llm-compressor does.

Tensor names, dtypes and the config's section are those of llm-compressor's own checkpoints: experts one by one, gate
and up apart and untransposed, whatever the source does. The dense part is copied byte for byte, and every matrix in it
that is not packed is named under `ignore`. One expert after the other is read, quantized and written, in several
threads; nothing larger is held.

nvfp4: engines fuse gate and up and use one global scale for both, and what llm-compressor writes has them equal. So
gate and up of an expert are quantized here as one matrix. A source that is nvfp4 already keeps its codes where its two
globals are equal. A factor (ModelOpt's) becomes a divisor, which rounds once, by 2**-24 at most.

fp8_block: scales are written in fp32, as they are; llm-compressor's own are bf16, which would round them.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from freetoken import formats
from freetoken.checkpoint.experts import ExpertGroup, ExpertScan, LayerExperts, QuantizedDense, gate_and_up_rows
from freetoken.checkpoint.inspect import check_config
from freetoken.checkpoint.jobs import run_jobs
from freetoken.checkpoint.journal import new_folder
from freetoken.checkpoint.load import requantize, requantize_expert
from freetoken.checkpoint.records import MANIFEST, RecordExperts
from freetoken.checkpoint.safetensors import TensorInfo
from freetoken.checkpoint.write import NewTensor, TensorFiles, side_files, write_config
from freetoken.errors import CheckpointError, ConfigError, FormatError, UnsupportedError
from freetoken.formats.base import Format, Matrix, Spelling
from freetoken.formats.codes import fp32_to_bf16
from freetoken.formats.record import Expert
from freetoken.units import format_bytes

_DIALECT = "compressed-tensors"
_ARGS: dict[str, Any] = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 4,
    "observer": "memoryless_minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": None, "symmetric": True,
    "type": "float", "zp_dtype": None,
}  # fmt: skip
_SCHEMES: dict[str, dict[str, Any]] = {
    "nvfp4": {
        "format": "nvfp4-pack-quantized",
        "input_activations": None,
        "weights": _ARGS | {"group_size": 16, "scale_dtype": "torch.float8_e4m3fn", "strategy": "tensor_group"},
    },
    "mxfp4": {
        "format": "mxfp4-pack-quantized",
        "input_activations": None,
        "weights": _ARGS | {"group_size": 32, "scale_dtype": "torch.uint8", "strategy": "group"},
    },
    "fp8_block": {
        "format": "float-quantized",
        "input_activations": _ARGS
        | {"dynamic": True, "group_size": 128, "num_bits": 8, "observer": None, "strategy": "group"},
        "weights": _ARGS | {"block_structure": [128, 128], "num_bits": 8, "strategy": "block"},
    },
}
"""Format -> what llm-compressor's schemes NVFP4A16, MXFP4A16 and FP8_BLOCK write about it."""
_SAME_NUMBERS = {"ds_fp4": "mxfp4"}
_PLAIN = "bf16"
_INTERLEAVED = "gpt_oss"
"""The family whose plain experts are (in, out) with gate and up alternating."""
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Exported:
    """What was written. expert_bytes: of all bytes, those of experts."""

    path: str
    format: str
    layers: int
    experts: int
    tensors: int
    file_bytes: int
    expert_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        how = self.format if self.format == _PLAIN else f"{self.format} ({_DIALECT})"
        return (
            f"{self.path}: {self.experts} experts in {self.layers} layers as {how}, "
            f"{format_bytes(self.expert_bytes)}; {self.tensors} tensors, {format_bytes(self.file_bytes)}"
        )


class Export:
    """What will be written; making one checks everything that headers tell.

    fmt: of the experts; None keeps what the source holds. Raises `ConfigError`, `CheckpointError`, `FormatError` or
    `UnsupportedError`.
    """

    def __init__(self, found: ExpertScan, fmt: Format | None = None) -> None:
        check_config(found)
        self.found = found
        groups = [_as_group(group) for group in found.groups]
        self.format = _writable(found, fmt)
        self.writers = [(_Plain if self.format.name == _PLAIN else _Packed)(group, self.format) for group in groups]
        self.copies: list[tuple[NewTensor, TensorInfo]] = []
        self.respelled: list[tuple[NewTensor, TensorInfo]] = []
        self._plan_dense()

    @property
    def tensors(self) -> list[NewTensor]:
        """Everything, in the order of files."""
        dense = [tensor for tensor, _ in (*self.copies, *self.respelled)]
        return [*dense, *(tensor for writer in self.writers for tensor in writer.tensors())]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(
        self, destination: str | os.PathLike[str], threads: int, on_bytes: Callable[[int], object] = lambda n: None
    ) -> Exported:
        """Write a folder of safetensors, its experts as compressed-tensors spells them.

        on_bytes is called with bytes just written, of `nbytes`. Raises `ConfigError`, `CheckpointError`, `FormatError`
        or `CapacityError`; nothing is left then.
        """
        tensors = self.tensors
        total = sum(tensor.nbytes for tensor in tensors)
        dense = sum(tensor.nbytes for tensor, _ in (*self.copies, *self.respelled))
        with new_folder(destination, total, _DIALECT) as folder:
            files = TensorFiles(folder, tensors)
            done = False
            try:
                for tensor, info in self.copies:
                    files.copy(tensor.name, info)
                    on_bytes(tensor.nbytes)
                for tensor, info in self.respelled:
                    files.put(tensor.name, self._respell(info))

                def write(job: tuple[_Packed, int]) -> None:
                    writer, expert = job
                    on_bytes(writer.write(expert, files))

                run_jobs(write, [(w, expert) for w in self.writers for expert in range(w.group.n_experts)], threads)
                done = True
            finally:
                files.close(complete=done)
            for path in side_files(self.found.checkpoint.path):
                if path.name not in (MANIFEST, "hf_quant_config.json"):
                    shutil.copyfile(path, folder / path.name)
            write_config(folder, self._config())
        return Exported(
            os.fspath(destination),
            self.format.name,
            len(self.writers),
            sum(writer.group.n_experts for writer in self.writers),
            len(tensors),
            total,
            total - dense,
        )

    def _plan_dense(self) -> None:
        """Everything but experts: copied, under other names where the source packs it in another dialect."""
        packed = {info.name for matrix in self.found.dense for info in matrix.parts.values()}
        for name, info in self.found.checkpoint.tensors.items():
            if name not in packed and name not in self.found.expert_tensors:
                self.copies.append((NewTensor(name, info.dtype, info.shape), info))
        for matrix in self.found.dense:
            spelling = _dense_spelling(matrix, self.format) or self._refuse_dense(matrix)
            for role, (suffix, _) in matrix.written.spelling.tensors.items():
                info, name = matrix.parts[suffix], f"{matrix.module}.{spelling.tensors[role][0]}"
                shape = (1,) if role == "global" else info.shape
                if role == "global" and not matrix.written.spelling.divides:
                    self.respelled.append((NewTensor(name, info.dtype, shape), info))
                elif role == "scales" and _is_e8m0_beside_fp8(info, self.format):
                    self.respelled.append((NewTensor(name, "F32", shape), info))
                else:
                    self.copies.append((NewTensor(name, info.dtype, shape), info))

    def _respell(self, info: TensorInfo) -> NDArray[np.float32]:
        """The same numbers in another dtype, or a factor as a divisor."""
        stored = self.found.checkpoint.read(info.name)
        if _is_e8m0_beside_fp8(info, self.format):
            return self.format.read_scales(stored, info.dtype).view(np.float32)
        return _divisor(stored.reshape(1), info.name, self.format)

    def _refuse_dense(self, matrix: QuantizedDense) -> NoReturn:
        info = matrix.parts[matrix.written.suffix("codes")]
        good = [n for n in _SCHEMES if all(_dense_spelling(m, formats.get(n)) for m in self.found.dense)]
        raise CheckpointError(
            f"{info.file}: {matrix.module} outside the experts is {matrix.written}, which is not written on beside "
            f"experts in {self.format.name}: convert the checkpoint that this one was made from"
            + (f", or choose {' or '.join(good)}" if good else ""),
            file=str(info.file),
            tensor=info.name,
        )

    def _config(self) -> dict[str, Any]:
        config = copy.deepcopy(dict(self.found.checkpoint.config))
        for part in (config, config.get("text_config")):
            if isinstance(part, dict):
                part.pop("quantization_config", None)
        if self.format.name != _PLAIN:
            config["quantization_config"] = self._section()
        return config

    def _section(self) -> dict[str, Any]:
        scheme = _SCHEMES[self.format.name]
        group = {**scheme, "output_activations": None, "targets": ["Linear"]}
        packed = {matrix.module for matrix in self.found.dense}
        weights = [t.name for t, _ in self.copies if len(t.shape) == 2 and t.name.endswith(".weight")]
        plain = [name.removesuffix(".weight") for name in weights]
        return {
            "config_groups": {"group_0": dict(sorted(group.items()))},
            "format": scheme["format"],
            "global_compression_ratio": None,
            "ignore": [n for n in plain if n not in packed and "embed" not in n.rpartition(".")[2]],
            "kv_cache_scheme": None,
            "quant_method": _DIALECT,
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
        }


class _Packed:
    """One layer's experts, one by one: gate, up and down in the tensors of a spelling."""

    def __init__(self, group: ExpertGroup, fmt: Format) -> None:
        self.group, self.format, self.layout = group, fmt, group.layout(fmt)
        self.spelling = _spelling(fmt)

    def tensors(self) -> Iterator[NewTensor]:
        h, i = self.group.hidden, self.group.intermediate
        for expert in range(self.group.n_experts):
            for projection, (n, k) in zip(_PROJECTIONS, ((i, h), (i, h), (h, i)), strict=True):
                module = self.module(expert, projection)
                for role, (suffix, dtypes) in self.spelling.tensors.items():
                    yield NewTensor(f"{module}.{suffix}", dtypes[0], self.shape(role, n, k))
                if self.group.bias:
                    yield NewTensor(f"{module}.bias", self.bias_dtype, (n,))

    def shape(self, role: str, n: int, k: int) -> tuple[int, ...]:
        """A tensor of a matrix of n rows and k columns."""
        if role == "codes":
            return n, k if self.format.bits >= 8 else k * self.format.bits // 8
        return (1,) if role == "global" else (-(-n // self.format.row_group), self.format.n_blocks(k))

    def write(self, expert: int, files: TensorFiles) -> int:
        """Quantize and write one expert; the bytes written."""
        found = self.requantize_expert(self.group.read(expert))
        written = 0
        for projection in _PROJECTIONS:
            module, name = self.module(expert, projection), projection.removesuffix("_proj")
            arrays = self.arrays(getattr(found, name), module)
            if self.group.bias:
                arrays["bias"] = _bias_bits(getattr(found, f"{name}_bias"), self.bias_dtype)
            for suffix, array in arrays.items():
                files.put(f"{module}.{suffix}", array)
                written += array.nbytes
        return written

    def requantize_expert(self, expert: Expert) -> Expert:
        """In the format to be written; gate and up with the same global where it has one."""
        if expert.gate.format.kernels == self.format.kernels:  # the same numbers under another name
            expert = replace(
                expert, **{n: replace(getattr(expert, n), format=self.format) for n in ("gate", "up", "down")}
            )
        if "global" in self.spelling.tensors and not _share_global(expert.gate, expert.up, self.format):
            gate, up = _quantize_together(self.format, expert.gate, expert.up)
            return replace(expert, gate=gate, up=up, down=requantize(expert.down, self.format))
        return requantize_expert(expert, self.format)

    def arrays(self, matrix: Matrix, module: str) -> dict[str, NDArray[Any]]:
        """Suffix -> what is written of a matrix."""
        found: dict[str, NDArray[Any]] = {}
        for role, (suffix, _) in self.spelling.tensors.items():
            if role == "global":
                value = np.array([matrix.global_scale], np.float32)
                found[suffix] = value if matrix.divides else _divisor(value, module, self.format)
            elif role == "codes":
                found[suffix] = matrix.codes.view(np.uint16) if self.format.bits == 16 else matrix.codes
            else:
                found[suffix] = self.stored_scales(matrix, module)
        return found

    def stored_scales(self, matrix: Matrix, module: str) -> NDArray[Any]:
        """A matrix has scales for each row; where rows share them on disk, they must agree."""
        assert matrix.scales is not None
        step = self.format.row_group
        grid = np.ascontiguousarray(matrix.scales[::step])
        if not np.array_equal(np.repeat(grid, step, axis=0)[: len(matrix.scales)], matrix.scales):
            raise FormatError(
                f"{module}: its scales differ within {step} rows, which {_DIALECT} cannot say; choose another format",
                format=self.format.name,
                shape=matrix.shape,
            )
        return grid

    def module(self, expert: int, projection: str) -> str:
        """The name of one matrix's module: the source's own, or llm-compressor's where the source's are fused."""
        if self.group.fused:
            return f"{self.group.prefix}.{expert}.{projection}"
        return next(iter(self.group.parts[expert, projection].values())).name.rpartition(".")[0]

    @property
    def bias_dtype(self) -> str:
        """bf16 where the source's are, else fp32."""
        found = {parts["bias"].dtype for parts in self.group.parts.values()}
        return "BF16" if found == {"BF16"} else "F32"


class _Plain(_Packed):
    """One layer's experts in bf16, laid out as the family's plain checkpoints are: one by one, or all in one tensor."""

    def __init__(self, group: ExpertGroup, fmt: Format) -> None:
        super().__init__(group, fmt)
        family = group.checkpoint.text_config.get("model_type") == _INTERLEAVED
        self.fused = group.fused or family
        self.transposed, self.interleaved = group.transposed or family, group.interleaved or family

    def tensors(self) -> Iterator[NewTensor]:
        if not self.fused:
            yield from super().tensors()
            return
        n, h, i = self.group.n_experts, self.group.hidden, self.group.intermediate
        for name, (rows, width) in (("gate_up_proj", (2 * i, h)), ("down_proj", (h, i))):
            shape = (width, rows) if self.transposed else (rows, width)
            yield NewTensor(f"{self.group.prefix}.{name}", "BF16", (n, *shape))
            if self.group.bias:
                yield NewTensor(f"{self.group.prefix}.{name}_bias", self.bias_dtype, (n, rows))

    def write(self, expert: int, files: TensorFiles) -> int:
        if not self.fused:
            return super().write(expert, files)
        found = self.requantize_expert(self.group.read(expert))
        codes = {name: getattr(found, name).codes.view(np.uint16) for name in ("gate", "up", "down")}
        arrays = {"gate_up_proj": self._join(codes["gate"], codes["up"]), "down_proj": codes["down"]}
        if self.transposed:
            arrays = {name: array.T for name, array in arrays.items()}
        if self.group.bias:
            biases = {n: _bias_bits(getattr(found, f"{n}_bias"), self.bias_dtype) for n in ("gate", "up", "down")}
            arrays["gate_up_proj_bias"] = self._join(biases["gate"], biases["up"])
            arrays["down_proj_bias"] = biases["down"]
        for name, array in arrays.items():
            files.put(f"{self.group.prefix}.{name}", array, expert)
        return sum(array.nbytes for array in arrays.values())

    def _join(self, gate: NDArray[Any], up: NDArray[Any]) -> NDArray[Any]:
        out = np.empty((2 * len(gate), *gate.shape[1:]), gate.dtype)
        first, second = gate_and_up_rows(self.interleaved, len(gate))
        out[first], out[second] = gate, up
        return out


def _writable(found: ExpertScan, fmt: Format | None) -> Format:
    """The format that will be written, or `ConfigError` naming those that can be."""
    held = {group.format.name for group in found.groups}
    names = {_SAME_NUMBERS.get(name, name) for name in ({fmt.name} if fmt is not None else held)}
    name = next(iter(names))
    if len(names) > 1 or name not in (*_SCHEMES, _PLAIN):
        expected = ", ".join(sorted((*_SCHEMES, *_SAME_NUMBERS, _PLAIN)))
        asked = " and ".join(sorted(names))
        raise ConfigError(
            f"{_DIALECT} has no way to write {asked} experts; name an expert format of {expected}",
            name="expert_format",
            value=None if fmt is None else fmt.name,
            expected=expected,
        )
    return formats.get(name)


def _as_group(group: LayerExperts) -> ExpertGroup:
    """Experts whose names other engines know: one by one as the family has them, or fused as transformers has them."""
    where = group.checkpoint.path
    if not isinstance(group, ExpertGroup):
        what = "a converted folder" if isinstance(group, RecordExperts) else "a GGUF file"
        raise UnsupportedError(
            f"{where} is {what}, which is no source for `--to {_DIALECT}`: give the folder of safetensors that it was "
            "made from",
            feature=what,
        )
    other = next((i.name for i in group.tensors if not i.name.startswith(f"{group.prefix}.")), None)
    names = (f"{group.prefix}.gate_up_proj", f"{group.prefix}.down_proj")
    other = other or next((i.name for i in group.tensors if group.fused and not i.name.startswith(names)), None)
    if other is not None:
        raise UnsupportedError(
            f"{where}: {other}: how other engines name the experts of this family one by one is not known",
            feature=str(group.checkpoint.text_config.get("model_type")),
        )
    return group


def _dense_spelling(matrix: QuantizedDense, fmt: Format) -> Spelling | None:
    """The spelling in which a packed matrix outside the experts is written on, its numbers untouched; None: none."""
    held = matrix.written
    if fmt.name == _PLAIN or held.format.kernels != fmt.kernels or held.block not in (None, (128, 128)):
        return None
    spelling = _spelling(fmt)
    dtypes = {role: matrix.parts[suffix].dtype for role, (suffix, _) in held.spelling.tensors.items()}
    return spelling if all(dtypes[role] in known for role, (_, known) in spelling.tensors.items()) else None


def _is_e8m0_beside_fp8(info: TensorInfo, fmt: Format) -> bool:
    """Scales that are written in fp32, which holds them: llm-compressor's fp8 knows no e8m0."""
    return fmt.name == "fp8_block" and info.dtype == "F8_E8M0"


def _spelling(fmt: Format) -> Spelling:
    wanted = "plain" if fmt.name == _PLAIN else _DIALECT
    return next(spelling for spelling in fmt.spellings if spelling.name == wanted)


def _share_global(first: Matrix, second: Matrix, fmt: Format) -> bool:
    return first.format is fmt and (first.global_scale, first.divides) == (second.global_scale, second.divides)


def _quantize_together(fmt: Format, first: Matrix, second: Matrix) -> tuple[Matrix, Matrix]:
    """Two matrices of one width, as if they were one."""
    n = len(first.codes)

    def strip(start: int, stop: int) -> NDArray[np.float32]:
        parts = [first.rows(start, min(stop, n))] if start < n else []
        parts += [second.rows(max(0, start - n), stop - n)] if stop > n else []
        return np.concatenate([part.dequantize() for part in parts])

    both = fmt.quantize_strips((n + len(second.codes), first.shape[1]), strip)
    return both.rows(0, n), both.rows(n, n + len(second.codes))


def _divisor(factor: NDArray[np.float32], name: str, fmt: Format) -> NDArray[np.float32]:
    """(1,): by what to divide instead of multiplying by a factor."""
    with np.errstate(divide="ignore", over="ignore"):
        divisor = (np.float32(1) / factor).astype(np.float32)
    if not (np.isfinite(divisor) & (divisor > 0)).all():
        raise FormatError(
            f"{name}: a global scale of {float(factor[0])} has no reciprocal in fp32; choose another format",
            format=fmt.name,
        )
    return divisor


def _bias_bits(bias: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    return fp32_to_bf16(bias) if dtype == "BF16" else bias.astype(np.float32)
