"""The report of a loaded model: its numbers follow from the banks it really has."""

import json

import pytest
import torch

import freetoken
from freetoken import demo, info
from freetoken.integration.operator import layer_of
from freetoken.memory.residency import Residency

pytest.importorskip("transformers")


def test_report_adds_up() -> None:
    model, _ = freetoken.load(demo.path(), threads=1)
    facts = freetoken.report(model)
    banks = [layer.bank for module in model.modules() if (layer := layer_of(module))]
    assert facts.layers == len(banks) == 4
    assert facts.bank_bytes == sum(bank.records.nbytes for bank in banks)
    assert facts.formats == ("nvfp4",)
    assert facts.threads == 1
    assert facts.expert_bytes_per_token == 4 * facts.layers * facts.expert_bytes
    text = str(facts)
    for word in ("nvfp4", "top 4", "MiB", "1 threads"):
        assert word in text
    assert json.loads(json.dumps(facts.to_dict()))["experts"] == 16


def test_report_refuses_other_models() -> None:
    with pytest.raises(freetoken.FreeTokenError, match=r"only models from freetoken\.load"):
        freetoken.report(torch.nn.Linear(2, 2))
    with pytest.raises(freetoken.FreeTokenError, match=r"only models from freetoken\.load"):
        freetoken.report(None)


def test_activations_in_force_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_CPU_ACT", "fp8")
    model, _ = freetoken.load(demo.path(), threads=1)
    facts = freetoken.report(model)
    assert facts.activations == ("fp8",)
    assert "with fp8 activations" in str(facts)
    assert "activations fp8" in str(info.collect())


def test_swapped_and_locked_banks_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = freetoken.load(demo.path(), threads=1)
    plain = str(freetoken.report(model))
    assert "swapped" not in plain
    assert "locked" not in plain
    monkeypatch.setattr("freetoken.memory.residency.read", lambda arrays: Residency(len(list(arrays)) << 20, 3 << 20))
    facts = freetoken.report(model)
    assert (facts.swapped_bytes, facts.locked_bytes) == (4 << 20, 3 << 20)
    assert "4.00 MiB of the banks were swapped out" in str(facts)
    assert "3.00 MiB locked" in str(facts)


def test_banks_are_locked_when_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FREETOKEN_MLOCK", "on")
    try:
        model, _ = freetoken.load(demo.path(), threads=1)
    except freetoken.CapacityError as error:
        pytest.skip(str(error))
    facts = freetoken.report(model)
    assert facts.locked_bytes >= facts.bank_bytes
