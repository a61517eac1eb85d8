"""`report(model)`: what of a loaded model lies where and what runs it, for people and as a dict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from freetoken.checkpoint.inspect import experts_per_token
from freetoken.errors import FreeTokenError
from freetoken.executor import BoundLayer
from freetoken.integration.operator import AnyLayer, layer_of
from freetoken.memory import residency
from freetoken.memory.placement import Achieved, measure
from freetoken.offload.layer import DeviceLayer
from freetoken.offload.usage import Usage
from freetoken.units import format_bytes


@dataclass(frozen=True)
class Report:
    """Facts about a model's experts. Bytes are of records as they lie in banks.

    shared: banks are files mapped read-only, one copy for all processes that map them. swapped_bytes, locked_bytes: of
    the banks, now. pages_by_node, local_share: what the kernel says of samples of the pages, on a machine where they
    may lie on several nodes; else empty and None. What of the host does not apply where a device holds all experts is
    empty or 0. device: where the dense part and slots are, None for a model on the CPU.
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
    device: Usage | None

    @property
    def slots(self) -> int:
        """Records that the device has room for."""
        return 0 if self.device is None else self.device.slots

    @property
    def hit_rate(self) -> float | None:
        """Share of wanted experts that were in slots; None before any was looked up."""
        return None if self.device is None else self.device.hit_rate

    @property
    def fetched_bytes_per_token(self) -> float | None:
        """Bytes that were fetched into slots for a token; None before any expert was looked up."""
        return None if self.device is None or self.hit_rate is None else self.device.fetched_bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        derived = {name: getattr(self, name) for name in ("slots", "hit_rate", "fetched_bytes_per_token")}
        return asdict(self) | derived

    def __str__(self) -> str:
        cores = ", ".join(map(str, self.cores))
        locked = f", {format_bytes(self.locked_bytes)} locked" if self.locked_bytes else ""
        swapped = (
            f"swapped    {format_bytes(self.swapped_bytes)} of the banks were swapped out and wait for the disk: free "
            "memory, or keep them in with FREETOKEN_MLOCK=on"
        )
        pages = ", ".join(f"{count} on node {node}" for node, count in self.pages_by_node.items())
        share = "" if self.local_share is None else f", {self.local_share:.0%} local to their readers"
        host = [
            f"experts    {', '.join(self.formats)}: {format_bytes(self.bank_bytes)} in "
            f"{'files mapped read-only, shared' if self.shared else 'host banks'}{locked}, "
            f"{format_bytes(self.expert_bytes)} each",
            *([swapped] if self.swapped_bytes else []),
            f"placement  {self.placement}{f': pages {pages}{share}' if pages else ''}",
        ]
        if not self.bank_bytes:
            host = [f"experts    {', '.join(self.formats)}, {format_bytes(self.expert_bytes)} each"]
        runs = (
            f"runs on    {', '.join(self.tiers)} with {', '.join(self.activations)} activations, "
            f"{self.threads} threads on CPUs {cores} ({self.cores_why})"
        )
        return "\n".join(
            [
                f"{self.model}: {self.layers} expert layers of {self.experts} experts, top {self.experts_per_token}, "
                f"hidden {self.hidden}, width {self.intermediate}",
                *host,
                f"per token  {format_bytes(self.expert_bytes_per_token)} of experts read",
                *([runs] if self.device is None else self._device_lines(self.device)),
            ]
        )

    def _device_lines(self, device: Usage) -> list[str]:
        lines = [f"device     {device.device}, strategy {device.strategy}"]
        if device.kernels:
            lines[0] += f", {', '.join(device.kernels)}"
        if device.host_threads:
            lines.append(f"host       {', '.join(self.tiers)}, {device.host_threads} threads")
        if device.slots:
            buffers = f", two buffers of {format_bytes(device.buffer_bytes // 2)}" if device.buffer_bytes else ""
            lines.append(f"slots      {device.slots}, {format_bytes(device.slot_bytes)}{buffers}")
        if device.pinned is not None:
            rate = f"; the link copies {device.link_bps / 1e9:.1f} GB/s" if device.link_bps else ""
            lines.append(f"pinned     {device.pinned}{rate}")
        if self.fetched_bytes_per_token is not None:
            lines.append(
                f"fetched    {format_bytes(round(self.fetched_bytes_per_token))} a token, hit rate {self.hit_rate:.0%}"
            )
        if device.computed_per_token:
            lines.append(
                f"missing    {device.fetched_per_token:.1f} experts a token fetched, {device.computed_per_token:.1f} "
                f"computed on the host; {device.split}"
            )
        if device.waited.count:
            lines.append(
                f"waited     for the host by {device.waits}: {_us(device.waited.mean)} a layer; hand-off "
                f"{_us(device.hand_off.p50)}, p99 {_us(device.hand_off.p99)}; it worked {_us(device.host_work.p50)}"
            )
        if device.streamed_bytes:
            lines.append(f"streamed   {format_bytes(device.streamed_bytes)} for many tokens at once")
        return lines


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def count_statistics(model: Any, on: bool = True, *, reset: bool = False) -> None:
    """Whether what a model on a device looks up, fetches and waits for is counted from now on, as it is at first.

    It is counted on the device, in graphs too, which need not be captured again. reset: count from 0. Without a device
    nothing is counted. Raises `FreeTokenError` for a model that is not ours.
    """
    first = _layers(model)[0]
    if isinstance(first, DeviceLayer):
        first.experts.count(on)
        if reset:
            first.experts.reset_statistics()


def _layers(model: Any) -> list[AnyLayer]:
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    layers = [layer for module in modules if (layer := layer_of(module)) is not None]
    if not layers:
        raise FreeTokenError(f"{type(model).__name__} has no banks: only models from freetoken.load or attach have")
    return layers


def report(model: Any) -> Report:
    """Report on a model from `freetoken.load` or `attach`; raises `FreeTokenError` for any other model."""
    layers = _layers(model)
    per_token = experts_per_token(model.config.get_text_config().to_dict())
    bound = [found for layer in layers if (found := layer.bound) is not None]
    shards = [shard for layer in bound for shard in layer.bank.shards]
    executor, pages, achieved = None, residency.read(shard.records for shard in shards), None
    if bound:
        executor, achieved = bound[0].executor, _measure(bound)
    shared = bool(shards) and all(shard.shared for shard in shards)
    placed = "" if executor is None else str(executor.placement or "off (not chosen)")
    first = layers[0]
    return Report(
        model=type(model).__name__,
        layers=len(layers),
        experts=first.n_experts,
        experts_per_token=per_token,
        hidden=first.layout.hidden,
        intermediate=first.layout.intermediate,
        formats=_distinct(layer.layout.format.name for layer in layers),
        shared=shared,
        bank_bytes=sum(layer.bank.nbytes for layer in bound),
        swapped_bytes=pages.swapped_bytes,
        locked_bytes=pages.locked_bytes,
        expert_bytes=first.expert_bytes,
        expert_bytes_per_token=sum(per_token * layer.expert_bytes for layer in layers),
        tiers=_distinct(_tier(layer) for layer in bound),
        activations=_distinct(layer.choice.act for layer in bound),
        threads=0 if executor is None else len(executor.workers),
        cores=() if executor is None else executor.workers,
        cores_why="" if executor is None else executor.why,
        placement="not placed (the page cache's)" if shared else placed,
        pages_by_node={} if achieved is None else dict(achieved.pages),
        local_share=None if achieved is None else achieved.local_share,
        device=first.experts.usage() if isinstance(first, DeviceLayer) else None,
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
