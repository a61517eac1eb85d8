"""Finds experts and quantized matrices by the names, dtypes and shapes in headers, reading no tensor.

Experts are separate, with their number in the name, or fused, all of a layer in one tensor; `_NAMINGS` lists how they
are called. The set of suffixes and their dtypes is the spelling, listed by each format, and it must be what the config
declares. A tensor below `experts` that nothing claims is an error, so that no expert is ever partly loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from reprlib import repr as shown

from freetoken import formats
from freetoken.checkpoint.experts import ExpertGroup, ExpertScan, Parts, QuantizedDense, Written
from freetoken.checkpoint.quantization import Quantization, Scheme, declared
from freetoken.checkpoint.safetensors import Checkpoint, TensorInfo
from freetoken.checkpoint.shapes import check_matrix, shape_of_experts, two_dimensions
from freetoken.errors import CheckpointError, UnsupportedError
from freetoken.formats.base import Spelling

_NAMINGS = [
    re.compile(rf"(?P<at>(?:.*\.)?){pattern}")
    for pattern in (
        r"experts\.(?P<expert>\d{1,9})\.(?P<matrix>gate_proj|up_proj|down_proj|w[123])\.(?P<suffix>\w+)",
        r"experts\.(?P<matrix>gate_up_proj|down_proj)(?:_(?P<suffix>\w+))?",
        r"experts\.(?P<matrix>fc[12])\.(?P<suffix>\w+)",  # Aria
        r"experts\.(?P<matrix>w13|w2)_(?P<suffix>\w+)",  # Inkling
        r"(?<=\bblock_sparse_moe\.)(?P<matrix>(?:in|out)put_linear)\.(?P<suffix>\w+)",  # Granite
    )
]
_ROLE = {
    "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj",
    "fc1": "gate_up_proj", "fc2": "down_proj", "w13": "gate_up_proj",
    "input_linear": "gate_up_proj", "output_linear": "down_proj",
}  # fmt: skip
_SUFFIX = {"scale_inv": "weight_scale_inv"}  # of a fused tensor, which has no `weight` in its name
_ANY_EXPERT = re.compile(r"(?:^|\.)experts\.(?!e_score_correction_bias$|post_expert_norm\.)")
"""Everything below `experts`, but for a router's bias (Laguna) and a norm (Muse Spark), which are the model's."""
_OF_THE_CACHE = ("k_scale", "v_scale", "q_scale", "output_scale")
"""Scales for a quantized key-value cache, which stand beside a projection's weight and are not used."""
_INTERLEAVED_FAMILIES = ("gpt_oss",)
_INTERLEAVED_NAMES = ("w13_",)
"""Families and names whose fused gate and up rows alternate; others put all gate rows first."""


def scan(checkpoint: Checkpoint) -> ExpertScan:
    """Find all experts and quantized matrices from headers alone.

    Raises `CheckpointError` naming file and tensor for anything incomplete, unknown, or contradicting the config.
    """
    quantization = declared(checkpoint)
    by_prefix: dict[str, dict[tuple[int, str], dict[str, TensorInfo]]] = {}
    for info in checkpoint.tensors.values():
        parsed = _parse_name(checkpoint, info)
        if parsed is None:
            continue
        prefix, key, suffix = parsed
        same = by_prefix.setdefault(prefix, {}).setdefault(key, {}).setdefault(suffix, info)
        if same is not info:
            raise CheckpointError(
                f"{info.file}: tensors {same.name!r} and {info.name!r} are both the {suffix} of one matrix",
                file=str(info.file),
                tensor=info.name,
            )
    if not by_prefix:
        raise CheckpointError(
            f"{checkpoint.path} has no tensors of experts under any name known here ({_model_class(checkpoint)}, "
            f"{len(checkpoint.tensors)} tensors): not a mixture-of-experts model, or one that is not supported; "
            "load it with transformers alone",
            file=str(checkpoint.path),
        )
    groups = [_make_group(checkpoint, quantization, prefix, parts) for prefix, parts in by_prefix.items()]
    groups.sort(key=lambda group: (group.layer, group.prefix))
    experts = {i.name for parts in by_prefix.values() for matrix in parts.values() for i in matrix.values()}
    return ExpertScan(checkpoint, quantization, tuple(groups), tuple(_find_dense(checkpoint, quantization, experts)))


