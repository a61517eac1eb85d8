"""Rows of a table that every step needs: read before it is launched, or while it runs.

gate    ids are known -> fill() reads -> launch -> the graph copies           always right, nothing overlaps
wait    launch -> the graph writes ids and rings -> a worker reads -> the graph waits, takes, copies
                                                     while the layers before run
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from freetoken import settings
from freetoken.device.base import Device, Flag, Stream
from freetoken.duties.duty import Duty
from freetoken.duties.steps import Steps
from freetoken.rows import RowTable


def choose_sync(device: Device, sync: str | None = None) -> str:
    """ "wait" or "gate"; None asks FREETOKEN_PLE_SYNC. auto waits where graphs of the device wait by memory operations.

    Raises `ConfigError` for another word.
    """
    sync = settings.PLE_SYNC.read() if sync is None else settings.PLE_SYNC.check(sync, "sync")
    if sync != "auto":
        return sync
    return "wait" if device.waits.kind == "memory" else "gate"


class StepRows:
    """Where the ids of a step and its rows lie; shared by all graphs that look rows up in this layer.

    shape: (...) of the ids. rows: (..., row_bytes) uint8 and scales: (...) float32, on the device. layer: for messages.
    sync: see `choose_sync`. table: is asked by one step at a time.
    """

    def __init__(
        self, steps: Steps, table: RowTable, shape: Sequence[int], layer: int | None = None, sync: str | None = None
    ) -> None:
        self.steps = steps
        self.layer = layer
        device = steps.device
        self.sync = choose_sync(device, sync)
        self.ids = device.host_tensor(shape, torch.int64)
        self._host_rows = device.host_tensor((*shape, table.row_bytes), torch.uint8)
        self._host_scales = device.host_tensor(shape, torch.float32)
        self.rows = torch.zeros_like(self._host_rows, device=device.torch_device)
        self.scales = torch.zeros_like(self._host_scales, device=device.torch_device)
        self._read = table.stage(self.ids.numpy(), self._host_rows.numpy(), self._host_scales.numpy())

    def fill(self, ids: torch.Tensor) -> None:
        """gate: read the rows of the next step, once all steps before have ended. Raises what the table raises."""
        if self.sync != "gate":
            raise ValueError("rows are read while the step runs: fill belongs to sync='gate'")
        if ids.shape != self.ids.shape or ids.dtype != torch.int64:
            raise ValueError(f"ids are {tuple(ids.shape)} {ids.dtype}, expected {tuple(self.ids.shape)} int64")
        self.steps.drain()
        self.ids.copy_(ids)
        self._read()

    def in_graph(self) -> GraphRows:
        """What one graph does for them; for each graph that is captured, another one."""
        return GraphRows(self, *self.steps.device.flags(2))


class GraphRows:
    """One graph's part: `ask` early in it, `bring` where rows are needed. duty: for `Steps.bind`, None with gate."""

    def __init__(self, rows: StepRows, bell: Flag, answer: Flag) -> None:
        self._rows, self._bell, self._answer = rows, bell, answer
        waits = rows.sync == "wait"
        self.duty = Duty("rows of a table", rows.layer, rows._read, answer, bell) if waits else None

    def ask(self, stream: Stream, ids: torch.Tensor) -> None:
        """wait: put the ids where the worker finds them, and ring. ids: on the device."""
        if self.duty is not None:
            stream.copy(self._rows.ids, ids)
            stream.ring(self._bell)

    def bring(self, stream: Stream) -> None:
        """Rows and scales to the device. The next step's cannot come between: it asks after this copy."""
        if self.duty is not None:
            stream.wait(self._answer)
        stream.copy(self._rows.rows, self._rows._host_rows)
        stream.copy(self._rows.scales, self._rows._host_scales)
