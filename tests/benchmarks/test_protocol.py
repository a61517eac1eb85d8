"""A side answers as `benchmarks/protocol.py` says, whatever its libraries print; a wrong peer does not run."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from freetoken import formats
from freetoken.formats.record import RecordLayout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ROOT = BENCHMARKS.parent

SIDE = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
from protocol import MissingError, Ready, play

def start(task):
    print("chatter")
    os.write(1, b"more chatter\\n")
    if task.format == "none":
        raise MissingError("no such kernel")
    assert task.options == ("some", "options") and (task.hidden, task.layers, task.threads) == (64, 3, 2)
    return Ready(1234, "a side 1.0", lambda: (3, 0.4))

play(start)
"""


def ask(command: list[object], text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        input=text,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
    )


def ask_side(name: str, text: str) -> subprocess.CompletedProcess[str]:
    return ask(["-c", SIDE, BENCHMARKS, "some", "options", name, 64, 32, 8, 2, 3, 2], text)


def test_answers_are_alone_on_standard_output() -> None:
    done = ask_side("bf16", "run 1\nrun 0.1\n")
    assert done.stdout.splitlines() == ["READY 1234 a side 1.0", "9 1.200000", "3 0.400000"]
    assert done.stderr.splitlines() == ["more chatter", "chatter"]
    assert done.returncode == 0


def test_missing_side_says_why() -> None:
    done = ask_side("none", "run 1\n")
    assert (done.stdout, done.returncode) == ("NO no such kernel\n", 0)


def test_unknown_command_ends_a_side() -> None:
    done = ask_side("bf16", "walk 1\n")
    assert done.returncode == 1
    assert "unknown command 'walk', expected run SECONDS" in done.stderr


@pytest.mark.parametrize(
    ("side", "package", "name", "nbytes"),
    [
        (["worker.py"], "torch", "bf16", 2 * RecordLayout(formats.get("bf16"), 128, 32).nbytes),
        (["peers/torch_loop.py"], "torch", "bf16", 49152),
        (["peers/transformers_experts.py", "eager"], "transformers", "bf16", 49152),
        (["peers/transformers_experts.py", "grouped_mm"], "transformers", "bf16", 49152),
        (["peers/ggml.py", "plain"], "llama_cpp", "q8_0", 26112),
        (["peers/ggml.py", "plain"], "llama_cpp", "bf16", 49152),
    ],
)
def test_sides_run_what_is_asked(side: list[str], package: str, name: str, nbytes: int) -> None:
    """A peer has compared each of its layers with NumPy before it says READY."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = ask([BENCHMARKS / side[0], *side[1:], name, 128, 32, 8, 2, 3, 2], "run 0.01\n")
    assert done.returncode == 0, done.stderr
    ready, answer = done.stdout.splitlines()
    word, found, note = ready.split(maxsplit=2)
    assert (word, int(found)) == ("READY", nbytes)
    assert note
    layers, seconds = answer.split()
    assert int(layers) > 0
    assert float(seconds) >= 0.01


@pytest.mark.parametrize("side", ["torch_loop.py", "ggml.py", "kt.py"])
def test_peer_without_its_package_or_format_says_no(side: str) -> None:
    done = ask([BENCHMARKS / "peers" / side, "plain", "fp8_block", 128, 32, 8, 2, 3, 2], "")
    assert done.stdout.startswith("NO ")
    assert done.returncode == 0


def test_wrong_experts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (BENCHMARKS, BENCHMARKS / "peers"):
        monkeypatch.syspath_prepend(folder)
    from experts import Problem
    from protocol import Task

    problem = Problem(Task((), "bf16", 64, 32, 8, 2, 3, 2))
    ids = problem.routes(1)[0]
    held = problem.expert

    def layer(number: int, chosen: list[int]) -> np.ndarray:
        outputs = (held.run(problem.x, number * 8 + expert) for expert in chosen)
        return sum(weight * output for weight, output in zip(problem.weights, outputs, strict=True))

    good = ids.tolist()
    problem.check(1, ids, layer(1, good), held)
    others = [expert for expert in range(8) if expert not in good]
    for wrong in (layer(1, [good[0], others[0]]), layer(0, good), layer(1, good[::-1]), np.full(64, np.nan)):
        with pytest.raises(ArithmeticError, match="layer 1 differs from NumPy"):
            problem.check(1, ids, wrong, held)
