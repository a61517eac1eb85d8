"""Experts on a device, or in the memory that Triton's interpreter takes for one, and what their products must be."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from freetoken.executor import Activation
from freetoken.formats import Format
from freetoken.formats.record import Expert, RecordLayout
from freetoken.gpu.units import COLUMNS, Units
from freetoken.kernels import reference
from tests.support.experts import make_bank

ACTIVATIONS = {
    "silu": Activation(),
    "silu_limited": Activation("silu_limited", 0.0, 2.0),
    "swiglu_clamped": Activation("swiglu_clamped", 1.702, 7.0),
}
HALF = Activation("swiglu_clamped", 0.0, 3e38)
"""With up rows of zero: exactly gate / 2."""
NUMPY = {torch.float32: np.float32, torch.bfloat16: np.float32, torch.float16: np.float16}
FAR = 5 << 31
"""Addresses are given less this, and this as the offset: arithmetic in 32 bits would lose it."""


def widths(fmt: Format) -> tuple[int, int]:
    """Hidden and intermediate size, as odd as a format takes them: no multiples of a step, nor of 16 where legal."""
    if fmt.ragged:
        return 148, 44
    return (88, 42) if fmt.block < 16 else (fmt.block * 5, fmt.block * 3)


@dataclass(frozen=True)
class Experts:
    """Records on a device and where they lie, less `FAR`."""

    layout: RecordLayout
    bank: NDArray[np.uint8]
    records: torch.Tensor
    address: torch.Tensor

    @staticmethod
    def of(layout: RecordLayout, bank: NDArray[np.uint8], device: torch.device) -> Experts:
        """A bank (E, record_bytes) copied to the device, each record between bytes of 0xff: NaN in most formats."""
        records = torch.full((len(bank), layout.nbytes + 512), 0xFF, dtype=torch.uint8, device=device)
        start = -records.data_ptr() % 64 + 64
        records.view(-1)[start:].unfold(0, layout.nbytes, layout.nbytes + 512)[: len(bank)].copy_(
            torch.from_numpy(bank)
        )
        address = records.data_ptr() + start + torch.arange(len(bank)) * (layout.nbytes + 512)
        return Experts(layout, bank, records, (address - FAR).to(device))

    @staticmethod
    def random(layout: RecordLayout, n_experts: int, device: torch.device) -> Experts:
        """Different experts of gaussian weights."""
        return Experts.of(layout, make_bank(layout, n_experts), device)

    def hidden(self, x: torch.Tensor, ids: NDArray[np.int32], how: Activation) -> NDArray[np.float64]:
        """(B * K, I) float64: hidden values of each route, NaN for ids that are no expert's."""
        rows = np.repeat(x.double().cpu().numpy(), ids.shape[1], axis=0)

        def compute(e: Expert, x: NDArray[np.float64]) -> NDArray[np.float64]:
            gate, up = (x @ self.layout.format.dequantize64(m).T for m in (e.gate, e.up))
            if e.gate_bias is not None and e.up_bias is not None:
                gate, up = gate + e.gate_bias, up + e.up_bias
            return reference.activate(gate, up, how.kind, how.alpha, how.limit)

        return self._each(rows, ids, compute, self.layout.intermediate)

    def output(self, h: NDArray[np.float64], ids: NDArray[np.int32]) -> NDArray[np.float64]:
        """(B * K, H) float64: outputs of each route, given its hidden values, NaN for ids that are no expert's."""

        def compute(e: Expert, h: NDArray[np.float64]) -> NDArray[np.float64]:
            out = h @ self.layout.format.dequantize64(e.down).T
            return out if e.down_bias is None else out + e.down_bias

        return self._each(h, ids, compute, self.layout.hidden)

    def _each(self, rows, ids, compute, width):  # type: ignore[no-untyped-def]
        out = np.full((ids.size, width), np.nan)
        for e in range(len(self.bank)):
            routes = np.flatnonzero(ids.reshape(-1) == e)
            out[routes] = compute(self.layout.unpack(self.bank[e]), rows[routes])
        return out


def make_units(ids: NDArray[np.int32], experts: Experts) -> Units:
    """Units of all routes of experts, in no order, between empty ones; an expert with many routes has several units."""
    address, route = [0], [[-1] * COLUMNS]
    for e in np.random.default_rng(0).permutation(len(experts.bank)):
        routes = np.flatnonzero(ids.reshape(-1) == e).tolist()
        for start in range(0, len(routes), COLUMNS):
            part = routes[start : start + COLUMNS]
            address.append(int(experts.address[e]))
            route.append(part[:1] + [-1] * (COLUMNS - len(part)) + part[1:])
    address.append(0)
    route.append([0] * COLUMNS)
    device = experts.address.device
    return Units(
        torch.tensor(address, dtype=torch.int64, device=device), torch.tensor(route, dtype=torch.int32, device=device)
    )


def check_rows(out: torch.Tensor, wanted: NDArray[np.float64], bound: float) -> None:
    """Assert that rows of NaN in `wanted` are so still, and that the others are within `bound` of their norm."""
    found = out.double().cpu().numpy()
    absent = np.isnan(wanted).all(axis=1)
    assert np.isnan(found[absent]).all(), "rows of routes that are not there were written"
    error = np.linalg.norm(found[~absent] - wanted[~absent], axis=1) / np.linalg.norm(wanted[~absent], axis=1)
    assert (error <= bound).all(), f"error {error}, allowed {bound}"
