"""Experts in GGUF files: which tensors they are, and blocks into codes and scales.

Per layer `blk.<L>.ffn_gate_exps.weight`, `ffn_up_exps` and `ffn_down_exps`, all experts in one tensor; gate and up may
be merged into `ffn_gate_up_exps`, gate rows first; gpt-oss has `.bias` beside each. A block type in `BLOCKS` becomes a
format bit for bit. Any other is refused by name, unless a format to re-quantize to is given and gguf can dequantize it.

To add a block type: `from_ggml_blocks` in its format's file, and a line in `BLOCKS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken import formats
from freetoken.checkpoint.experts import ExpertScan, LayerExperts
from freetoken.checkpoint.gguf import GgufCheckpoint, gguf_package
from freetoken.checkpoint.gguf_config import ARCHITECTURES
from freetoken.checkpoint.quantization import Quantization, Scheme, for_all
from freetoken.checkpoint.safetensors import TensorInfo
from freetoken.checkpoint.strips import StoredExpert, StoredRows
from freetoken.errors import CheckpointError, UnsupportedError
from freetoken.formats import mxfp4, q4_0, q8_0
from freetoken.formats.base import Format, Matrix
from freetoken.formats.record import Expert

Bytes = NDArray[np.uint8]
Split = Callable[[Bytes], tuple[Bytes, Any]]
"""Rows of blocks (N, bytes) to codes (N, K * bits / 8) and scales (N, blocks), as a `Matrix` has them."""


def _plain(rows: Bytes) -> tuple[Bytes, None]:
    return np.ascontiguousarray(rows), None


BLOCKS: dict[str, tuple[str, Split]] = {
    "BF16": ("bf16", _plain),
    "MXFP4": ("mxfp4", mxfp4.from_ggml_blocks),
    "Q4_0": ("q4_0", q4_0.from_ggml_blocks),
    "Q8_0": ("q8_0", q8_0.from_ggml_blocks),
}
"""ggml's name of a type -> the format with exactly its values, and how its blocks come apart."""

_ROUNDED = ("F16", "F32")
"""Types that are rounded to bf16 when no format is asked for, as they are from safetensors."""

_ASK = "with expert_format='q8_0' (on the command line --expert-format q8_0)"
"""The next step for types that are no format."""

_EXPERTS = re.compile(r"blk\.(\d{1,9})\.ffn_(gate_up|gate|up|down)_exps\.(weight|bias)")
_SEPARATE, _MERGED = {"gate", "up", "down"}, {"gate_up", "down"}