def scan_dense(checkpoint: Checkpoint, elsewhere: Container[str]) -> tuple[Quantization, tuple[QuantizedDense, ...]]:
    """What is declared, and the quantized matrices, of a checkpoint whose experts are not tensors like others.

    elsewhere: tensors that are not looked at. Raises `CheckpointError` as `scan` does, and for any tensor of an expert.
    """
    quantization = declared(checkpoint)
    for info in checkpoint.tensors.values():
        if info.name not in elsewhere and _parse_name(checkpoint, info) is not None:
            raise CheckpointError(
                f"{info.file}: tensor {info.name!r} is an expert's, but the experts of {checkpoint.path} are in banks",
                file=str(info.file),
                tensor=info.name,
            )
    return quantization, tuple(_find_dense(checkpoint, quantization, elsewhere))


def _parse_name(checkpoint: Checkpoint, info: TensorInfo) -> tuple[str, tuple[int, str], str] | None:
    """(prefix, (expert or -1 for all, projection), suffix), or None for what is not part of an expert."""
    for naming in _NAMINGS:
        found = naming.fullmatch(info.name)
        if found:
            parts = found.groupdict()
            key = int(parts.get("expert", -1)), _ROLE.get(parts["matrix"], parts["matrix"])
            suffix = parts["suffix"] or "weight"
            return f"{parts['at']}experts", key, _SUFFIX.get(suffix, suffix)
    if _ANY_EXPERT.search(info.name) is None:
        return None
    raise CheckpointError(
        f"{info.file}: nothing claims the expert tensor {info.name!r} ({info.dtype} {list(info.shape)}); "
        f"how {_model_class(checkpoint)} names its experts is not supported",
        file=str(info.file),
        tensor=info.name,
    )


def _model_class(checkpoint: Checkpoint) -> str:
    """What config.json calls the model's class, or its family where it names none."""
    names = checkpoint.config.get("architectures")
    name = names[0] if isinstance(names, list) and names else checkpoint.config.get("model_type")
    return name if isinstance(name, str) else shown(name)


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
    if missing and {projection for _, projection in parts} == {"up_proj", "down_proj"}:
        name = _model_class(checkpoint)
        raise UnsupportedError(f"{name}: {prefix} has no gate; experts without a gate are not supported", feature=name)
    mixed = fused and any(expert >= 0 for expert, _ in parts)
    if mixed or missing or not count:
        some = next(iter(next(iter(parts.values())).values()))
        what = "mixes fused and separate experts" if mixed else "has no experts"
        if missing and not mixed:
            what = f"is incomplete: {'it' if fused else f'expert {missing[0]}'} has no {missing[1]}"
        raise CheckpointError(f"{some.file}: {prefix} {what}", file=str(some.file), tensor=some.name)
    written = _written_as(quantization, prefix, parts)
    shape = shape_of_experts(checkpoint, prefix, written, parts, fused)
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
        format=written.format,
        written=written,
        n_experts=count,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        bias=biases.pop(),
        fused=fused,
        transposed=shape.transposed,
        interleaved=fused and _is_interleaved(checkpoint, parts[-1, "gate_up_proj"]),
        parts=parts,
    )


def _is_interleaved(checkpoint: Checkpoint, gate_up: Parts) -> bool:
    name = next(iter(gate_up.values())).name.rpartition(".")[2]
    return checkpoint.text_config.get("model_type") in _INTERLEAVED_FAMILIES or name.startswith(_INTERLEAVED_NAMES)


