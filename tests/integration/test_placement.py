"""A model under each placement, on any machine: the kernel's calls are stood for, the shards are real."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import freetoken
from freetoken.errors import ConfigError
from freetoken.integration import attach as attaching
from freetoken.integration import transformers as integration
from freetoken.integration.operator import layer_of
from freetoken.memory import _mempolicy
from freetoken.memory.placement import Placement
from freetoken.topology import Topology
from tests.support.mempolicy import FakeKernel

PROMPT = torch.tensor([[1, 5, 17, 33, 60]])
POLICIES: dict[str, tuple[int, ...]] = {"off": (), "interleave": (0, 1), "shard": (0, 1), "node": (1,)}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    return FakeKernel(monkeypatch)


def load(folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> Any:
    """Under a placement as a machine of two nodes would choose it, threads free to run on all of this one."""

    def choose(machine: Topology, workers: tuple[int, ...], request: object) -> Placement:
        teams = tuple(worker % 2 for worker in range(len(workers))) if policy == "shard" else ()
        homes = (0,) * len(workers)
        return Placement(policy, POLICIES[policy], "asked for", homes, teams, {}, True)  # type: ignore[arg-type]

    monkeypatch.setattr(integration, "choose", choose)
    return freetoken.load(folder, **arguments)[0]


def generate(model: Any) -> list[int]:
    output = model.generate(PROMPT, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    tokens: list[int] = output[0].tolist()
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_tokens_under_every_policy(
    tiny: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    found = {policy: generate(load(tiny, policy, monkeypatch, dtype=dtype)) for policy in POLICIES}
    assert len(set(found["off"])) > 8  # no loop that anything would fall into
    assert all(tokens == found["off"] for tokens in found.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_each_bank_is_placed_once(tiny: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    model = load(tiny, policy, monkeypatch)
    layers = [layer for module in model.modules() if (layer := layer_of(module)) is not None]
    one: dict[str, list[tuple[int, tuple[int, ...]]]] = {
        "off": [],
        "interleave": [(_mempolicy.INTERLEAVE, (0, 1))],
        "shard": [(_mempolicy.PREFERRED, (0,)), (_mempolicy.PREFERRED, (1,))],
        "node": [(_mempolicy.PREFERRED, (1,))],
    }
    assert [call[0] for call in kernel.calls] == ["mbind"] * len(one[policy]) * len(layers)
    assert [tuple(call[3:]) for call in kernel.calls] == one[policy] * len(layers)
    placed = [call[1] for call in kernel.calls]
    if placed:
        assert placed == [shard.records.ctypes.data for layer in layers for shard in layer.bank.shards]


def test_the_report_says_where_pages_lie(tiny: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tiny, "shard", monkeypatch)
    plain = load(tiny, "off", monkeypatch)
    starts = {
        shard.records.ctypes.data: number
        for module in model.modules()
        if (layer := layer_of(module)) is not None
        for number, shard in enumerate(layer.bank.shards)
    }

    def locate(pages: Any, nodes: Any) -> None:
        nodes[:] = starts.get(int(pages[0]), -2)

    monkeypatch.setattr(_mempolicy, "locate_pages", locate)
    facts = freetoken.report(model)
    assert facts.placement == "shard over nodes 0, 1 (asked for)"
    assert set(facts.pages_by_node) == {0, 1}
    assert facts.local_share == pytest.approx(0.5, abs=0.2)  # all readers are said to be on node 0
    assert "placement  shard over nodes 0, 1 (asked for): pages " in str(facts)
    assert "% local to their readers" in str(facts)
    assert facts.expert_bytes >= freetoken.report(plain).expert_bytes
    json.dumps(facts.to_dict())
    assert freetoken.report(plain).pages_by_node == {}  # nothing known of its pages


@pytest.mark.parametrize("value", ["yes", True, "1000", 1000])
def test_a_bad_placement_is_refused_before_anything_is_read(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^placement=.* is not one of auto, off, interleave, shard, or a node"):
        freetoken.load(tmp_path / "nothing here", placement=value)


def test_a_bad_setting_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FREETOKEN_CPU_MOE_NUMA", "yes")
    with pytest.raises(ConfigError, match=r"^FREETOKEN_CPU_MOE_NUMA='yes' is not one of auto, off"):
        freetoken.load(tmp_path / "nothing here")


def test_one_node_is_as_before(
    tiny: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) > 1:
        pytest.skip("this machine has several nodes")
    monkeypatch.delenv("FREETOKEN_CPU_MOE_NUMA", raising=False)
    with caplog.at_level(logging.INFO, "freetoken.memory"):
        model = freetoken.load(tiny)[0]
    facts = freetoken.report(model)
    assert kernel.calls == []
    assert len(caplog.records) == 1
    assert facts.placement.startswith("off (")
    assert (facts.pages_by_node, facts.local_share) == ({}, None)


def test_attached_models_are_placed_as_loaded_ones(
    tiny: Path, kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny, "shard", monkeypatch, dtype=torch.float32)
    monkeypatch.setattr(attaching, "choose", integration.choose)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    kernel.calls.clear()
    model = freetoken.attach(stock, placement="shard", expert_format="bf16")
    layers = [layer for module in model.modules() if (layer := layer_of(module)) is not None]
    assert [tuple(call[3:]) for call in kernel.calls] == [(_mempolicy.PREFERRED, (n,)) for n in (0, 1)] * len(layers)
    assert generate(model) == generate(loaded)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"^placement='yes' is not one of"):
        freetoken.attach(stock, placement="yes")
