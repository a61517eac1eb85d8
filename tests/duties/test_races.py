"""Workers, gates and queues with real threads under ThreadSanitizer."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("threads.c")
PACKAGE = Path(__file__).resolve().parents[2] / "freetoken"


def build(tmp_path: Path, *flags: str) -> Path:
    if not (PACKAGE / "duties" / "worker.h").exists():
        pytest.skip("an installed package has no headers: the checkout's tests build them")
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing: install it to look for races")
    program = tmp_path / "threads"
    folders = [f"-I{PACKAGE / name}" for name in ("duties", "kernels")]
    command = ["gcc", "-O1", "-g", "-Wall", "-fsanitize=thread", *flags, *folders, str(SOURCE), "-o", str(program)]
    built = subprocess.run([*command, "-lpthread"], capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr and "tsan" in built.stderr:
        pytest.skip("libtsan is missing: install it to look for races")
    assert built.returncode == 0, built.stderr
    return program


def run(program: Path, steps: int) -> subprocess.CompletedProcess[str]:
    # ThreadSanitizer wants its addresses free, which random ones may take
    calm = ["setarch", "-R"] if shutil.which("setarch") else []
    return subprocess.run([*calm, str(program), str(steps)], capture_output=True, text=True, timeout=300, check=False)


def test_no_races(tmp_path: Path) -> None:
    result = run(build(tmp_path, "-Werror"), 6000)

    assert result.returncode == 0 and not result.stderr, result.stderr[:4000]
    found = json.loads(result.stdout)
    assert not found["wrong"]
    assert found["compared"] > 2000 and found["taken_over"] > 20 and found["cancelled"] > 20, found


def test_a_missing_order_is_seen(tmp_path: Path) -> None:
    """Answers and gates without release semantics."""
    result = run(build(tmp_path, "-w", "-D__ATOMIC_RELEASE=__ATOMIC_RELAXED"), 500)

    assert "WARNING: ThreadSanitizer: data race" in result.stderr