def _written_as(quantization: Quantization, prefix: str, parts: Mapping[tuple[int, str], Parts]) -> Written:
    """The one way in which all matrices of a layer are written; it must be what the config declares."""

    def module(expert: int, matrix: Parts) -> str:
        return prefix if expert < 0 else next(iter(matrix.values())).name.rpartition(".")[0]

    first = min(expert for expert, _ in parts)
    some = [module(e, matrix) for (e, _), matrix in parts.items() if e == first]
    schemes = quantization.schemes_of([prefix, f"{prefix}.0.gate_proj"] if first < 0 else some)
    found: Written | None = None
    alike = set()
    for (expert, _), matrix in parts.items():
        suffixes = tuple((suffix, info.dtype) for suffix, info in matrix.items())
        if suffixes in alike:
            continue
        alike.add(suffixes)
        this = match_spelling(module(expert, matrix), matrix, schemes, _because(quantization))
        if found is not None and this != found:
            info = next(iter(matrix.values()))
            raise CheckpointError(
                f"{info.file}: {module(expert, matrix)} is {this}, the matrices before it in this layer are {found}; "
                "mixed experts in one layer are not supported",
                file=str(info.file),
                tensor=info.name,
            )
        found = this
    assert found is not None
    return found


def _because(quantization: Quantization) -> str:
    return f"{quantization.source} declares {quantization}"


def match_spelling(module: str, parts: Parts, schemes: Iterable[Scheme], because: str) -> Written:
    """How one matrix is written, from its suffixes and dtypes.

    schemes: what it may be; because: why, for the message. Raises `CheckpointError` naming the tensor, what was found
    and what was expected.
    """
    candidates = [
        Written(fmt, spelling, scheme.block)
        for scheme in schemes
        for fmt in (formats.get(scheme.format),)
        for spelling in fmt.spellings
    ]
    for candidate in candidates:
        if not _complaints(module, parts, candidate.spelling):
            return candidate

    def overlap(candidate: Written) -> int:
        return len({suffix for suffix, _ in candidate.spelling.tensors.values()} & parts.keys())

    nearest = max(candidates, key=overlap)
    info = next(iter(parts.values()))
    raise CheckpointError(
        f"{info.file}: {module}: {_complaints(module, parts, nearest.spelling)[0]} ({because}; expected "
        f"{nearest.format.name} as {nearest.spelling.name} writes it)",
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


def _find_dense(
    checkpoint: Checkpoint, quantization: Quantization, experts: Container[str]
) -> Iterator[QuantizedDense]:
    """Quantized matrices of tensors not in `experts`; a plain weight where the config declares a format is accepted.

    Tools leave attention or single layers unquantized without always listing them, and a plain weight is complete by
    itself; what must not pass is a packed weight without its scales.
    """
    spellings = [spelling for name in formats.names() for spelling in formats.get(name).spellings]
    suffixes = {s for spelling in spellings for s in (*(s for s, _ in spelling.tensors.values()), *spelling.optional)}
    modules: dict[str, dict[str, TensorInfo]] = {}
    for info in checkpoint.tensors.values():
        module, _, suffix = info.name.rpartition(".")
        if info.name not in experts and suffix not in _OF_THE_CACHE:
            modules.setdefault(module, {})[suffix] = info
    for module, parts in modules.items():
        known = suffixes & parts.keys()
        if not known or (known == {"weight"} and parts["weight"].dtype in ("BF16", "F16", "F32")):
            continue
        if known == {"scale"}:  # a parameter of that name, as routers have; DeepSeek-V4's stands beside a weight
            continue
        schemes = dict.fromkeys((*quantization.schemes_of([module]), *quantization.schemes))
        written = match_spelling(module, parts, schemes, _because(quantization))
        n, k = two_dimensions(parts[written.suffix("codes")])
        k = k * 8 // written.format.bits
        check_matrix(parts, written, n, k)
        _check_unambiguous(parts, written, schemes, n, k)
        yield QuantizedDense(checkpoint, module, written, {suffix: parts[suffix] for suffix in known})


def _check_unambiguous(parts: Parts, written: Written, schemes: Iterable[Scheme], n: int, k: int) -> None:
    """transformers does not tell which module it unpacks, so another block of other values must have another shape."""
    for scheme in schemes:
        if scheme.format == written.format.name and scheme.block != written.block:
            shape = parts[written.suffix("scales")].shape
            if shape in written.format.stored_scale_shapes(n, k, scheme.block) and math.prod(shape) > 1:
                info = parts[written.suffix("scales")]
                raise CheckpointError(
                    f"{info.file}: tensor {info.name!r} of shape {list(shape)} fits blocks of {written.block} and of "
                    f"{scheme.block}, which the config both declares; such a mixture is not supported",
                    file=str(info.file),
                    tensor=info.name,
                )
