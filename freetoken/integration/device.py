"""`place`: a model whose experts lie in host banks, its dense part on a device, and a strategy for the experts."""

from __future__ import annotations

import contextlib
import logging
import re
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from freetoken.checkpoint.inspect import experts_per_token
from freetoken.device.base import Device
from freetoken.errors import CapacityError, ConfigError, UnsupportedError
from freetoken.executor import BoundLayer
from freetoken.integration.graph_generate import install
from freetoken.integration.operator import attach_layer, layer_of
from freetoken.integration.quantizer import FreetokenQuantizer
from freetoken.offload.experts import DeviceExperts
from freetoken.offload.room import Asked, Room, choose_room
from freetoken.offload.slots import LayerExperts
from freetoken.units import format_bytes

logger = logging.getLogger(__name__)

_CUDA = re.compile(r"cuda(?::(\d+))?")
_EXPECTED = "'cpu', 'cuda' or 'cuda:N'"


def is_cpu(device: object) -> bool:
    """Whether this means no device."""
    return isinstance(device, str | torch.device) and str(device).strip().lower() == "cpu"


def open_device(name: str | torch.device | Device) -> Device | None:
    """The device of a name, None for the CPU; anything else is taken for one already.

    Raises `ConfigError` for another name, `UnsupportedError` where it cannot be used.
    """
    if is_cpu(name):
        return None
    if not isinstance(name, str | torch.device) and hasattr(name, "torch_device"):
        return name
    match = _CUDA.fullmatch(str(name).strip().lower())
    if match is None:
        raise ConfigError(f"device={name!r} is none of {_EXPECTED}", name="device", value=name, expected=_EXPECTED)
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"device={name!r}: torch {torch.__version__} finds no CUDA device; use device='cpu', or install a torch "
            "for CUDA and its driver",
            feature="cuda",
        )
    from freetoken.device.cuda import CudaDevice

    index = torch.cuda.current_device() if match[1] is None else int(match[1])
    return CudaDevice(index)


def check_asked(device: str | torch.device | Device, asked: Asked) -> None:
    """Raise `ConfigError` for what can be seen to be wrong without a device."""
    if is_cpu(device) and (asked.strategy not in (None, "cpu") or not asked.is_auto):
        raise ConfigError(
            f"strategy={asked.strategy!r} and cache={asked.cache!r} are about a device, and there is none: give "
            "device='cuda'",
            name="strategy",
            value=asked.strategy,
            expected="strategy=None or 'cpu', and no cache, without a device",
        )


def check_room(device: Device, layers: Sequence[LayerExperts], dense_bytes: int, asked: Asked) -> Room:
    """What goes on the device beside the dense part; raises what `choose_room` does. Nothing is allocated."""
    free = device.free_bytes()
    if dense_bytes > free:
        raise _dense_error(device, dense_bytes)
    return choose_room(layers, free - dense_bytes, asked)


def place(
    model: Any,
    device: str | torch.device | Device = "cuda",
    strategy: str | None = None,
    cache: str | float = "auto",
    max_fetch: str | float = "auto",
) -> None:
    """Move a model from `load` or `attach` to a device: its dense part, and for the experts a strategy.

    strategy, cache, max_fetch: see `load`. On an error the model stays as it was, on the CPU. Raises `ConfigError`,
    `UnsupportedError` or `CapacityError`.
    """
    asked = Asked(strategy, cache, max_fetch)
    check_asked(device, asked)
    with opened(device) as target:
        if target is not None:
            move(model, target, asked, owned=target is not device)


@contextlib.contextmanager
def opened(device: str | torch.device | Device) -> Iterator[Device | None]:
    """`open_device`, and closed again on an error if it was opened here."""
    target = open_device(device)
    try:
        yield target
    except BaseException:
        if target is not None and target is not device:
            target.close()
        raise


def move(model: Any, target: Device, asked: Asked, *, owned: bool) -> None:
    """What `place` does. owned: the device is closed with the model."""
    modules = [module for module in model.modules() if layer_of(module) is not None]
    bound = [layer for module in modules if isinstance(layer := layer_of(module), BoundLayer)]
    if not bound or len(bound) < len(modules):
        raise ConfigError(
            f"{type(model).__name__} has {len(modules)} layers of experts, {len(bound)} of them in host banks: place() "
            "takes a model once, as load() or attach() gave it",
            name="model",
            value=type(model),
            expected="a model with experts in host banks",
        )
    top_k = max(1, experts_per_token(model.config.get_text_config().to_dict()))
    shapes = [LayerExperts.of(layer.bank, top_k) for layer in bound]
    dense = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    room = check_room(target, shapes, dense, asked)
    experts = DeviceExperts(target, bound, shapes, room, model.dtype, owns_device=owned)
    try:
        model.to(target.torch_device)
    except BaseException as error:
        experts.close()
        model.to("cpu")
        if isinstance(error, torch.OutOfMemoryError):
            raise _dense_error(target, dense) from error
        raise
    if isinstance(quantizer := getattr(model, "hf_quantizer", None), FreetokenQuantizer):
        quantizer.compiles = False  # a compiled step would be captured, and experts are not, here
    for module, layer in zip(modules, experts.layers, strict=True):
        attach_layer(module, layer)
    install(model, experts)
    weakref.finalize(model, experts.close)
    logger.info("%s: strategy %s, %d slots", target.name, room.strategy, sum(room.slots))


def _dense_error(device: Device, needed: int) -> CapacityError:
    free = device.free_bytes()
    return CapacityError(
        f"the dense part needs {format_bytes(needed)} on {device.name}, where {format_bytes(free)} are free: free some "
        "of it, or use device='cpu'",
        needed=needed,
        available=free,
        where=device.name,
    )
