"""The experts of a checkpoint, once they are found: where their tensors lie, and reading them one by one.

`scan.py` finds them; `gguf_experts.py` is about the other kind of file. Nothing here trusts a number: a scale or weight
that is none is refused when it is read.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken.checkpoint.quantization import Quantization
from freetoken.checkpoint.safetensors import Checkpoint, TensorInfo
from freetoken.errors import CheckpointError
from freetoken.formats.base import Format, Matrix, Spelling
from freetoken.formats.codes import bf16_to_fp32
from freetoken.formats.record import Expert, RecordLayout

Parts = Mapping[str, TensorInfo]
"""Suffix -> tensor, of one matrix."""


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

    @abstractmethod
    def check_scales(self) -> None:
        """Read every scale (not the codes) and refuse NaN, infinite and zero ones, before anything is allocated."""


@dataclass(frozen=True)
class ExpertGroup(LayerExperts):
    """The experts of one layer as a folder of safetensors holds them.

    `parts` maps (expert or -1 for all, projection) to the tensors of that matrix.
    """

    spelling: Spelling
    fused: bool
    transposed: bool
    interleaved: bool
    parts: Mapping[tuple[int, str], Parts]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return tuple(info for parts in self.parts.values() for info in parts.values())

    @property
    def spelled(self) -> str:
        return f"{self.spelling.name}, {'fused' if self.fused else 'one by one'}"

    @property
    def interleaving(self) -> bool | None:
        return self.interleaved if self.fused else None

    def read(self, expert: int) -> Expert:
        return self._read_fused(expert) if self.fused else self._read_separate(expert)

    def check_scales(self) -> None:
        """Read every scale and bias (not the codes) and refuse what is no number, before anything is allocated."""
        for (expert, _), parts in self.parts.items():
            for e in [expert] if expert >= 0 else range(self.n_experts):
                self._bias(parts, e)
                if self.format.scale_dtype is None:
                    continue
                _check_scales(self.format, self.spelling, parts, self._tensor(parts, "scales", e), self.checkpoint)

    def _read_separate(self, expert: int) -> Expert:
        matrices, biases = {}, {}
        for projection in ("gate_proj", "up_proj", "down_proj"):
            parts = self.parts[expert, projection]
            codes = self._tensor(parts, "codes", expert)
            scales = self._tensor(parts, "scales", expert) if self.format.scale_dtype is not None else None
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
        codes, scales = self._fused_tensors(both, expert)
        down_codes, down_scales = self._fused_tensors(down, expert)
        bias = self._bias(both, expert)
        first, second = self._gate_and_up_rows()

        def pick(array: NDArray[Any] | None, rows: slice) -> NDArray[Any] | None:
            return None if array is None else np.ascontiguousarray(array[rows])

        return Expert(
            self._matrix(codes[first], pick(scales, first), both),
            self._matrix(codes[second], pick(scales, second), both),
            self._matrix(down_codes, down_scales, down),
            pick(bias, first),
            pick(bias, second),
            self._bias(down, expert),
        )

    def _gate_and_up_rows(self) -> tuple[slice, slice]:
        if self.interleaved:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, self.intermediate), slice(self.intermediate, None)

    def _fused_tensors(self, parts: Parts, expert: int) -> tuple[NDArray[Any], NDArray[Any] | None]:
        codes = self._tensor(parts, "codes", expert)
        scales = self._tensor(parts, "scales", expert) if self.format.scale_dtype is not None else None
        if self.transposed:  # (in, out): codes packed along the first axis
            codes, scales = codes.T, None if scales is None else scales.T
        return codes.reshape(codes.shape[0], -1), scales

    def _tensor(self, parts: Parts, role: str, expert: int) -> NDArray[Any]:
        info = parts[self.spelling.tensors[role][0]]
        return self.checkpoint.read(info.name, expert if self.fused else None)

    def _matrix(self, codes: NDArray[Any], scales: NDArray[Any] | None, parts: Parts) -> Matrix:
        info = parts[self.spelling.tensors["codes"][0]]
        if info.dtype in ("F16", "F32"):  # the bf16 format takes both, rounded
            matrix = self.format.quantize(np.ascontiguousarray(codes, np.float32))
        else:
            factor = _read_global(self.spelling, parts, self.checkpoint)
            matrix = Matrix(self.format, np.ascontiguousarray(codes).view(np.uint8), scales, *factor)
        _check_numbers(matrix, self.spelling, parts)
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


@dataclass(frozen=True)
class QuantizedDense:
    """One quantized matrix outside the experts: a module's weight in a format and spelling."""

    checkpoint: Checkpoint
    module: str
    format: Format
    spelling: Spelling
    parts: Parts

    def check_scales(self) -> None:
        """As `LayerExperts.check_scales`."""
        if "scales" in self.spelling.tensors:
            scales = self.checkpoint.read(self.parts[self.spelling.tensors["scales"][0]].name)
            _check_scales(self.format, self.spelling, self.parts, scales, self.checkpoint)


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

    @property
    def dense_bytes(self) -> int:
        """Bytes of everything that is not experts, unpacked to 16 bits."""
        experts = self.expert_tensors
        total = sum(info.nbytes for name, info in self.checkpoint.tensors.items() if name not in experts)
        for matrix in self.dense:
            codes = matrix.parts[matrix.spelling.tensors["codes"][0]]
            total += codes.nbytes * 16 // matrix.format.bits
        return total

    def check_scales(self, on_checked: Callable[[int], object] = lambda n: None) -> None:
        """Read every scale, of experts and of the dense part, and refuse what is no number.

        on_checked is called with the number of parts just checked, of `scale_parts` in all.
        """
        parts: tuple[LayerExperts | QuantizedDense, ...] = (*self.groups, *self.dense)
        for part in parts:
            part.check_scales()
            on_checked(1)

    @property
    def scale_parts(self) -> int:
        """Layers of experts and quantized matrices of the dense part."""
        return len(self.groups) + len(self.dense)


def _read_global(spelling: Spelling, parts: Parts, checkpoint: Checkpoint) -> tuple[float, bool]:
    """The global scale and whether it divides."""
    role = spelling.tensors.get("global")
    if role is None:
        return 1.0, False
    return float(checkpoint.read(parts[role[0]].name).reshape(-1)[0]), spelling.divides


def _check_scales(fmt: Format, spelling: Spelling, parts: Parts, scales: NDArray[Any], checkpoint: Checkpoint) -> None:
    """Check a matrix of which only the scales are read."""
    flat = scales.reshape(-1, scales.shape[-1])
    codes = np.empty((flat.shape[0], 0), np.uint8)
    _check_numbers(Matrix(fmt, codes, flat, *_read_global(spelling, parts, checkpoint)), spelling, parts)


def _check_numbers(matrix: Matrix, spelling: Spelling, parts: Parts) -> None:
    bad = matrix.format.find_bad(matrix)
    if bad:
        role = "global" if "global" in bad else ("scales" if "scales" in spelling.tensors else "codes")
        info = parts[spelling.tensors[role][0]]
        raise _damaged(info, bad)


def _damaged(info: TensorInfo, what: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name!r}: {what}; the export is damaged, get or make it again",
        file=str(info.file),
        tensor=info.name,
    )
