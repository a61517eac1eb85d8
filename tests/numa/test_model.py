"""A model on a machine of several nodes: the same tokens under every policy, and a report that says what is so."""

from __future__ import annotations

import os
from typing import Any

import pytest

from freetoken import topology

pytestmark = pytest.mark.numa

pytest.importorskip("transformers")

REQUESTS = ["auto", "off", "interleave", *[str(n.id) for n in topology.read().nodes if n.memory_bytes][-1:]]
"""auto is shard where there are nodes for it; a load takes long in a guest."""


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[list[int], Any]]:
    """Request -> tokens and report."""
    import freetoken
    from freetoken import demo

    found = {}
    for request in REQUESTS:
        model, tokenizer = freetoken.load(demo.path(), placement=request)
        prompt = tokenizer("It was a dark night, and", return_tensors="pt")
        output = model.generate(**prompt, max_new_tokens=8, do_sample=False)
        found[request] = output[0].tolist(), freetoken.report(model)
    return found


def test_the_same_tokens_under_every_policy(runs: dict[str, tuple[list[int], Any]]) -> None:
    tokens = {request: tokens for request, (tokens, _) in runs.items()}
    assert len(tokens["off"]) > 8
    assert all(found == tokens["off"] for found in tokens.values()), tokens


def test_reports_say_where_pages_lie(runs: dict[str, tuple[list[int], Any]]) -> None:
    machine = topology.read()
    nodes = machine.bank_nodes
    for request, (_, facts) in runs.items():
        print(request, facts.placement, facts.pages_by_node, facts.local_share)
        total = sum(facts.pages_by_node.values())
        assert facts.threads == len(machine.workers())
        if request == "auto" and len(nodes) > 1:
            assert facts.placement.startswith("shard over nodes")
            assert set(facts.pages_by_node) == set(nodes)
            assert facts.local_share == 1.0
        elif request == "interleave" and len(nodes) > 1:
            assert all(facts.pages_by_node[n] == pytest.approx(total / len(nodes), rel=0.02) for n in nodes)
            assert facts.local_share == pytest.approx(1 / len(nodes), rel=0.02)
        elif request.isdigit():
            assert set(facts.pages_by_node) == {int(request)}


def test_the_process_mask_is_as_it_was(runs: dict[str, tuple[list[int], Any]]) -> None:
    assert os.sched_getaffinity(0) == set(topology.read().allowed)
