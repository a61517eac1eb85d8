"""The experts of a checkpoint, once they are found: where their tensors lie, and reading them one by one.

`scan.py` finds them; `gguf_experts.py` is about the other kind of file. Nothing here trusts a number: a scale or weight
that is none is refused when it is read.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.jobs import run_jobs
from freetoken.checkpoint.quantization import Quantization
from freetoken.checkpoint.safetensors import Checkpoint, TensorInfo
from freetoken.checkpoint.strips import StoredExpert, StoredRows, look_alarming
from freetoken.errors import CheckpointError, FormatError
from freetoken.formats.base import Format, Matrix, ScaleBlock, Scales, Spelling
from freetoken.formats.codes import bf16_to_fp32
from freetoken.formats.record import Expert, RecordLayout

_FLOATS = ("F64", "F32", "F16", "BF16")
"""safetensors dtypes that become the model's."""

Parts = Mapping[str, TensorInfo]
"""Suffix -> tensor, of one matrix."""


@dataclass(frozen=True)
class Written:
    """How a matrix is written: format, tensors, and the weights that share a scale where a config chooses that."""

    format: Format
    spelling: Spelling
    block: ScaleBlock | None = None

    def suffix(self, role: str) -> str:
        """The suffix of the tensor in a role."""
        return self.spelling.tensors[role][0]

    def __str__(self) -> str:
        return f"{self.format.name} ({self.spelling.name})"


