"""What a checkpoint is and whether it loads here, from headers alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from freetoken.checkpoint.experts import ExpertScan, LayerExperts
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.safetensors import Checkpoint
from freetoken.errors import CheckpointError, FreeTokenError
from freetoken.formats.base import Format
from freetoken.memory import budget
from freetoken.units import format_bytes

logger = logging.getLogger(__name__)

COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
"""Where families keep the number of experts."""

WIDTH_NAME = "moe_intermediate_size"
"""Where families that also have dense layers keep the width of an expert."""

TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
"""Where families keep the number of experts per token in their config."""


@dataclass(frozen=True)
class Inspection:
    """What the headers say. Numbers of experts are 0 when they could not be told; `why` says why it does not load."""

    path: str
    family: str
    tensors: int
    file_bytes: int
    quantization: str = ""
    layers: int = 0
    experts: int = 0
    experts_per_token: int = 0
    hidden: int = 0
    intermediate: int = 0
    formats: tuple[str, ...] = ()
    expert_bytes: int = 0
    bank_bytes: int = 0
    dense_bytes: int = 0
    expert_bytes_per_token: int = 0
    loads: bool = False
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.family}, {self.tensors} tensors, {format_bytes(self.file_bytes)}"]
        if self.experts:
            lines += [
                f"experts    {self.layers} layers of {self.experts}, top {self.experts_per_token}, "
                f"hidden {self.hidden}, width {self.intermediate}",
                f"held as    {', '.join(self.formats)}; the config declares {self.quantization}",
                f"banks      {format_bytes(self.bank_bytes)} ({format_bytes(self.expert_bytes)} per expert), "
                f"dense part {format_bytes(self.dense_bytes)}",
                f"per token  {format_bytes(self.expert_bytes_per_token)} of experts read",
            ]
        lines.append("loads here yes" if self.loads else f"loads here no: {self.why}")
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str], fmt: Format | None = None) -> Inspection:
    """Look at a local folder or GGUF file. fmt: the format its experts would be held in (default: as they are).

    Raises `CheckpointError` when folder, file or a header is damaged; anything else that stands against loading is in
    the answer.
    """
    checkpoint = open_any(path)
    family = checkpoint.text_config.get("model_type")
    known: dict[str, Any] = {
        "path": str(path),
        "family": family if isinstance(family, str) and family.isprintable() else "unknown",
        "tensors": len(checkpoint.tensors),
        "file_bytes": sum(info.nbytes for info in checkpoint.tensors.values()),
    }
    try:
        found = scan_any(checkpoint, fmt)
        known |= _numbers(checkpoint, found, fmt)
        check_config(found)
        require_memory(found, fmt)
    except FreeTokenError as error:
        return Inspection(**known, why=str(error))
    return Inspection(**known, loads=True)


def _numbers(checkpoint: Checkpoint, found: ExpertScan, fmt: Format | None) -> dict[str, Any]:
    first = found.groups[0]
    per_token = experts_per_token(checkpoint.text_config)
    layouts = [group.layout(fmt) for group in found.groups]
    banks, dense = needed_bytes(found, fmt)
    return {
        "quantization": str(found.quantization),
        "layers": len(found.groups),
        "experts": first.n_experts,
        "experts_per_token": per_token,
        "hidden": first.hidden,
        "intermediate": first.intermediate,
        "formats": tuple(dict.fromkeys(_held_as(found, fmt))),
        "expert_bytes": layouts[0].nbytes,
        "bank_bytes": banks,
        "dense_bytes": dense,
        "expert_bytes_per_token": sum(per_token * layout.nbytes for layout in layouts),
    }


def _held_as(found: ExpertScan, fmt: Format | None) -> Iterable[str]:
    for group in found.groups:
        how = f"{group.format.name} ({group.spelled})"
        yield how if fmt is None or fmt is group.format else f"{how}, to become {fmt.name}"


def experts_per_token(config: Mapping[str, Any]) -> int:
    """K from a config, or 0 when no known name is in it."""
    return next((v for name in TOP_K_NAMES if isinstance(v := config.get(name), int)), 0)


def check_config(found: ExpertScan) -> None:
    """Refuse a config that contradicts the experts on disk: how many, how wide, how many of them for a token."""
    config, file = found.checkpoint.text_config, found.checkpoint.config_file

    def refuse(name: str, group: LayerExperts, what: str) -> CheckpointError:
        return CheckpointError(f"{file} says {name} {config[name]}, {group.prefix} has {what}", file=str(file))

    for group in found.groups:
        for name in TOP_K_NAMES:
            if isinstance(config.get(name), int) and not 1 <= config[name] <= group.n_experts:
                raise refuse(name, group, f"{group.n_experts} experts")
        for name in COUNT_NAMES:
            if isinstance(config.get(name), int) and config[name] != group.n_experts:
                raise refuse(name, group, f"{group.n_experts} experts")
        if isinstance(config.get(WIDTH_NAME), int) and config[WIDTH_NAME] != group.intermediate:
            raise refuse(WIDTH_NAME, group, f"experts of width {group.intermediate}")


def needed_bytes(found: ExpertScan, fmt: Format | None = None) -> tuple[int, int]:
    """Bytes of (banks, dense part unpacked to 16 bits); raises `FormatError` when a width does not fit the format."""
    banks = sum(group.layout(fmt).nbytes * group.n_experts for group in found.groups)
    return banks, found.dense_bytes


def require_memory(found: ExpertScan, fmt: Format | None = None, shared: bool = False) -> None:
    """Raise `CapacityError`, naming the limit, when banks and dense part do not fit into what is available.

    Shared banks are pages of a file, which the system drops and reads again when it has to: they are not asked for,
    and a warning tells when they are too large to stay.
    """
    name = found.checkpoint.path.resolve().name
    banks, dense = needed_bytes(found, fmt)
    have = budget.require(dense if shared else banks + dense, what=f"loading {name}")
    if shared and banks + dense > have.available_bytes:
        logger.warning(
            "the shared experts of %s (%s) do not all stay in memory, of which %s is to be had according to %s: they "
            "are read from the disk again and again",
            name,
            format_bytes(banks),
            format_bytes(have.available_bytes),
            have.where,
        )
