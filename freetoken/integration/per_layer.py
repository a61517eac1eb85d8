"""An embedding of the last tokens that is added into a layer: rows of a table, scaled, side by side, projected.

It works with any `RowTable`, so a table on disk and one in memory give the same bits. How a published model weighs and
norms what it adds is its own matter: this is the look-up and a projection.
"""

from __future__ import annotations

import torch

from freetoken.errors import ConfigError
from freetoken.rows import MemoryRowTable, NgramHash, RowTable
from freetoken.rows.base import Bytes

DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
"""What rows may hold: safetensors' words and torch's dtypes."""


class PerLayerEmbedding(torch.nn.Module):
    """Adds to each token's hidden state the projected rows of its bigrams and trigrams.

    The two tokens before are passed in and returned, not kept: (B, 2), the older one first, `start` where texts begin.
    """

    def __init__(self, table: RowTable, ngrams: NgramHash, hidden: int) -> None:
        """hidden: H. Raises `ConfigError` where the hash asks for rows that the table does not have, or not numbers."""
        super().__init__()
        if ngrams.rows > table.rows:
            raise ConfigError(
                f"the hash asks for {ngrams.rows} rows, {table.name} has {table.rows}: they do not belong together",
                name="ngrams",
                value=ngrams.rows,
                expected=f"at most {table.rows} rows",
            )
        if table.dtype not in DTYPES:
            expected = ", ".join(DTYPES)
            raise ConfigError(
                f"{table.name} has rows of {table.dtype}, expected one of {expected}",
                name="dtype",
                value=table.dtype,
                expected=expected,
            )
        self.table = table
        self.ngrams = ngrams
        self.project = torch.nn.Linear(len(ngrams.sizes) * table.width, hidden, bias=False)

    def start(self, batch: int) -> torch.Tensor:
        """What stands before the first tokens of `batch` texts: (B, 2) int64, on the device of the weights."""
        return torch.from_numpy(self.ngrams.start(batch)).to(self.project.weight.device)

    def find_rows(self, tokens: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Rows (B, T, heads) int64 of tokens (B, T), by the same arithmetic as `NgramHash.look_up`, on their device."""
        whole = torch.cat([previous.long(), tokens.long()], dim=-1)  # the hash wraps at 64 bits
        return torch.stack(self.ngrams.heads(whole[..., 2:], whole[..., 1:-1], whole[..., :-2]), dim=-1)

    def look_up(self, rows: torch.Tensor) -> torch.Tensor:
        """The values of rows (..., heads) side by side: (..., heads * width) fp32, on the device of `rows`."""
        ids = rows.cpu().numpy()
        codes = torch.from_numpy(self.table.gather(ids))
        return self.decode(codes, torch.from_numpy(self.table.gather_scales(ids))).to(rows.device)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The values of rows (..., heads, row_bytes) uint8 with scales (..., heads): (..., heads * width) fp32."""
        values = codes.view(DTYPES[self.table.dtype]).float() * scales.unsqueeze(-1)
        return values.flatten(-2)

    def forward(
        self, hidden: torch.Tensor, tokens: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden (B, T, H) with what the tokens (B, T) add, and the two tokens to pass with the next ones."""
        values = self.look_up(self.find_rows(tokens, previous))
        return self.add(hidden, values), torch.cat([previous, tokens], dim=-1)[..., -2:]

    def add(self, hidden: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """hidden (..., H) with values (..., heads * width) projected and added."""
        added: torch.Tensor = self.project(values.to(self.project.weight.dtype))
        return hidden + added.to(hidden.dtype)


def as_table(rows: torch.Tensor, scale: float | torch.Tensor | None = None) -> MemoryRowTable:
    """A table of the rows of a tensor (rows, width) that lies in memory, which is viewed; scale: one, or (rows,) fp32.

    Raises `ConfigError` for a dtype that rows may not have.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    if rows.dtype not in names:
        expected = ", ".join(map(str, names))
        raise ConfigError(
            f"rows are {rows.dtype}, expected one of {expected}", name="rows", value=str(rows.dtype), expected=expected
        )
    if isinstance(scale, torch.Tensor):
        of_rows = MemoryRowTable(_as_bytes(scale.float().reshape(-1, 1)), "F32", name="scales in memory")
        return MemoryRowTable(_as_bytes(rows), names[rows.dtype], of_rows)
    return MemoryRowTable(_as_bytes(rows), names[rows.dtype], scale)


def _as_bytes(rows: torch.Tensor) -> Bytes:
    found: Bytes = rows.contiguous().view(torch.uint8).numpy()
    return found
