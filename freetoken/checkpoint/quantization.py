"""What a checkpoint's config declares about quantization: how each module is held, and what is left alone.

Dialects: none; `quant_method: mxfp4` (gpt-oss); `quant_method: fp8` (transformers, DeepSeek), with `expert_dtype: fp4`
for DeepSeek-V4; compressed-tensors (`config_groups`); and ModelOpt (`quant_algo`, in config.json or in the sidecar
hf_quant_config.json, one for all or one per module). Anything else is refused by name, never taken for bf16.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as shown
from typing import Any

from freetoken.checkpoint.patterns import match_any, plain_name
from freetoken.checkpoint.safetensors import Checkpoint
from freetoken.errors import CheckpointError
from freetoken.formats.base import ScaleBlock


@dataclass(frozen=True)
class Scheme:
    """How some modules are held: a format's name, and the weights that share a scale where the config chooses that."""

    format: str
    block: ScaleBlock | None = None

    def __str__(self) -> str:
        return self.format


PLAIN = Scheme("bf16")
_EVERY = "Linear"
_PER_TENSOR, _PER_ROW = (0, 0), (1, 0)
_LARGEST_BLOCK = 1 << 20
_MODELOPT = {
    "NVFP4": Scheme("nvfp4"),
    "W4A16_NVFP4": Scheme("nvfp4"),
    "FP8": Scheme("fp8_block", _PER_TENSOR),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("fp8_block", _PER_ROW),
}
_COMPRESSED_TENSORS = {
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "float-quantized": "fp8_block",
    "naive-quantized": "fp8_block",
    "dense": "bf16",
}
_FIXED: dict[str, dict[str, Any]] = {
    "nvfp4": {"num_bits": 4, "type": "float", "group_size": 16, "symmetric": True},
    "mxfp4": {"num_bits": 4, "type": "float", "group_size": 32, "symmetric": True},
}
"""What a config may only say so of formats whose blocks it does not choose."""
_SUPPORTED = "compressed-tensors, fp8, modelopt, mxfp4"