@dataclass(frozen=True)
class LayerExperts(ABC):
    """The experts of one layer, in whatever kind of file: what the rest of the loader asks of them."""

    checkpoint: Checkpoint
    prefix: str
    format: Format
    n_experts: int
    hidden: int
    intermediate: int
    bias: bool

    @property
    def layer(self) -> int:
        """The layer's number: the last number in the prefix, or -1."""
        numbers = re.findall(r"\.(\d+)(?=\.)", f".{self.prefix}.")
        return int(numbers[-1]) if numbers else -1

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors on disk."""
        return sum(info.nbytes for info in self.tensors)

    def layout(self, fmt: Format | None = None) -> RecordLayout:
        """The record these experts have in a format (default: the checkpoint's)."""
        return RecordLayout(fmt or self.format, self.hidden, self.intermediate, self.bias)

    @property
    @abstractmethod
    def tensors(self) -> tuple[TensorInfo, ...]:
        """All its tensors."""

    @property
    @abstractmethod
    def spelled(self) -> str:
        """How the file writes them, for people."""

    @property
    @abstractmethod
    def interleaving(self) -> bool | None:
        """Whether gate and up rows of one tensor alternate; None where nothing has to be known: they are told apart."""

    @abstractmethod
    def read(self, expert: int) -> Expert:
        """One expert; raises `CheckpointError` naming file and tensor when a scale or weight is no number."""

    def stored(self, expert: int) -> StoredExpert | None:
        """One expert as its files hold it, where its bytes only have to be permuted; else None."""
        return None

    @abstractmethod
    def check_scales(self) -> None:
        """Read every scale (not the codes) and refuse what cannot be one, before anything is allocated."""


@dataclass(frozen=True)
class ExpertGroup(LayerExperts):
    """The experts of one layer as a folder of safetensors holds them.

    `parts` maps (expert or -1 for all, projection) to the tensors of that matrix.
    """

    written: Written
    fused: bool
    transposed: bool
    interleaved: bool
    parts: Mapping[tuple[int, str], Parts]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(info for parts in self.parts.values() for info in parts.values())

    @property
    def spelled(self) -> str:
        return f"{self.written.spelling.name}, {'fused' if self.fused else 'one by one'}"

    @property
    def interleaving(self) -> bool | None:
        return self.interleaved if self.fused else None

    def read(self, expert: int) -> Expert:
        return self._read_fused(expert) if self.fused else self._read_separate(expert)

    def stored(self, expert: int) -> StoredExpert | None:
        if self.transposed:
            return None
        rows, factors, biases = [], [], []
        for projection in ("gate_up_proj", "down_proj") if self.fused else ("gate_proj", "up_proj", "down_proj"):
            parts = self.parts[-1 if self.fused else expert, projection]
            if parts[self.written.suffix("codes")].dtype in ("F16", "F32"):
                return None
            rows += self._stored_rows(parts, projection, expert)
            factors.append(self._factors[-1 if self.fused else expert, projection])
            biases.append(self._bias(parts, expert))
        if self.fused:
            first, second = gate_and_up_rows(self.interleaved, self.intermediate)
            both = biases[0]
            biases[:1] = [None, None] if both is None else [both[first], both[second]]
            factors.insert(0, factors[0])
        return StoredExpert(
            tuple(rows), (factors[0], factors[1], factors[2]), self.written.spelling.divides,
            (biases[0], biases[1], biases[2]),
        )  # fmt: skip

    def _stored_rows(self, parts: Parts, projection: str, expert: int) -> list[StoredRows]:
        """One matrix; a fused gate and up as the two that it is, or as one whose rows alternate."""
        matrix = projection.removesuffix("_proj")
        names = ("gate", "up") if matrix == "gate_up" and not self.interleaved else (matrix,)
        codes, scales, values = parts[self.written.suffix("codes")], None, None
        if self.format.scale_dtype is not None:
            info = parts[self.written.suffix("scales")]
            if self.format.keeps_scales:
                scales = info
            else:
                values = self._scales(parts, projection, expert)
                assert values is not None

        def start(info: TensorInfo, number: int) -> int:
            """Where the rows of the name with a number begin."""
            nbytes = info.nbytes // self.n_experts if self.fused else info.nbytes
            return info.offset + (expert * nbytes if self.fused else 0) + number * (nbytes // len(names))

        return [
            StoredRows(
                name,
                codes,
                start(codes, number),
                scales,
                0 if scales is None else start(scales, number),
                None if values is None else values[number * len(values) // len(names) :],
            )
            for number, name in enumerate(names)
        ]

    @cached_property
    def _factors(self) -> dict[tuple[int, str], float]:
        """The global scale of every matrix. All at once: there are thousands, they are small and lie together."""
        if "global" not in self.written.spelling.tensors:
            return dict.fromkeys(self.parts, 1.0)
        suffix = self.written.suffix("global")
        values = self.checkpoint.read_together([parts[suffix].name for parts in self.parts.values()])
        return {key: float(value.reshape(-1)[0]) for key, value in zip(self.parts, values, strict=True)}

    def check_scales(self) -> None:
        """Read every scale and bias (not the codes) and refuse what is no number, before anything is allocated."""
        clean = self._scales_look_clean()
        for (expert, projection), parts in self.parts.items():
            if clean and "bias" not in parts:
                continue
            for e in [expert] if expert >= 0 else range(self.n_experts):
                self._bias(parts, e)
                scales = None if clean else self._scales(parts, projection, e)
                if scales is not None:
                    _check_scales(self.written, parts, scales, self.checkpoint)

    def _scales_look_clean(self) -> bool:
        """Whether a quick look at all of them finds nothing to be judged matrix by matrix."""
        fmt = self.format
        if fmt.scale_dtype is None:
            return True
        if not fmt.keeps_scales or any(
            fmt.find_bad_global(f, self.written.spelling.divides) for f in self._factors.values()
        ):
            return False
        return not look_alarming([parts[self.written.suffix("scales")] for parts in self.parts.values()], fmt)

    def _read_separate(self, expert: int) -> Expert:
        matrices, biases = {}, {}
        for projection in ("gate_proj", "up_proj", "down_proj"):
            parts = self.parts[expert, projection]
            codes, scales = self._codes(parts, expert), self._scales(parts, projection, expert)
            matrices[projection] = self._matrix(codes, scales, parts)
            biases[projection] = self._bias(parts, expert)
        return Expert(
            matrices["gate_proj"],
            matrices["up_proj"],
            matrices["down_proj"],
            biases["gate_proj"],
            biases["up_proj"],
            biases["down_proj"],
        )

    def _read_fused(self, expert: int) -> Expert:
        both, down = self.parts[-1, "gate_up_proj"], self.parts[-1, "down_proj"]
        codes, scales = self._codes(both, expert), self._scales(both, "gate_up_proj", expert)
        bias = self._bias(both, expert)
        first, second = gate_and_up_rows(self.interleaved, self.intermediate)

        def pick(array: NDArray[Any] | None, rows: slice) -> NDArray[Any] | None:
            return None if array is None else np.ascontiguousarray(array[rows])

        return Expert(
            self._matrix(codes[first], pick(scales, first), both),
            self._matrix(codes[second], pick(scales, second), both),
            self._matrix(self._codes(down, expert), self._scales(down, "down_proj", expert), down),
            pick(bias, first),
            pick(bias, second),
            self._bias(down, expert),
        )

    def _codes(self, parts: Parts, expert: int) -> NDArray[Any]:
        codes = self._tensor(parts, "codes", expert)
        return codes.reshape(codes.shape[0], -1)  # gpt-oss's blocks have a dimension of their own

    def _scales(self, parts: Parts, projection: str, expert: int) -> Scales | None:
        """A scale for each row and block; a grid that crosses from gate to up is spread before they are parted."""
        if self.format.scale_dtype is None:
            return None
        info = parts[self.written.suffix("scales")]
        n = self.hidden if projection == "down_proj" else self.intermediate * (2 if self.fused else 1)
        k = self.intermediate if projection == "down_proj" else self.hidden
        stored = self.format.read_scales(self._tensor(parts, "scales", expert), info.dtype)
        try:
            return self.format.spread_scales(stored, n, k, self.written.block)
        except FormatError as error:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r}: {error}", file=str(info.file), tensor=info.name
            ) from error

    def _tensor(self, parts: Parts, role: str, expert: int) -> NDArray[Any]:
        """(rows, ...) of one expert; in a transposed checkpoint codes are packed along the first axis."""
        tensor = self.checkpoint.read(parts[self.written.suffix(role)].name, expert if self.fused else None)
        return tensor.T if self.transposed else tensor

    def _matrix(self, codes: NDArray[Any], scales: NDArray[Any] | None, parts: Parts) -> Matrix:
        info = parts[self.written.suffix("codes")]
        if info.dtype in ("F16", "F32"):  # the bf16 format takes both, rounded
            matrix = self.format.quantize(np.ascontiguousarray(codes, np.float32))
        else:
            factor = _read_global(self.written, parts, self.checkpoint)
            matrix = Matrix(self.format, np.ascontiguousarray(codes).view(np.uint8), scales, *factor)
        _check_numbers(matrix, self.written, parts)
        return matrix

    def _bias(self, parts: Parts, expert: int) -> NDArray[np.float32] | None:
        info = parts.get("bias")
        if info is None:
            return None
        bits = self.checkpoint.read(info.name, expert if self.fused else None)
        bias = bf16_to_fp32(bits) if info.dtype == "BF16" else bits.astype(np.float32)
        if not np.isfinite(bias).all():
            raise _damaged(info, f"the bias of expert {expert} holds a NaN or infinite number")
        return bias


def gate_and_up_rows(interleaved: bool, intermediate: int) -> tuple[slice, slice]:
    """Which rows of a fused gate and up are gate's and which are up's."""
    if interleaved:
        return slice(0, None, 2), slice(1, None, 2)
    return slice(0, intermediate), slice(intermediate, None)


@dataclass(frozen=True)
class QuantizedDense:
    """One quantized matrix outside the experts: a module's weight in a format and spelling."""

    checkpoint: Checkpoint
    module: str
    written: Written
    parts: Parts

    def check_scales(self) -> None:
        """As `LayerExperts.check_scales`."""
        if "scales" in self.written.spelling.tensors:
            info = self.parts[self.written.suffix("scales")]
            scales = self.written.format.read_scales(self.checkpoint.read(info.name), info.dtype)
            rows = scales if scales.ndim > 1 else scales.reshape(-1, 1)
            _check_scales(self.written, self.parts, rows, self.checkpoint)


@dataclass(frozen=True)
class ExpertScan:
    """Everything a checkpoint's headers say about its experts and its other quantized matrices."""

    checkpoint: Checkpoint
    quantization: Quantization
    groups: tuple[LayerExperts, ...]
    dense: tuple[QuantizedDense, ...]

    @cached_property
    def expert_tensors(self) -> frozenset[str]:
        """Names of all tensors that belong to experts."""
        return frozenset(info.name for group in self.groups for info in group.tensors)

    def dense_bytes(self, width: int = 2) -> int:
        """Bytes of everything that is not experts in a model whose numbers have `width` bytes."""
        packed = {info.name for matrix in self.dense for info in matrix.parts.values()}
        total = 0
        for info in self._dense_tensors():
            is_number = info.dtype in _FLOATS and info.name not in packed
            total += math.prod(info.shape) * width if is_number else info.nbytes
        for matrix in self.dense:
            codes = matrix.parts[matrix.written.suffix("codes")]
            total += codes.nbytes * 8 * width // matrix.written.format.bits
        return total

    @property
    def dense_files(self) -> frozenset[Path]:
        """The files that hold something that is not experts, which are mapped while it is read."""
        return frozenset(info.file for info in self._dense_tensors())

    def _dense_tensors(self) -> list[TensorInfo]:
        experts = self.expert_tensors
        return [info for name, info in self.checkpoint.tensors.items() if name not in experts]

    def check_scales(self, on_checked: Callable[[int], object] = lambda n: None, threads: int = 1) -> None:
        """Read every scale, of experts and of the dense part, and refuse what is no number.

        on_checked is called with the number of parts just checked, of `scale_parts` in all.
        """

        def check(part: LayerExperts | QuantizedDense) -> None:
            part.check_scales()
            on_checked(1)

        parts: list[LayerExperts | QuantizedDense] = [*self.groups, *self.dense]
        run_jobs(check, parts, threads)

    @property
    def scale_parts(self) -> int:
        """Layers of experts and quantized matrices of the dense part."""
        return len(self.groups) + len(self.dense)


def _read_global(written: Written, parts: Parts, checkpoint: Checkpoint) -> tuple[float, bool]:
    """The global scale and whether it divides."""
    if "global" not in written.spelling.tensors:
        return 1.0, False
    value = checkpoint.read(parts[written.suffix("global")].name)
    return float(value.reshape(-1)[0]), written.spelling.divides


def _check_scales(written: Written, parts: Parts, scales: Scales, checkpoint: Checkpoint) -> None:
    """Check a matrix of which only the scales are read."""
    codes = np.empty((len(scales), 0), np.uint8)
    _check_numbers(Matrix(written.format, codes, scales, *_read_global(written, parts, checkpoint)), written, parts)


def _check_numbers(matrix: Matrix, written: Written, parts: Parts) -> None:
    bad = matrix.format.find_bad(matrix)
    if bad:
        has_scales = "scales" in written.spelling.tensors and not bad.endswith("weight")
        role = "global" if "global" in bad else ("scales" if has_scales else "codes")
        raise _damaged(parts[written.suffix(role)], bad)


def _damaged(info: TensorInfo, what: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name!r}: {what}; the export is damaged, get or make it again",
        file=str(info.file),
        tensor=info.name,
    )
