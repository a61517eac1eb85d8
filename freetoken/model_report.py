"""`report(model)`: what of a loaded model lies where and what runs it, for people and as a dict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from freetoken.checkpoint.inspect import experts_per_token
from freetoken.errors import FreeTokenError
from freetoken.executor import BoundLayer
from freetoken.integration.operator import layer_of
from freetoken.memory import residency
from freetoken.memory.placement import Achieved, measure
from freetoken.units import format_bytes


@dataclass(frozen=True)
class Report:
    """Facts about a model's experts. Bytes are of records as they lie in banks.

    shared: banks are files mapped read-only, one copy for all processes that map them. swapped_bytes, locked_bytes: of
    the banks, now. pages_by_node, local_share: what the kernel says of samples of the pages, on a machine where they
    may lie on several nodes; else empty and None.
    """

    model: str
    layers: int
    experts: int
    experts_per_token: int
    hidden: int
    intermediate: int
    formats: tuple[str, ...]
    shared: bool
    bank_bytes: int
    swapped_bytes: int
    locked_bytes: int
    expert_bytes: int
    expert_bytes_per_token: int
    tiers: tuple[str, ...]
    activations: tuple[str, ...]
    threads: int
    cores: tuple[int, ...]
    cores_why: str
    placement: str
    pages_by_node: dict[int, int]
    local_share: float | None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        cores = ", ".join(map(str, self.cores))
        locked = f", {format_bytes(self.locked_bytes)} locked" if self.locked_bytes else ""
        swapped = (
            f"swapped    {format_bytes(self.swapped_bytes)} of the banks were swapped out and wait for the disk: free "
            "memory, or keep them in with FREETOKEN_MLOCK=on"
        )
        pages = ", ".join(f"{count} on node {node}" for node, count in self.pages_by_node.items())
        share = "" if self.local_share is None else f", {self.local_share:.0%} local to their readers"
        return "\n".join(
            [
                f"{self.model}: {self.layers} expert layers of {self.experts} experts, top {self.experts_per_token}, "
                f"hidden {self.hidden}, width {self.intermediate}",
                f"experts    {', '.join(self.formats)}: {format_bytes(self.bank_bytes)} in "
                f"{'files mapped read-only, shared' if self.shared else 'host banks'}{locked}, "
                f"{format_bytes(self.expert_bytes)} each",
                *([swapped] if self.swapped_bytes else []),
                f"placement  {self.placement}{f': pages {pages}{share}' if pages else ''}",
                f"per token  {format_bytes(self.expert_bytes_per_token)} of experts read",
                f"runs on    {', '.join(self.tiers)} with {', '.join(self.activations)} activations, "
                f"{self.threads} threads on CPUs {cores} ({self.cores_why})",
            ]
        )


def report(model: Any) -> Report:
    """Report on a model from `freetoken.load` or `attach`; raises `FreeTokenError` for any other model."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    layers = [layer for module in modules if (layer := layer_of(module)) is not None]
    if not layers:
        raise FreeTokenError(f"{type(model).__name__} has no banks: only models from freetoken.load or attach have")
    per_token = experts_per_token(model.config.get_text_config().to_dict())
    executor, layout = layers[0].executor, layers[0].bank.layout
    pages = residency.read(shard.records for layer in layers for shard in layer.bank.shards)
    achieved = _measure(layers)
    shared = all(shard.shared for layer in layers for shard in layer.bank.shards)
    return Report(
        model=type(model).__name__,
        layers=len(layers),
        experts=layers[0].bank.n_experts,
        experts_per_token=per_token,
        hidden=layout.hidden,
        intermediate=layout.intermediate,
        formats=_distinct(layer.bank.layout.format.name for layer in layers),
        shared=shared,
        bank_bytes=sum(layer.bank.nbytes for layer in layers),
        swapped_bytes=pages.swapped_bytes,
        locked_bytes=pages.locked_bytes,
        expert_bytes=layers[0].bank.nbytes // layers[0].bank.n_experts,
        expert_bytes_per_token=sum(per_token * layer.bank.nbytes // layer.bank.n_experts for layer in layers),
        tiers=_distinct(_tier(layer) for layer in layers),
        activations=_distinct(layer.choice.act for layer in layers),
        threads=len(executor.workers),
        cores=executor.workers,
        cores_why=executor.why,
        placement="not placed (the page cache's)" if shared else str(executor.placement or "off (not chosen)"),
        pages_by_node={} if achieved is None else dict(achieved.pages),
        local_share=None if achieved is None else achieved.local_share,
    )


def _measure(layers: list[BoundLayer]) -> Achieved | None:
    """Where the banks' pages lie; no question to the kernel where there is one answer."""
    executor = layers[0].executor
    if executor.placement is None or not executor.placement.several:
        return None
    return measure(
        (shard.records, executor.readers(layer.bank, number))
        for layer in layers
        for number, shard in enumerate(layer.bank.shards)
    )


def _tier(layer: BoundLayer) -> str:
    return f"{layer.choice.kernel.level} {layer.bank.layout.format.name} tiles"


def _distinct(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