@dataclass(frozen=True)
class Quantization:
    """Declared quantization. method: "none", "mxfp4", "fp8", "compressed-tensors" or "modelopt".

    groups: patterns of modules and the scheme they have, the first that matches counts; "Linear" is every other module.
    ignored: patterns of modules that are not quantized. named: modules whose scheme is given by their full name; no
    other is quantized then.
    """

    method: str
    groups: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignored: tuple[str, ...] = ()
    source: str = "config.json"
    named: Mapping[str, Scheme] = field(default_factory=dict)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of formats that some module is declared to have."""
        return tuple(dict.fromkeys(scheme.format for scheme in self.schemes))

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """What some module is declared to be."""
        return tuple(dict.fromkeys([scheme for _, scheme in self.groups] + list(self.named.values())))

    def schemes_of(self, modules: Iterable[str]) -> tuple[Scheme, ...]:
        """The schemes that these modules may have by the config, the most specific first."""
        return tuple(dict.fromkeys(scheme for module in modules for scheme in self._schemes_of(module)))

    def _schemes_of(self, module: str) -> tuple[Scheme, ...]:
        if self.ignores(module):
            return (PLAIN,)
        if self.named:
            return (self.named.get(plain_name(module), PLAIN),)
        for patterns, scheme in self.groups:
            if match_any((pattern for pattern in patterns if pattern != _EVERY), module):
                return (scheme,)
        return tuple(scheme for patterns, scheme in self.groups if _EVERY in patterns) or (PLAIN,)

    def ignores(self, module: str) -> bool:
        """Whether the config says that this module is left unquantized."""
        return match_any(self.ignored, module)

    def __str__(self) -> str:
        return self.method if self.method == "none" else f"{self.method} ({', '.join(self.formats)})"


def declared(checkpoint: Checkpoint) -> Quantization:
    """The quantization a checkpoint declares; raises `CheckpointError` naming what is unknown."""
    section: Any = checkpoint.config.get("quantization_config")
    if section is None:
        section = checkpoint.text_config.get("quantization_config")
    if section is None and checkpoint.sidecar is not None:
        return _from_sidecar(checkpoint)
    if section is None:
        return Quantization("none", for_all(PLAIN))
    if not isinstance(section, dict):
        raise _error(
            checkpoint, "config.json", f"quantization_config is a {type(section).__name__}, expected an object"
        )
    found = _from_section(checkpoint, section)
    if checkpoint.sidecar is not None:
        other = _from_sidecar(checkpoint)
        if set(other.formats) != set(found.formats):
            raise _error(
                checkpoint,
                "hf_quant_config.json",
                f"it declares {other}, config.json declares {found}: remove one of them",
            )
    return found


def _from_section(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Quantization:
    method = section.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4", for_all(Scheme("mxfp4")), _names(section.get("modules_to_not_convert")))
    if method == "fp8":
        return _from_fp8(checkpoint, section)
    if method == "compressed-tensors":
        return _from_compressed_tensors(checkpoint, section)
    if method == "modelopt":
        return _from_modelopt(checkpoint, section, section.get("ignore"), "config.json")
    raise _error(checkpoint, "config.json", f"quant_method {shown(method)} is not supported; supported: {_SUPPORTED}")


def _from_fp8(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Quantization:
    written = section.get("fmt")
    if written not in (None, "e4m3"):
        raise _error(
            checkpoint, "config.json", f"fp8 has fmt {shown(written)}, which is not supported; supported: e4m3"
        )
    block = section.get("weight_block_size")
    scheme = Scheme("fp8_block", _PER_TENSOR if block is None else _block(checkpoint, block, "weight_block_size"))
    groups = for_all(scheme)
    expert_dtype = checkpoint.text_config.get("expert_dtype")
    if expert_dtype == "fp4":
        groups = ((("*.experts.*",), Scheme("ds_fp4")), *groups)
    elif expert_dtype not in (None, "fp8"):
        found = shown(expert_dtype)
        raise _error(checkpoint, "config.json", f"expert_dtype {found} is not supported; supported: fp4, fp8")
    return Quantization("fp8", groups, _names(section.get("modules_to_not_convert")))


def _from_compressed_tensors(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Quantization:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _error(checkpoint, "config.json", "compressed-tensors quantization_config has no config_groups")
    for key in ("transform_config", "sparsity_config"):  # weights that are rotated, or stored without their zeros
        if section.get(key) and not (isinstance(section[key], dict) and section[key].get("format") == "dense"):
            raise _error(checkpoint, "config.json", f"{key} {shown(section[key])} is not supported; supported: none")
    found = []
    for name, group in groups.items():
        written = group.get("format") or section.get("format") if isinstance(group, dict) else None
        if not isinstance(written, str) or written not in _COMPRESSED_TENSORS:
            raise _error(
                checkpoint,
                "config.json",
                f"{name} has compressed-tensors format {shown(written)}, which is not supported; supported: "
                + ", ".join(_COMPRESSED_TENSORS),
            )
        fmt = _COMPRESSED_TENSORS[written]
        block = _block_of_group(checkpoint, name, group.get("weights")) if fmt == "fp8_block" else None
        _check_fixed(checkpoint, "config.json", f"{name}: ", fmt, group.get("weights"))
        found.append((_targets(group.get("targets")), Scheme(fmt, block)))
    return Quantization("compressed-tensors", tuple(found), _names(section.get("ignore")))


def _check_fixed(checkpoint: Checkpoint, source: str, where: str, fmt: str, said: Any) -> None:
    """Refuse numbers that contradict the format."""
    for key, expected in _FIXED.get(fmt, {}).items():
        value = said.get(key) if isinstance(said, dict) else None
        if value is not None and value != expected:
            raise _error(checkpoint, source, f"{where}{key} is {shown(value)}, {fmt} has {expected}")


def _targets(value: Any) -> tuple[str, ...]:
    """Names of classes stand for every module: headers do not tell classes."""
    names = _names(value) or (_EVERY,)
    return tuple(_EVERY if re.fullmatch(r"[A-Z]\w*", name) else name for name in names)


def _block_of_group(checkpoint: Checkpoint, name: str, weights: Any) -> ScaleBlock:
    """What shares a scale: the whole matrix, a row, a part of a row, or a block."""
    weights = weights if isinstance(weights, dict) else {}
    kind = "".join(v if isinstance(v, str) else shown(v) for v in (weights.get("type"), weights.get("num_bits")))
    strategy = weights.get("strategy")
    if kind != "float8" or strategy not in ("tensor", "channel", "group", "block"):
        raise _error(
            checkpoint,
            "config.json",
            f"{name} has weights of {kind} with strategy {shown(strategy)}, which is not supported; supported: float8 "
            "with strategy tensor, channel, group or block",
        )
    if strategy in ("tensor", "channel"):
        return _PER_TENSOR if strategy == "tensor" else _PER_ROW
    if strategy == "group":
        return _block(checkpoint, [1, weights.get("group_size")], f"{name}: group_size")
    return _block(checkpoint, weights.get("block_structure"), f"{name}: block_structure")


def _block(checkpoint: Checkpoint, value: Any, what: str) -> ScaleBlock:
    if isinstance(value, list) and len(value) == 2 and all(type(v) is int and 0 < v <= _LARGEST_BLOCK for v in value):
        return value[0], value[1]
    raise _error(checkpoint, "config.json", f"{what} is {shown(value)}, expected two positive numbers: rows, columns")


def _from_sidecar(checkpoint: Checkpoint) -> Quantization:
    assert checkpoint.sidecar is not None
    section = checkpoint.sidecar.get("quantization")
    if not isinstance(section, dict):
        raise _error(checkpoint, "hf_quant_config.json", "it has no section named quantization")
    return _from_modelopt(checkpoint, section, section.get("exclude_modules"), "hf_quant_config.json")


def _from_modelopt(checkpoint: Checkpoint, section: Mapping[str, Any], ignored: Any, source: str) -> Quantization:
    algorithm = section.get("quant_algo")
    layers = section.get("quantized_layers")
    if algorithm is None and source == "hf_quant_config.json":
        return Quantization("none", for_all(PLAIN), source=source)
    if algorithm == "MIXED_PRECISION" and isinstance(layers, dict) and layers:
        named = {
            plain_name(module): _modelopt_scheme(checkpoint, source, layer, f"{module}: ")
            for module, layer in layers.items()
        }
        return Quantization("modelopt", (), _names(ignored), source, named)
    return Quantization("modelopt", for_all(_modelopt_scheme(checkpoint, source, section)), _names(ignored), source)


def _modelopt_scheme(checkpoint: Checkpoint, source: str, section: Any, where: str = "") -> Scheme:
    algorithm = section.get("quant_algo") if isinstance(section, dict) else section
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise _error(
            checkpoint,
            source,
            f"{where}quant_algo {shown(algorithm)} is not supported; supported: {', '.join(_MODELOPT)}",
        )
    scheme = _MODELOPT[algorithm]
    _check_fixed(checkpoint, source, where, scheme.format, section)
    return scheme


def for_all(*schemes: Scheme) -> tuple[tuple[tuple[str, ...], Scheme], ...]:
    """The groups of a quantization in which every module may have each of these."""
    return tuple(((_EVERY,), scheme) for scheme in schemes)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _error(checkpoint: Checkpoint, source: str, what: str) -> CheckpointError:
    file = checkpoint.path / source
    return CheckpointError(f"{file}: {what}", file=str(file))
