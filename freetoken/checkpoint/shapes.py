"""Widths of experts from the shapes of their tensors; every tensor must agree with them and with the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from freetoken.checkpoint.experts import Parts, Written
from freetoken.checkpoint.safetensors import DTYPES, Checkpoint, TensorInfo
from freetoken.errors import CheckpointError, FormatError
from freetoken.formats.base import Format

_WIDTHS = ("moe_hidden_size", "moe_latent_size", "hidden_size")
"""Settings for the width that experts work in; the first that is set counts."""


@dataclass(frozen=True)
class ExpertShape:
    """Widths of a layer's experts; transposed: fused tensors are (in, out) rather than (out, in)."""

    hidden: int
    intermediate: int
    transposed: bool


def shape_of_experts(
    checkpoint: Checkpoint,
    prefix: str,
    written: Written,
    parts: Mapping[tuple[int, str], Parts],
    fused: bool,
) -> ExpertShape:
    """H, I and the orientation from the first expert; every other tensor must agree."""
    suffix = written.suffix("codes")
    per_code = {16: 1, 8: 1, 4: 2}[written.format.bits]
    first = min(expert for expert, _ in parts)
    if not fused:
        rows, width = two_dimensions(parts[first, "gate_proj"][suffix])
        shape = ExpertShape(width * per_code, rows, False)
    else:
        shape = _fused_shape(parts[-1, "gate_up_proj"][suffix], parts[-1, "down_proj"][suffix], per_code)
    h, i = shape.hidden, shape.intermediate
    if not h or not i:  # tensors of no bytes could claim any number of experts
        raise _shape_error(next(iter(parts.values()))[suffix], "experts of some width")
    for width in (h, i):
        try:
            written.format.check_scale_block(width, written.block)
        except FormatError as error:
            info = parts[first, "down_proj"][written.suffix("scales")]
            raise CheckpointError(f"{info.file}: {prefix}: {error}", file=str(info.file), tensor=info.name) from error
    rows_of = {"gate_proj": (i, h), "up_proj": (i, h), "down_proj": (h, i), "gate_up_proj": (2 * i, h)}
    lead = parts[first, "gate_up_proj"][suffix].shape[:1] if fused else ()
    alike = set()
    for (_expert, projection), matrix in parts.items():
        n, k = rows_of[projection]
        shapes = (projection, *((suffix, info.dtype, info.shape) for suffix, info in matrix.items()))
        if shapes in alike:
            continue
        alike.add(shapes)
        check_matrix(matrix, written, n, k, shape.transposed, lead)
        if "bias" in matrix and matrix["bias"].shape != (*lead, n):
            raise _shape_error(matrix["bias"], f"{[*lead, n]}")
    check_hidden(checkpoint, prefix, h, parts[first, "down_proj"][suffix])
    return shape


def check_hidden(checkpoint: Checkpoint, prefix: str, hidden: int, info: TensorInfo) -> None:
    """Refuse experts of another hidden size than the config's; info: a tensor of theirs, for the message."""
    config = checkpoint.text_config
    where, expected = next(((n, config[n]) for n in _WIDTHS if config.get(n) is not None), ("", None))
    if isinstance(expected, int) and expected != hidden:
        raise CheckpointError(
            f"{info.file}: {prefix} has hidden size {hidden}, config.json says {where} {expected}",
            file=str(info.file),
            tensor=info.name,
        )


def _fused_shape(gate_up: TensorInfo, down: TensorInfo, per_code: int) -> ExpertShape:
    """Both orientations cannot fit at once: one needs rows = 2 * width of the other matrix, the other the reverse."""
    if len(gate_up.shape) == 4:  # blocks: [E, rows, blocks, bytes]
        a, b = gate_up.shape[1], gate_up.shape[2] * gate_up.shape[3] * per_code
        return ExpertShape(b, a // 2, False)
    if len(gate_up.shape) != 3 or len(down.shape) != 3:
        raise _shape_error(gate_up, "[experts, rows, width]")
    (_, a, b), (_, c, d) = gate_up.shape, down.shape
    if b == 2 * c * per_code and a * per_code == d:
        return ExpertShape(a * per_code, b // 2, True)
    if a == 2 * d * per_code and b * per_code == c:
        return ExpertShape(c, a // 2, False)
    raise _shape_error(gate_up, f"a fused gate and up that fits {down.name!r} {list(down.shape)}")


def check_matrix(
    parts: Parts, written: Written, n: int, k: int, transposed: bool = False, lead: tuple[int, ...] = ()
) -> None:
    """Every tensor of one matrix (n, k); lead: the dimension of experts before a fused tensor's own."""
    for role, (suffix, _) in written.spelling.tensors.items():
        info = parts[suffix]
        if role == "global":
            if info.nbytes != 4:
                raise _shape_error(info, "one number")
        elif role == "scales":
            _check_scales(info, written, n, k, transposed, lead)
        else:
            _check_codes(info, written.format, n, k, transposed, lead)


def _check_codes(info: TensorInfo, fmt: Format, n: int, k: int, transposed: bool, lead: tuple[int, ...]) -> None:
    width = k * fmt.bits // (8 * np.dtype(DTYPES[info.dtype]).itemsize) if fmt.bits < 16 else k
    shape = info.shape
    if lead and len(shape) == 4:  # blocks: [experts, rows, blocks, bytes]
        shape = (*shape[:-2], shape[-2] * shape[-1])
    expected = (*lead, width, n) if transposed else (*lead, n, width)
    if shape != expected:
        raise _shape_error(info, f"{list(expected)} for {n} rows of {k} weights")


def _check_scales(info: TensorInfo, written: Written, n: int, k: int, transposed: bool, lead: tuple[int, ...]) -> None:
    fmt = written.format
    if not fmt.ragged and k % fmt.block:
        raise _shape_error(info, f"a width that is a multiple of {fmt.block}; rows have {k} weights")
    shapes = [
        (*lead, *(reversed(shape) if transposed else shape)) for shape in fmt.stored_scale_shapes(n, k, written.block)
    ]
    if info.shape not in shapes:
        blocks = "" if written.block is None else f" in blocks of {' x '.join(str(b or 'all') for b in written.block)}"
        raise _shape_error(info, f"{list(shapes[0])} for {n} rows of {k} weights{blocks}")


def two_dimensions(info: TensorInfo) -> tuple[int, int]:
    """The shape of a matrix; raises `CheckpointError` when the tensor is none."""
    if len(info.shape) != 2:
        raise _shape_error(info, "[rows, width]")
    return info.shape[0], info.shape[1]


def _shape_error(info: TensorInfo, expected: str) -> CheckpointError:
    return CheckpointError(
        f"{info.file}: tensor {info.name!r} has shape {list(info.shape)}, expected {expected}",
        file=str(info.file),
        tensor=info.name,
    )
