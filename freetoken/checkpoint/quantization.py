"""What a checkpoint's config declares about quantization: method, format of quantized weights, what is left alone.

Dialects: none, `quant_method: mxfp4` (gpt-oss), compressed-tensors (`config_groups`), and ModelOpt (`quant_algo`, in
config.json or in the sidecar hf_quant_config.json). Anything else is refused by name, never taken for bf16.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from freetoken.checkpoint.safetensors import Checkpoint
from freetoken.errors import CheckpointError

_MODELOPT = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4"}
_COMPRESSED_TENSORS = {"nvfp4-pack-quantized": "nvfp4", "mxfp4-pack-quantized": "mxfp4", "dense": "bf16"}


@dataclass(frozen=True)
class Quantization:
    """Declared quantization. method: "none", "mxfp4", "compressed-tensors" or "modelopt".

    formats: format names that quantized modules may have. ignored: patterns of modules that are not quantized:
    a name, a shell pattern, or "re:" and a regular expression.
    """

    method: str
    formats: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    source: str = "config.json"

    def ignores(self, module: str) -> bool:
        """Whether the config says that this module is left unquantized."""
        return any(_matches(pattern, module) for pattern in self.ignored)

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
        return Quantization("none", ("bf16",))
    if not isinstance(section, dict):
        raise _error(
            checkpoint, "config.json", f"quantization_config is a {type(section).__name__}, expected an object"
        )
    method = section.get("quant_method")
    if method == "mxfp4":
        return Quantization("mxfp4", ("mxfp4",), _names(section.get("modules_to_not_convert")))
    if method == "compressed-tensors":
        return _from_compressed_tensors(checkpoint, section)
    if method == "modelopt":
        return _from_modelopt(checkpoint, section, section.get("ignore"), "config.json")
    raise _error(
        checkpoint,
        "config.json",
        f"quant_method {method!r} is not supported; supported: compressed-tensors, modelopt, mxfp4",
    )


def _from_compressed_tensors(checkpoint: Checkpoint, section: Mapping[str, Any]) -> Quantization:
    groups = section.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _error(checkpoint, "config.json", "compressed-tensors quantization_config has no config_groups")
    formats = []
    for name, group in groups.items():
        written = group.get("format") or section.get("format") if isinstance(group, dict) else None
        if not isinstance(written, str) or written not in _COMPRESSED_TENSORS:
            raise _error(
                checkpoint,
                "config.json",
                f"{name} has compressed-tensors format {written!r}, which is not supported; supported: "
                + ", ".join(_COMPRESSED_TENSORS),
            )
        formats.append(_COMPRESSED_TENSORS[written])
    return Quantization("compressed-tensors", tuple(dict.fromkeys(formats)), _names(section.get("ignore")))


def _from_sidecar(checkpoint: Checkpoint) -> Quantization:
    assert checkpoint.sidecar is not None
    section = checkpoint.sidecar.get("quantization")
    if not isinstance(section, dict):
        raise _error(checkpoint, "hf_quant_config.json", "it has no section named quantization")
    return _from_modelopt(checkpoint, section, section.get("exclude_modules"), "hf_quant_config.json")


def _from_modelopt(checkpoint: Checkpoint, section: Mapping[str, Any], ignored: Any, source: str) -> Quantization:
    algorithm = section.get("quant_algo")
    if algorithm is None and source == "hf_quant_config.json":
        return Quantization("none", ("bf16",), source=source)
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT:
        raise _error(
            checkpoint, source, f"quant_algo {algorithm!r} is not supported; supported: {', '.join(_MODELOPT)}"
        )
    return Quantization("modelopt", (_MODELOPT[algorithm],), _names(ignored), source)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, list) else ()


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return module == pattern or module.startswith(pattern + ".") or fnmatch.fnmatchcase(module, pattern)


def _error(checkpoint: Checkpoint, source: str, what: str) -> CheckpointError:
    file = checkpoint.path / source
    return CheckpointError(f"{file}: {what}", file=str(file))
