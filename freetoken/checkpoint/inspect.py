"""What a checkpoint is and whether it loads here, from headers alone."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from freetoken import settings
from freetoken.checkpoint.experts import ExpertScan, LayerExperts
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.safetensors import Checkpoint
from freetoken.checkpoint.strips import working_bytes
from freetoken.errors import CheckpointError, FreeTokenError
from freetoken.formats.base import Format
from freetoken.formats.record import RecordLayout
from freetoken.memory import budget, guard
from freetoken.memory.mapping import reserved_bytes
from freetoken.units import format_bytes

logger = logging.getLogger(__name__)

COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")
"""Where families keep the number of experts."""

WIDTH_NAME = "moe_intermediate_size"
"""Where families that also have dense layers keep the width of an expert."""

TOP_K_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
"""Where families keep the number of experts per token in their config."""

_STRIP_BYTES = 40
"""What quantizing takes beside the matrix for each weight of a strip: measured, the most of all formats is 33."""

_OTHER_THREADS = 5
"""Threads of a load that read no experts: transformers' four, and the guard."""


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
        require_memory(found, fmt, width=_dense_width(checkpoint))
    except FreeTokenError as error:
        return Inspection(**known, why=str(error))
    return Inspection(**known, loads=True)


def _numbers(checkpoint: Checkpoint, found: ExpertScan, fmt: Format | None) -> dict[str, Any]:
    first = found.groups[0]
    per_token = experts_per_token(checkpoint.text_config)
    layouts = [group.layout(fmt) for group in found.groups]
    banks, dense = needed_bytes(found, fmt, _dense_width(checkpoint))
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
    """Refuse a config that contradicts the experts on disk: how many, how wide, how many of them for a token.

    A layer that has what stands beside experts in the others, a router above all, must have experts, too.
    """
    _check_layers(found)
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


def _check_layers(found: ExpertScan) -> None:
    first = found.groups[0].prefix.rpartition(".")[0]
    place = re.fullmatch(r"(.*\.)(\d+)(\..*)?", first)
    if place is None:
        return
    name = re.compile(rf"{re.escape(place[1])}(\d{{1,6}}){re.escape(place[3] or '')}\.((?!experts\.).+)")
    beside: dict[int, set[str]] = {}
    for tensor in found.checkpoint.tensors:
        if tensor not in found.expert_tensors and (match := name.fullmatch(tensor)):
            beside.setdefault(int(match[1]), set()).add(match[2])
    having = {group.layer for group in found.groups}
    router = set.intersection(*(beside.get(layer, set()) for layer in having))
    for layer in sorted(beside.keys() - having):
        if router and router <= beside[layer]:
            example = f"{place[1]}{layer}{place[3] or ''}.{min(router)}"
            path = found.checkpoint.path
            raise CheckpointError(
                f"{path}: layer {layer} has {example!r} and no experts, other layers have both; the checkpoint is "
                "incomplete, get it again",
                file=str(path),
                tensor=example,
            )


def needed_bytes(found: ExpertScan, fmt: Format | None = None, width: int = 2) -> tuple[int, int]:
    """Bytes of (banks, dense part in numbers of `width` bytes).

    Raises `FormatError` when a width does not fit the format.
    """
    banks = sum(group.layout(fmt).nbytes * group.n_experts for group in found.groups)
    return banks, found.dense_bytes(width)


def transient_bytes(found: ExpertScan, fmt: Format | None = None) -> int:
    """What one thread holds at most beside the banks while it brings an expert from the file into its record.

    What permuting takes, if that is all that is to be done; and what reading and packing takes where it is not, or
    where a number looked damaged: the expert's tensors; once and a half times these or the record, whichever is larger,
    where gate and up are parted and put in order, or new matrices are made and go into tiles; and strips of numbers in
    fp32.
    """

    def of(group: LayerExperts) -> int:
        layout, source = group.layout(fmt), group.nbytes // group.n_experts
        permuting = working_bytes(layout) if layout.format is group.format else 0
        return permuting + source + packing_bytes(layout, source)

    return max(of(group) for group in found.groups)


def packing_bytes(layout: RecordLayout, source: int) -> int:
    """What one thread holds at most while it makes a record of an expert of so many bytes, beside these."""
    strip = max(layout.format.strip_rows(k) * k for k in (layout.hidden, layout.intermediate))
    return 3 * max(source, layout.nbytes) // 2 + strip * _STRIP_BYTES


def require_memory(
    found: ExpertScan,
    fmt: Format | None = None,
    shared: bool = False,
    width: int = 2,
    threads: int = 1,
    pieces: int = 1,
) -> int:
    """Return how many threads may read experts at once: `threads`, or fewer where memory is short.

    Shared banks are pages of a file, which the system drops and reads again when it has to: they are not asked for,
    and a warning tells when they are too large to stay. width: bytes of a number of the dense part. pieces: in how many
    a bank is cut. Raises `CapacityError`, naming the limit, when what is available does not suffice for one thread.
    """
    name = found.checkpoint.path.resolve().name
    banks, dense = needed_bytes(found, fmt, width)
    per_thread = 0 if shared else transient_bytes(found, fmt)
    layers = [group.layout(fmt).nbytes * group.n_experts for group in found.groups]
    reserved = 0 if shared else reserved_bytes(nbytes // pieces for nbytes in layers for _ in range(pieces))
    files = sum(file.stat().st_size for file in found.dense_files)

    def need(n: int) -> budget.Need:
        return budget.Need(
            banks=0 if shared else banks,
            reserved=reserved,
            dense=dense,
            transient=n * per_thread,
            pinned=banks if settings.MLOCK.read() == "on" else 0,
            mapped=files,
            threads=n + _OTHER_THREADS,
            spare=guard.min_available_bytes(),
        )

    readers = choose_threads(need, threads, what=f"loading {name}")
    have = budget.available()
    if shared and banks + dense > have.available_bytes:
        logger.warning(
            "the shared experts of %s (%s) do not all stay in memory, of which %s is to be had according to %s: they "
            "are read from the disk again and again",
            name,
            format_bytes(banks),
            format_bytes(have.available_bytes),
            have.where,
        )
    return readers


def choose_threads(need: Callable[[int], budget.Need], threads: int, *, what: str) -> int:
    """As many of so many threads as memory allows, given what n of them need; raises as `budget.choose`."""
    chosen = budget.choose({n: need(n) for n in range(max(1, threads), 0, -1)}, what=what)
    if chosen < threads:
        logger.warning(
            "memory is short: experts are read with %d of %d threads, each of which takes up to %s",
            chosen,
            threads,
            format_bytes(need(1).transient),
        )
    return chosen


def _dense_width(checkpoint: Checkpoint) -> int:
    """Bytes of a number of the dense part, as the config would have it."""
    return 4 if checkpoint.text_config.get("dtype", checkpoint.text_config.get("torch_dtype")) == "float32" else 2
