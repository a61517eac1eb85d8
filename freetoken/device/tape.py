"""torch operations recorded as they are done, and done again on the same memory: what a captured graph is on a device.

The simulated device's graphs of a model are made of them. As in a real capture, shapes, addresses and decisions of the
host are those of the recording, and an operation that waits for the device's values is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from freetoken.errors import DeviceError

_aten = torch.ops.aten
_WAITS = frozenset(
    getattr(_aten, name)
    for name in (
        "_local_scalar_dense", "_unique2", "equal", "is_nonzero", "item", "masked_select", "nonzero",
        "unique_consecutive", "unique_dim",
    )
)  # fmt: skip
_EMPTY = frozenset(getattr(_aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty"))
_SHAPES = frozenset(
    getattr(_aten, name)
    for name in ("as_strided_", "detach_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
)
"""Change how a tensor looks at its memory, which they did once and for all."""


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what torch computes while it is entered.

    add: gets each operation, to be called when it is to be done again. An operation during which something was added by
    others, such as a layer that puts its parts on the stream itself, is not recorded. added: how many were added.
    Raises `DeviceError` for operations that wait for values.
    """

    def __init__(self, add: Callable[[Callable[[], object]], object], added: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._add, self._added = add, added

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code is run as such: of it, what is left of torch's operations is recorded."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in _WAITS or (packet is _aten.index and _has_mask(args)):
            raise DeviceError(f"{func} waits for values, which a graph that is captured cannot", operation="capture")
        before = self._added()
        out = func(*args, **kwargs)
        if self._added() > before or packet in _EMPTY:
            return out
        given = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        fresh = [_memory(tensor) not in given for tensor in _tensors(out)]
        if any(fresh) or (func._schema.is_mutable and packet not in _SHAPES):

            def again() -> None:
                found = func(*args, **kwargs)
                for tensor, new, is_fresh in zip(_tensors(out), _tensors(found), fresh, strict=True):
                    if is_fresh:
                        tensor.copy_(new)

            self._add(again)
        return out


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _has_mask(args: Any) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in _tensors(args[1:]))
