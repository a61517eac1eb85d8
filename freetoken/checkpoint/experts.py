"""Finds the experts of a checkpoint by the names of its tensors and reads them one by one.

Two namings exist. Separate: `<prefix>.experts.<e>.<projection>.<suffix>`, with gate_proj/up_proj/down_proj or
Mixtral's w1/w3/w2. Fused: `<prefix>.experts.gate_up_proj[_<suffix>]` and `down_proj[_<suffix>]`, all experts in one
tensor. The set of suffixes and their dtypes is the spelling, listed by each format. A tensor below `experts` that
nothing claims is an error, so that no expert is ever partly loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freetoken import formats
from freetoken.checkpoint.quantization import Quantization, declared
from freetoken.checkpoint.safetensors import DTYPES, Checkpoint, TensorInfo
from freetoken.errors import CheckpointError
from freetoken.formats.base import Format, Matrix, Spelling
from freetoken.formats.codes import bf16_to_fp32
from freetoken.formats.record import Expert, RecordLayout

_SEPARATE = re.compile(r"^((?:.*\.)?experts)\.(\d{1,9})\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.(\w+)$")
_FUSED = re.compile(r"^((?:.*\.)?experts)\.(gate_up_proj|down_proj)(?:_(\w+))?$")
_ANY_EXPERT = re.compile(r"(?:^|\.)experts\.")
_ROLE = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_INTERLEAVED_FAMILIES = ("gpt_oss",)
"""Families whose fused gate and up rows alternate; others put all gate rows first."""

Parts = Mapping[str, TensorInfo]
"""Suffix -> tensor, of one matrix."""


@dataclass(frozen=True)
class ExpertGroup:
    """The experts of one layer as a checkpoint holds them.

    `parts` maps (expert or -1 for all, projection) to the tensors of that matrix.
    """

    checkpoint: Checkpoint
    prefix: str
    format: Format
    spelling: Spelling
    n_experts: int
    hidden: int
    intermediate: int
    bias: bool
    fused: bool
    transposed: bool
    interleaved: bool
    parts: Mapping[tuple[int, str], Parts]

    @property
    def layer(self) -> int:
        """The layer's number: the last number in the prefix, or -1."""
        numbers = re.findall(r"\.(\d+)(?=\.)", f".{self.prefix}.")
        return int(numbers[-1]) if numbers else -1

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors on disk."""
        return sum(info.nbytes for parts in self.parts.values() for info in parts.values())

    def layout(self, fmt: Format | None = None) -> RecordLayout:
        """The record these experts have in a format (default: the checkpoint's)."""
        return RecordLayout(fmt or self.format, self.hidden, self.intermediate, self.bias)

    def read(self, expert: int) -> Expert:
        """One expert; raises `CheckpointError` naming file and tensor when a scale or weight is no number."""
        return self._read_fused(expert) if self.fused else self._read_separate(expert)

    def check_scales(self) -> None:
        """Read every scale (not the codes) and refuse NaN, infinite and zero ones, before anything is allocated."""
        if self.format.scale_dtype is None:
            return
        for (expert, _), parts in self.parts.items():
            for e in [expert] if expert >= 0 else range(self.n_experts):
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
        return bf16_to_fp32(bits) if info.dtype == "BF16" else bits.astype(np.float32)


@dataclass(frozen=True)
class QuantizedDense:
    """One quantized matrix outside the experts: a module's weight in a format and spelling."""

    module: str
    format: Format
    spelling: Spelling
    parts: Parts

    def check_scales(self, checkpoint: Checkpoint) -> None:
        """As `ExpertGroup.check_scales`."""
        if "scales" in self.spelling.tensors:
            scales = checkpoint.read(self.parts[self.spelling.tensors["scales"][0]].name)
            _check_scales(self.format, self.spelling, self.parts, scales, checkpoint)


@dataclass(frozen=True)
class ExpertScan:
    """Everything a checkpoint's headers say about its experts and its other quantized matrices."""

    checkpoint: Checkpoint
    quantization: Quantization
    groups: tuple[ExpertGroup, ...]
    dense: tuple[QuantizedDense, ...]

    @cached_property
    def expert_tensors(self) -> frozenset[str]:
        """Names of all tensors that belong to experts."""
        return frozenset(i.name for g in self.groups for parts in g.parts.values() for i in parts.values())

    def check_scales(self) -> None:
        """Read every scale, of experts and of the dense part, and refuse what is no number."""
        for group in self.groups:
            group.check_scales()
        for matrix in self.dense:
            matrix.check_scales(self.checkpoint)


def scan(checkpoint: Checkpoint) -> ExpertScan:
    """Find all experts and quantized matrices from headers alone.

    Raises `CheckpointError` naming file and tensor for anything incomplete, unknown, or contradicting the config.
    """
    quantization = declared(checkpoint)
    by_prefix: dict[str, dict[tuple[int, str], dict[str, TensorInfo]]] = {}
    for info in checkpoint.tensors.values():
        if _ANY_EXPERT.search(info.name) is None:
            continue
        prefix, key, suffix = _parse_name(info)
        same = by_prefix.setdefault(prefix, {}).setdefault(key, {}).setdefault(suffix, info)
        if same is not info:
            raise CheckpointError(
                f"{info.file}: tensors {same.name!r} and {info.name!r} are both the {suffix} of one matrix",
                file=str(info.file),
                tensor=info.name,
            )
    if not by_prefix:
        raise CheckpointError(
            f"{checkpoint.path} has no tensors of experts ({len(checkpoint.tensors)} tensors, "
            f"model_type {checkpoint.config.get('model_type')!r}): not a mixture-of-experts model; "
            "load it with transformers alone",
            file=str(checkpoint.path),
        )
    groups = [_make_group(checkpoint, quantization, prefix, parts) for prefix, parts in by_prefix.items()]
    groups.sort(key=lambda group: (group.layer, group.prefix))
    return ExpertScan(checkpoint, quantization, tuple(groups), tuple(_find_dense(checkpoint, quantization)))


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
        raise CheckpointError(
            f"{info.file}: tensor {info.name!r}: {bad}; the export is damaged, get or make it again",
            file=str(info.file),
            tensor=info.name,
        )


def _parse_name(info: TensorInfo) -> tuple[str, tuple[int, str], str]:
    found = _SEPARATE.match(info.name)
    if found:
        prefix, expert, projection, suffix = found.groups()
        return prefix, (int(expert), _ROLE.get(projection, projection)), suffix
    found = _FUSED.match(info.name)
    if found:
        prefix, projection, suffix = found.groups()
        return prefix, (-1, projection), suffix or "weight"
    raise CheckpointError(
        f"{info.file}: nothing claims the expert tensor {info.name!r} ({info.dtype} {list(info.shape)}); "
        "this naming of experts is not supported",
        file=str(info.file),
        tensor=info.name,
    )


def _make_group(
    checkpoint: Checkpoint, quantization: Quantization, prefix: str, parts: dict[tuple[int, str], dict[str, TensorInfo]]
) -> ExpertGroup:
    fused = any(expert < 0 for expert, _ in parts)
    experts = [-1] if fused else sorted({expert for expert, _ in parts})
    projections = ("gate_up_proj", "down_proj") if fused else ("gate_proj", "up_proj", "down_proj")
    batched = [info.shape[0] for matrix in parts.values() for info in matrix.values() if len(info.shape) > 1]
    count = max(batched, default=0) if fused else len(experts)
    all_experts = experts if fused else range(experts[-1] + 1)
    missing = next(((e, p) for e in all_experts for p in projections if (e, p) not in parts), None)
    mixed = fused and any(expert >= 0 for expert, _ in parts)
    if mixed or missing or not count:
        some = next(iter(next(iter(parts.values())).values()))
        what = "mixes fused and separate experts" if mixed else "has no experts"
        if missing and not mixed:
            what = f"is incomplete: {'it' if fused else f'expert {missing[0]}'} has no {missing[1]}"
        raise CheckpointError(f"{some.file}: {prefix} {what}", file=str(some.file), tensor=some.name)
    fmt, spelling = _spelling_of_group(checkpoint, quantization, prefix, parts)
    shape = _shapes_of_group(checkpoint, prefix, fmt, spelling, parts, fused)
    biases = {("bias" in p) for p in parts.values()}
    if len(biases) > 1:
        some = next(info for p in parts.values() for s, info in p.items() if s == "bias")
        raise CheckpointError(
            f"{some.file}: {prefix}: some matrices have a bias ({some.name!r}) and some have none",
            file=str(some.file),
            tensor=some.name,
        )
    return ExpertGroup(
        checkpoint=checkpoint,
        prefix=prefix,
        format=fmt,
        spelling=spelling,
        n_experts=count,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        bias=biases.pop(),
        fused=fused,
        transposed=shape.transposed,
        interleaved=fused and checkpoint.text_config.get("model_type") in _INTERLEAVED_FAMILIES,
        parts=parts,
    )


def _spelling_of_group(
    checkpoint: Checkpoint, quantization: Quantization, prefix: str, parts: Mapping[tuple[int, str], Parts]
) -> tuple[Format, Spelling]:
    """The one spelling all matrices of a layer share; it must be what the config declares."""
    expected = _expected_formats(quantization, prefix)
    found: tuple[Format, Spelling] | None = None
    for (expert, projection), matrix in parts.items():
        module = prefix if expert < 0 else f"{prefix}.{expert}.{projection}"
        this = match_spelling(module, matrix, expected, f"{quantization.source} declares {quantization}")
        if found is not None and this != found:
            info = next(iter(matrix.values()))
            raise CheckpointError(
                f"{info.file}: {module} is {this[0].name} ({this[1].name}), the matrices before it in this layer are "
                f"{found[0].name} ({found[1].name}); mixed experts in one layer are not supported",
                file=str(info.file),
                tensor=info.name,
            )
        found = this
    assert found is not None
    return found


def _expected_formats(quantization: Quantization, module: str) -> tuple[str, ...]:
    if quantization.method == "none" or quantization.ignores(module) or quantization.ignores(f"{module}.0.gate_proj"):
        return ("bf16",)
    return quantization.formats


def match_spelling(module: str, parts: Parts, expected: Iterable[str], because: str) -> tuple[Format, Spelling]:
    """The format and spelling of one matrix from its suffixes and dtypes.

    expected: names of formats that may occur; because: why, for the message. Raises `CheckpointError` naming the
    tensor, what was found and what was expected.
    """
    candidates = [(formats.get(name), s) for name in expected for s in formats.get(name).spellings]
    for fmt, spelling in candidates:
        if not _complaints(module, parts, spelling):
            return fmt, spelling

    def overlap(candidate: tuple[Format, Spelling]) -> int:
        return len({suffix for suffix, _ in candidate[1].tensors.values()} & parts.keys())

    fmt, spelling = max(candidates, key=overlap)
    info = next(iter(parts.values()))
    raise CheckpointError(
        f"{info.file}: {module}: {_complaints(module, parts, spelling)[0]} ({because}; "
        f"expected {fmt.name} as {spelling.name} writes it)",
        file=str(info.file),
        tensor=info.name,
    )


def _complaints(module: str, parts: Parts, spelling: Spelling) -> list[str]:
    wanted = {suffix: (role, dtypes) for role, (suffix, dtypes) in spelling.tensors.items()}
    out = []
    for suffix, (role, dtypes) in wanted.items():
        if suffix not in parts:
            found = ", ".join(f"{s} {i.dtype}" for s, i in sorted(parts.items()))
            out.append(f"no {role} ({suffix}); found {found}")
        elif parts[suffix].dtype not in dtypes:
            out.append(f"{parts[suffix].name!r} is {parts[suffix].dtype}, expected {' or '.join(dtypes)}")
    for suffix, info in parts.items():
        if suffix not in wanted and suffix not in spelling.optional and suffix != "bias":
            out.append(f"nothing claims {info.name!r} ({info.dtype} {list(info.shape)})")
    return out


@dataclass(frozen=True)
class _Shape:
    hidden: int
    intermediate: int
    transposed: bool


def _shapes_of_group(
    checkpoint: Checkpoint,
    prefix: str,
    fmt: Format,
    spelling: Spelling,
    parts: Mapping[tuple[int, str], Parts],
    fused: bool,
) -> _Shape:
    """H, I and the orientation from the first expert; every other tensor must agree."""
    suffix = spelling.tensors["codes"][0]
    per_code = {16: 1, 8: 1, 4: 2}[fmt.bits]
    first = min(expert for expert, _ in parts)
    if not fused:
        rows, width = _two(parts[first, "gate_proj"][suffix])
        shape = _Shape(width * per_code, rows, False)
    else:
        shape = _fused_shape(parts[-1, "gate_up_proj"][suffix], parts[-1, "down_proj"][suffix], per_code)
    h, i = shape.hidden, shape.intermediate
    rows_of = {"gate_proj": (i, h), "up_proj": (i, h), "down_proj": (h, i), "gate_up_proj": (2 * i, h)}
    lead = parts[first, "gate_up_proj"][suffix].shape[:1] if fused else ()
    for (_expert, projection), matrix in parts.items():
        n, k = rows_of[projection]
        for role, (part, _) in spelling.tensors.items():
            _check_shape(matrix[part], role, n, k, fmt, shape.transposed, lead)
        if "bias" in matrix and matrix["bias"].shape != (*lead, n):
            raise _shape_error(matrix["bias"], f"{[*lead, n]}")
    expected = checkpoint.text_config.get("hidden_size")
    if isinstance(expected, int) and expected != h:
        info = parts[first, "down_proj"][suffix]
        raise CheckpointError(
            f"{info.file}: {prefix} has hidden size {h}, config.json says hidden_size {expected}",
            file=str(info.file),
            tensor=info.name,
        )
    return shape


def _fused_shape(gate_up: TensorInfo, down: TensorInfo, per_code: int) -> _Shape:
    """Both orientations cannot fit at once: one needs rows = 2 * width of the other matrix, the other the reverse."""
    if len(gate_up.shape) == 4:  # blocks: [E, rows, blocks, bytes]
        a, b = gate_up.shape[1], gate_up.shape[2] * gate_up.shape[3] * per_code
        return _Shape(b, a // 2, False)
    if len(gate_up.shape) != 3 or len(down.shape) != 3:
        raise _shape_error(gate_up, "[experts, rows, width]")
    (_, a, b), (_, c, d) = gate_up.shape, down.shape
    if b == 2 * c * per_code and a * per_code == d:
        return _Shape(a * per_code, b // 2, True)
    if a == 2 * d * per_code and b * per_code == c:
        return _Shape(c, a // 2, False)
    raise _shape_error(gate_up, f"a fused gate and up that fits {down.name!r} {list(down.shape)}")


def _check_shape(
    info: TensorInfo, role: str, n: int, k: int, fmt: Format, transposed: bool, lead: tuple[int, ...] = ()
) -> None:
    """lead: the dimension of experts before a fused tensor's own."""
    if role == "global":
        if info.nbytes != 4:
            raise _shape_error(info, "one number")
        return
    if role == "scales" and k % fmt.block:
        raise _shape_error(info, f"a width that is a multiple of {fmt.block}; rows have {k} weights")
    elements = k * fmt.bits // (8 * np.dtype(DTYPES[info.dtype]).itemsize) if fmt.bits < 16 else k
    width = elements if role == "codes" else k // fmt.block
    shape = info.shape
    if lead and role == "codes" and len(shape) == 4:  # blocks: [experts, rows, blocks, bytes]
        shape = (*shape[:-2], shape[-2] * shape[-1])
    expected = (*lead, width, n) if transposed else (*lead, n, width)
    if shape != expected:
        raise _shape_error(info, f"{list(expected)} for {n} rows of {k} weights")


def _two(info: TensorInfo) -> tuple[int, int]:
    if len(info.shape) != 2:
        raise _shape_error(info, "[rows, width]")
    return info.shape[0], info.shape[1]


def _shape_error(info: TensorInfo, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, expected {expected}",
        file=str(info.file),
        tensor=info.name,
    )


def _find_dense(checkpoint: Checkpoint, quantization: Quantization) -> Iterator[QuantizedDense]:
    """Quantized matrices outside the experts; a plain weight where the config declares a format is accepted.

    Tools leave attention or single layers unquantized without always listing them, and a plain weight is complete by
    itself; what must not pass is a packed weight without its scales.
    """
    suffixes = {s for name in formats.names() for sp in formats.get(name).spellings for s, _ in sp.tensors.values()}
    suffixes |= {s for name in formats.names() for sp in formats.get(name).spellings for s in sp.optional}
    modules: dict[str, dict[str, TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        module, _, suffix = info.name.rpartition(".")
        if suffix in suffixes and _ANY_EXPERT.search(info.name) is None:
            modules.setdefault(module, {})[suffix] = info
    for module, parts in modules.items():
        if set(parts) == {"weight"} and parts["weight"].dtype in ("BF16", "F16", "F32"):
            continue
        because = f"{quantization.source} declares {quantization}"
        fmt, spelling = match_spelling(module, parts, quantization.formats, because)
        n, k = _two(parts[spelling.tensors["codes"][0]])
        k = k * 8 // fmt.bits
        for role, (suffix, _) in spelling.tensors.items():
            _check_shape(parts[suffix], role, n, k, fmt, transposed=False)
        yield QuantizedDense(module, fmt, spelling, parts)
