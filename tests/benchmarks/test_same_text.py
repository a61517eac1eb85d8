"""The comparison of strategies: it passes where they agree, and says what differs where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import same_text
import torch
import triton

from freetoken.device.simulated import SimulatedDevice
from freetoken.offload.slotted import SlottedExperts
from tests.support.checkpoints import write_qwen3

SMALL = ["--dtype", "float32", "--tokens", "32", "--window", "16", "--steps", "2", "--texts", "1", "--new-tokens", "2"]


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    if not triton.knobs.runtime.interpret:
        pytest.skip("Triton compiles for the GPU here")
    folder = write_qwen3(tmp_path / "m")
    np.savez(tmp_path / "text.npz", tokens=np.arange(2000) * 7 % 60)
    return ["--model", str(folder), "--text", str(tmp_path / "text.npz"), "--cache", "0.5", *SMALL]


def test_equal_strategies(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
    assert same_text.main([*arguments, "--strategy", "cpu", "offload", "hybrid:0.5"], SimulatedDevice()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["no", "cpu", "offload", "hybrid:0.5"]
    assert all("1 of 1 equal" in line for line in lines[3:]) and len({line.split()[-6] for line in lines[3:]}) == 1


def test_a_strategy_that_is_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FREETOKEN_GPU_RESERVE", "0")
    run = SlottedExperts.run

    def wrong(self: Any, number: int, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return run(self, number, x, *rest) * 3

    monkeypatch.setattr(SlottedExperts, "run", wrong)
    assert same_text.main([*arguments, "--strategy", "offload"], SimulatedDevice()) == 1
    assert "FAULT offload: perplexity" in capsys.readouterr().out


def test_faults() -> None:
    one = same_text.Row("no device", 20.0, 21.0, None, 4)
    assert same_text.Row("cpu", 20.0199, 21.0, 21.0, 4, ((3, 0.4),)).faults(one, 0.5) == []
    assert len(same_text.Row("cpu", 20.03, 21.0, 21.0, 4).faults(one, 0.5)) == 1
    assert len(same_text.Row("cpu", 20.0, float("nan"), 21.0, 4, ((3, 0.4), (9, 0.6))).faults(one, 0.5)) == 2