@dataclass(frozen=True)
class GgufExperts(LayerExperts):
    """The experts of one layer of a GGUF file: projection -> tensor of all experts."""

    weights: Mapping[str, TensorInfo]
    biases: Mapping[str, TensorInfo]

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        return (*self.weights.values(), *self.biases.values())

    @property
    def spelled(self) -> str:
        return f"GGUF {' and '.join(dict.fromkeys(info.dtype for info in self.weights.values()))}"

    @property
    def interleaving(self) -> None:
        return None

    def read(self, expert: int) -> Expert:
        matrices: dict[str, Matrix] = {}
        biases = self._biases(expert)
        for name, info in self.weights.items():
            rows = self.checkpoint.read_bytes(info.name, expert).reshape(info.shape[1], -1)
            for part, taken in self._parts(name):
                matrices[part] = self._matrix(info, rows[taken], expert)
        return Expert(
            matrices["gate"],
            matrices["up"],
            matrices["down"],
            biases.get("gate"),
            biases.get("up"),
            biases.get("down"),
        )

    def _biases(self, expert: int) -> dict[str, NDArray[np.float32]]:
        biases: dict[str, NDArray[np.float32]] = {}
        for name, info in self.biases.items():
            values = _values(info, self.checkpoint.read_bytes(info.name, expert)[None], expert, 0)[0]
            for part, taken in self._parts(name):
                biases[part] = values[taken]
        return biases

    def stored(self, expert: int) -> StoredExpert | None:
        if any(_exact_format(info) is not self.format for info in self.weights.values()):
            return None
        biases = self._biases(expert)
        rows = []
        for name, info in self.weights.items():
            nbytes = info.nbytes // self.n_experts
            for part, taken in self._parts(name):
                start = info.offset + expert * nbytes + (taken.start or 0) * (nbytes // info.shape[1])
                # ggml's blocks are a scale and then codes, those of 4 bits in halves
                rows.append(StoredRows(part, info, start, halves=self.format.bits == 4))
        return StoredExpert(tuple(rows), biases=(biases.get("gate"), biases.get("up"), biases.get("down")))

    def _parts(self, name: str) -> tuple[tuple[str, slice], ...]:
        """Projection and its rows, of a tensor."""
        if name != "gate_up":
            return ((name, slice(None)),)
        return ("gate", slice(0, self.intermediate)), ("up", slice(self.intermediate, None))

    def check_scales(self) -> None:
        """Nothing: scales lie between codes, and reading a file twice to see them first would double the load.

        `read` refuses what is no number.
        """

    def _matrix(self, info: TensorInfo, rows: Bytes, expert: int) -> Matrix:
        fmt = _exact_format(info)
        if fmt is None:
            shape = len(rows), info.shape[2]
            return self.format.quantize_strips(shape, lambda a, b: _values(info, rows[a:b], expert, a))
        codes, scales = BLOCKS[info.dtype][1](rows.reshape(len(rows), -1))
        matrix = Matrix(fmt, codes, scales)
        bad = fmt.find_bad(matrix)
        if bad:
            raise _error(info, f"expert {expert}: {bad}; the file is damaged, get or make it again")
        if fmt is self.format:
            return matrix
        return self.format.quantize_strips(matrix.shape, lambda a, b: matrix.rows(a, b).dequantize())


@dataclass(frozen=True)
class GgufScan(ExpertScan):
    """As every scan, of a GGUF file; its dense part is unpacked by the gguf package."""

    def dense_bytes(self, width: int = 2) -> int:
        return width * sum(math.prod(info.shape) for info in self._dense_tensors())

    @property
    def dense_files(self) -> frozenset[Path]:
        """None: it is read, never mapped."""
        return frozenset()


def scan_gguf(checkpoint: GgufCheckpoint, fmt: Format | None = None) -> GgufScan:
    """Find all experts. fmt: what they will be re-quantized to, so that types without a format of ours may pass.

    Raises `UnsupportedError` for an architecture, `CheckpointError` naming the tensor for anything else that is
    incomplete, unknown, or contradicts the metadata.
    """
    if checkpoint.architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{checkpoint.path}: architecture {checkpoint.architecture!r} is not supported in GGUF files; supported: "
            f"{', '.join(ARCHITECTURES)}",
            feature=checkpoint.architecture,
            available=", ".join(ARCHITECTURES),
        )
    layers: dict[int, dict[tuple[str, str], TensorInfo]] = {}
    others: dict[str, TensorInfo] = {}
    for info in checkpoint.tensors.values():
        found = _EXPERTS.fullmatch(info.name)
        if found:
            layers.setdefault(int(found.group(1)), {})[found.group(2), found.group(3)] = info
        elif "_exps" in info.name:
            raise _error(info, f"({info.dtype} {list(info.shape)}) is claimed by nothing; it is not supported")
        else:
            others.setdefault(info.dtype, info)
    for info in others.values():
        _require_dequantization(info)
    for layer in range(checkpoint.config["num_hidden_layers"]):
        if layer not in layers:
            raise CheckpointError(f"{checkpoint.path}: block {layer} has no experts", file=str(checkpoint.path))
    groups = tuple(_make_group(checkpoint, layer, parts, fmt) for layer, parts in sorted(layers.items()))
    held = tuple(dict.fromkeys(group.format.name for group in groups))
    return GgufScan(
        checkpoint, Quantization("gguf", for_all(*map(Scheme, held)), source=checkpoint.path.name), groups, ()
    )


def dequantize(info: TensorInfo, rows: Bytes) -> NDArray[np.float32]:
    """Rows of bytes (N, bytes of a row) of a tensor to float32 values (N, K), by the gguf package.

    Raises `UnsupportedError` naming the tensor and its type when gguf cannot.
    """
    gguf = gguf_package()
    try:
        values: NDArray[np.float32] = gguf.dequantize(rows, gguf.GGMLQuantizationType[info.dtype])
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{info.file}: tensor {info.name!r} is {info.dtype}, which the gguf package cannot dequantize",
            feature=info.dtype,
        ) from error
    return values


