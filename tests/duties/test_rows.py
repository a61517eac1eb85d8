"""A small random model with an embedding of its last tokens, decoded as graphs, says what it says eagerly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from freetoken.device.base import Stream, Waits
from freetoken.device.simulated import SimulatedDevice
from freetoken.duties import Steps, Worker
from freetoken.duties.rows import StepRows, choose_sync
from freetoken.errors import ConfigError, RowError, StepError
from freetoken.integration.per_layer import PerLayerEmbedding, as_table
from freetoken.rows import DiskRowTable, NgramHash, RowTable, SafetensorsRows

WIDTH, HIDDEN, VOCABULARY, BATCH, END = 20, 24, 50, 3, 0
NGRAMS = NgramHash.published(1, END, above=200)
N = -(-NGRAMS.rows // 4) * 4
NAME = "ngram_embedding.shard_{i}.weight"


@pytest.fixture
def tables(tmp_path: Path) -> Iterator[dict[str, RowTable]]:
    """The same e4m3 rows, each with a scale of its own."""
    torch.manual_seed(0)
    rows, scales = (torch.randn(N, WIDTH) * 3).to(torch.float8_e4m3fn), torch.rand(N) * 0.1 + 0.01
    tensors = {NAME.format(i=i): part.clone() for i, part in enumerate(rows.split(N // 4))}
    save_file({**tensors, "weight_scale": scales}, tmp_path / "f.safetensors")
    source = SafetensorsRows.of(tmp_path / "f.safetensors", NAME)
    with DiskRowTable.open(source, N, WIDTH, "F8_E4M3", "weight_scale") as disk:
        yield {"memory": as_table(rows, scales), "disk": disk}


class Model:
    """Two layers, the second with the embedding added before; greedy."""

    def __init__(self, table: RowTable) -> None:
        torch.manual_seed(1)
        self.embed = torch.randn(VOCABULARY, HIDDEN)
        self.layers = [torch.randn(HIDDEN, HIDDEN) / HIDDEN**0.5 for _ in range(2)]
        self.head = torch.randn(HIDDEN, VOCABULARY)
        self.rows = PerLayerEmbedding(table, NGRAMS, HIDDEN).requires_grad_(False)
        self.first = torch.tensor([[3], [7], [11]])

    def begin(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.embed[tokens] @ self.layers[0])

    def end(self, hidden: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(hidden @ self.layers[1]) @ self.head).argmax(-1)

    def eager(self, n: int) -> list[list[int]]:
        tokens, previous, found = self.first, self.rows.start(BATCH), []
        for _ in range(n):
            hidden, previous = self.rows(self.begin(tokens), tokens, previous)
            tokens = self.end(hidden)
            found.append(tokens[:, 0].tolist())
        return found


class Decoder:
    """The same as a graph that is launched once for each token."""

    def __init__(self, model: Model, sync: str, seed: int = 0, queue_nodes: int = 4) -> None:
        self.model = model
        self.device = SimulatedDevice(seed, queue_nodes=queue_nodes, preemption=0.05)
        self.worker = Worker("rows")
        self.steps = Steps(self.device, [self.worker], deadline=0)
        self.rows = StepRows(self.steps, model.rows.table, (BATCH, 1, len(NGRAMS.sizes)), layer=1, sync=sync)
        self.tokens, self.previous = model.first.clone(), model.rows.start(BATCH)
        self.hidden = torch.zeros(BATCH, 1, HIDDEN)
        self.ids = torch.zeros(BATCH, 1, len(NGRAMS.sizes), dtype=torch.int64)
        self.found: list[list[int]] = []
        part = self.rows.in_graph()

        def build(stream: Stream) -> None:
            stream.kernel(self.find_rows)
            part.ask(stream, self.ids)
            stream.kernel(lambda: self.hidden.copy_(model.begin(self.tokens)))
            part.bring(stream)
            stream.kernel(self.end)
            stream.ring(self.steps.finished_flag)

        duties = {self.worker: [part.duty]} if part.duty else {}
        self.step = self.steps.bind(self.device.capture(build), duties)

    def find_rows(self) -> None:
        self.ids.copy_(self.model.rows.find_rows(self.tokens, self.previous))

    def end(self) -> None:
        rows = self.model.rows
        self.previous.copy_(torch.cat([self.previous, self.tokens], dim=-1)[..., -2:])
        self.tokens.copy_(self.model.end(rows.add(self.hidden, rows.decode(self.rows.rows, self.rows.scales))))
        self.found.append(self.tokens[:, 0].tolist())

    def run(self, n: int) -> list[list[int]]:
        """wait: two steps in flight, each finds its rows by itself. gate: the host knows the tokens and finds them."""
        number = 0
        for _ in range(n):
            if self.rows.sync == "gate":
                if number:
                    self.steps.wait(number)
                ids = NGRAMS.look_up(self.tokens.numpy(), self.previous.numpy())
                self.rows.fill(torch.from_numpy(ids))
            number = self.steps.launch(self.step)
        self.steps.wait(number)
        return self.found


@pytest.mark.parametrize("queue_nodes", [1, 4, 64])
@pytest.mark.parametrize("sync", ["wait", "gate"])
@pytest.mark.parametrize("place", ["memory", "disk"])
def test_the_same_tokens(tables: dict[str, RowTable], place: str, sync: str, queue_nodes: int) -> None:
    expected = Model(tables["memory"]).eager(40)
    assert len({tuple(tokens) for tokens in expected}) > 5, "the text should vary"
    for seed in range(3):
        decoder = Decoder(Model(tables[place]), sync, seed, queue_nodes)
        assert decoder.run(40) == expected
        decoder.steps.close()


def test_the_embedding_matters(tables: dict[str, RowTable]) -> None:
    nothing = as_table(torch.zeros(N, WIDTH, dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert Model(nothing).eager(40) != Model(tables["memory"]).eager(40)


@pytest.mark.parametrize("sync", ["wait", "gate"])
def test_a_row_that_is_not_there(tables: dict[str, RowTable], sync: str) -> None:
    decoder = Decoder(Model(tables["disk"]), sync)
    decoder.run(2)
    decoder.model.rows.find_rows = lambda tokens, previous: decoder.ids.new_full(decoder.ids.shape, N)  # type: ignore
    if sync == "wait":
        with pytest.raises(StepError, match=r"step 3: layer 1, rows of a table failed: RowError: .* was read") as found:
            decoder.run(1)
        assert isinstance(found.value.__cause__, RowError)
    else:
        with pytest.raises(RowError, match="nothing was read"):
            decoder.rows.fill(torch.full((BATCH, 1, len(NGRAMS.sizes)), N))
    del decoder.model.rows.find_rows
    decoder.run(2)


def test_fill_belongs_to_gate(tables: dict[str, RowTable]) -> None:
    decoder = Decoder(Model(tables["memory"]), "wait")
    with pytest.raises(ValueError, match="fill belongs to sync='gate'"):
        decoder.rows.fill(decoder.ids)


def test_which_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = SimulatedDevice()
    assert choose_sync(device) == choose_sync(device, "wait") == "wait"
    device.waits = Waits("host function", "")
    assert choose_sync(device) == "gate"
    monkeypatch.setenv("FREETOKEN_PLE_SYNC", "wait")
    assert choose_sync(device) == "wait"
    with pytest.raises(ConfigError, match="sync='soon' is not one of auto, wait, gate"):
        choose_sync(device, "soon")


def test_gate_after_a_cancel(tables: dict[str, RowTable]) -> None:
    decoder = Decoder(Model(tables["disk"]), "gate")
    decoder.run(2)
    decoder.steps.cancel()
    decoder.run(2)
    with pytest.raises(ValueError, match=r"ids are \(2,\) torch.int64, expected"):
        decoder.rows.fill(torch.zeros(2, dtype=torch.int64))