def _make_group(
    checkpoint: GgufCheckpoint, layer: int, parts: Mapping[tuple[str, str], TensorInfo], fmt: Format | None
) -> GgufExperts:
    weights = {name: info for (name, suffix), info in parts.items() if suffix == "weight"}
    biases = {name: info for (name, suffix), info in parts.items() if suffix == "bias"}
    some = next(iter(parts.values()))
    if set(weights) not in (_SEPARATE, _MERGED):
        there = ", ".join(sorted(weights)) or "biases"
        raise _error(some, f"and its neighbours are incomplete: block {layer} has {there} only")
    if biases and set(biases) != set(weights):
        raise _error(some, f"and its neighbours: only {', '.join(sorted(biases))} of block {layer} have a bias")
    down = weights["down"]
    if len(down.shape) != 3 or 0 in down.shape:
        raise _error(down, f"has shape {list(down.shape)}, expected [experts, hidden size, width]")
    experts, hidden, width = down.shape
    rows = {"gate": width, "up": width, "gate_up": 2 * width, "down": hidden}
    for name, info in weights.items():
        expected = (experts, rows[name], width if name == "down" else hidden)
        if info.shape != expected:
            raise _error(info, f"has shape {list(info.shape)}, expected {list(expected)} to fit {down.name!r}")
    for name, info in biases.items():
        if info.shape != (experts, rows[name]):
            raise _error(info, f"has shape {list(info.shape)}, expected {[experts, rows[name]]}")
        if info.dtype not in ("BF16", *_ROUNDED):
            raise _error(info, f"is {info.dtype}, expected a bias in F32, F16 or BF16")
    said = checkpoint.config["hidden_size"]
    if hidden != said:
        raise _error(down, f"has hidden size {hidden}, the metadata say {said}")
    return GgufExperts(
        checkpoint=checkpoint,
        prefix=f"model.layers.{layer}.mlp.experts",
        format=_choose_format(weights, fmt),
        n_experts=experts,
        hidden=hidden,
        intermediate=width,
        bias=bool(biases),
        weights=weights,
        biases=biases,
    )


def _choose_format(weights: Mapping[str, TensorInfo], fmt: Format | None) -> Format:
    """The one format that has exactly their values; else the one asked for; else bf16 for 16 and 32 bits."""
    exact = {name: _exact_format(info) for name, info in weights.items()}
    first = exact["down"]
    if first is not None and set(exact.values()) == {first}:
        return first
    if fmt is None and all(info.dtype in ("BF16", *_ROUNDED) for info in weights.values()):
        return formats.get("bf16")
    for name, info in weights.items():
        if exact[name] is None:
            _require_dequantization(info)
    if fmt is not None:
        return fmt
    for name, info in weights.items():
        if exact[name] is None and info.dtype not in _ROUNDED:
            types = ", ".join([*(kind for kind, (known, _) in BLOCKS.items() if known in formats.names()), *_ROUNDED])
            raise _error(info, f"is {info.dtype}; experts are held from {types}: re-quantize them {_ASK}")
    kinds = ", ".join(f"{name} {info.dtype}" for name, info in weights.items())
    raise _error(weights["down"], f"and its neighbours differ in type ({kinds}): re-quantize them {_ASK}")


def _exact_format(info: TensorInfo) -> Format | None:
    """The format that has exactly the values of a tensor's type, or None."""
    name = BLOCKS.get(info.dtype, ("", _plain))[0]
    return formats.get(name) if name in formats.names() else None


def _require_dequantization(info: TensorInfo) -> None:
    """Raise `UnsupportedError` unless gguf can dequantize a tensor, asked with one block of zeros."""
    dequantize(info, np.zeros((1, _block_bytes(info.dtype)), np.uint8))


def _values(info: TensorInfo, rows: Bytes, expert: int, start: int) -> NDArray[np.float32]:
    """Finite values of rows of an expert; start: the number of the first, for the message."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = dequantize(info, rows)
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        raise _error(info, f"expert {expert}: row {start + bad[0]} holds a NaN or infinite weight; the file is damaged")
    return values


def _block_bytes(dtype: str) -> int:
    gguf = gguf_package()
    nbytes: int = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]][1]
    return nbytes


def _error(info: TensorInfo, what: str) -> CheckpointError:
    return CheckpointError(f"{info.file}: tensor {info.name!r} {what}", file=str(info.file), tensor=info.name)
