"""Loads under real limits, and loads that end early: refused with our error, and nothing of them stays.

Each runs in a process of its own, where limits can be set and all threads and memory belong to it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

BANK_BYTES = 2 * 32 * 3 * 512 * 512 * 2
"""Of the model below: 96 MiB."""

START = """
import gc, json, os, pathlib, re, resource, signal, sys, tempfile, threading
import psutil, torch, tqdm, transformers
import freetoken
import freetoken.integration.transformers as integration
from freetoken import demo
from freetoken.banks import Bank
folder = sys.argv[1]

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024

def load(**arguments):
    try:
        model, _ = freetoken.load(folder, **arguments)
    except BaseException as error:
        global kept
        kept = error  # as a console does
        return {"error": type(error).__name__, "text": str(error), **getattr(error, "facts", {})}
    return {"error": None, "swapped": freetoken.report(model).swapped_bytes}

freetoken.load(demo.path())  # what a first load imports and starts is no leak of a second
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3-MoE with 96 MiB of bf16 experts and a vocabulary of 10 MiB."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=10240, hidden_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, intermediate_size=512, moe_intermediate_size=512, num_experts=32, num_experts_per_tok=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("limits") / "m"
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    return path


def run(code: str, folder: Path, *prefix: str, **environ: str) -> Any:
    """What the child printed last, as JSON. prefix: a command that runs it."""
    out = subprocess.run(
        [*prefix, sys.executable, "-c", START + code, folder],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])} | environ,
    )
    assert out.returncode == 0, out.stderr[-2000:]
    return json.loads(out.stdout.splitlines()[-1])


# --- limits ----------------------------------------------------------------------------------------------------------

UNDER_A_LIMIT = """
def limited(room):
    resource.setrlimit(resource.{name}, (status("{used}") + room, hard))
    return load()

_, hard = resource.getrlimit(resource.{name})
tight = limited({room})
print(json.dumps([tight, limited(tight["needed"] + (96 << 20))]))
"""


@pytest.mark.parametrize(("name", "used"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_a_limit_of_the_process(folder: Path, name: str, used: str) -> None:
    room = BANK_BYTES
    tight, loose = run(UNDER_A_LIMIT.format(name=name, used=used, room=room), folder)
    assert tight["error"] == "CapacityError"
    assert tight["where"] == name
    assert tight["needed"] > room
    assert room - (8 << 20) <= tight["available"] <= room  # the interpreter took some between
    assert loose["error"] is None, loose


@contextmanager
def memory_cgroup(limit: int) -> Iterator[tuple[str, ...]]:
    """A command that runs another in a cgroup v2 of so much memory and no swap: by systemd, or in a group made here.

    Skips where neither can be had. A group is made only at the top of a hierarchy of one's own: anywhere else the
    processes beside it would have to move.
    """
    scope = ("systemd-run", "--quiet", "--scope", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0")
    for command in (scope, (*scope[:1], "--user", *scope[1:])):
        works = [*command, "true"]
        if shutil.which(command[0]) and subprocess.run(works, capture_output=True, timeout=60).returncode == 0:
            yield command
            return
    top = Path("/sys/fs/cgroup")
    group = top / f"freetoken-test-{uuid.uuid4().hex}"
    try:
        is_top = Path("/proc/self/cgroup").read_text().strip() == "0::/" and not (top / "cgroup.type").exists()
        if not is_top or "memory" not in (top / "cgroup.controllers").read_text().split():
            raise OSError("not at the top of a cgroup v2 hierarchy with a memory controller")
        (top / "cgroup.subtree_control").write_text("+memory")
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made: systemd-run does not work here, {error}")
    try:
        (group / "memory.max").write_text(str(limit))
        if (group / "memory.swap.max").exists():
            (group / "memory.swap.max").write_text("0")
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")
    finally:
        group.rmdir()


IN_A_CGROUP = """
have = freetoken.memory.budget.available()
print(json.dumps({"where": have.where, "available": have.available_bytes, "load": load()}))
"""


def test_a_limit_of_a_cgroup(folder: Path) -> None:
    """The same child twice: where only the banks are too much it is refused, and with room for them it loads."""
    with memory_cgroup(1 << 30) as command:
        loose = run(IN_A_CGROUP, folder, *command)
    assert loose["where"].endswith("memory.max")
    assert loose["load"]["error"] is None
    used = (1 << 30) - loose["available"]
    with memory_cgroup(used + BANK_BYTES) as command:
        tight = run(IN_A_CGROUP, folder, *command)
    assert tight["load"]["error"] == "CapacityError"
    assert tight["load"]["where"].endswith("memory.max")
    assert tight["load"]["available"] < tight["load"]["needed"] + (64 << 20)


# --- what stays ------------------------------------------------------------------------------------------------------

LEAKS = """
from freetoken.memory import budget

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    threading.Event().wait(0.05)

def fail():
    raise OSError("the disk went away")

def starve():
    budget.resident = lambda root="/": budget.Budget(1 << 20, "MemAvailable")
    next(thread for thread in threading.enumerate() if thread.name == "freetoken-guard").join(60)

def report(plan, info):
    raise KeyboardInterrupt

class Fill:
    def __init__(self, act):
        self.act, self.calls, self.lock = act, 0, threading.Lock()

    def __call__(self, bank, experts):
        mark(bank, experts)
        with self.lock:
            before, self.calls = self.calls, self.calls + len(experts)
            due = before < 48 <= self.calls or (self.calls > 48 and self.act is starve)  # three quarters
        if due and self.act:
            self.act()

def state():
    gc.collect()
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "tasks": len(os.listdir("/proc/self/task")),
        "files": sorted(os.listdir(tempfile.gettempdir())),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "torch": [str(torch.get_default_dtype()), torch.is_grad_enabled(), torch.get_num_threads(),
                  str(torch.get_default_device()), torch.is_inference_mode_enabled()],
        "transformers": [transformers.utils.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity()],
        "environ": dict(os.environ),
    }

mark, check_report, resident = Bank.mark, integration.LoadPlan.check_report, budget.resident
acts = {"interrupted": interrupt, "failed": fail, "starved": starve, "in the dense part": None, "completed": None}
found = {}
for progress in (False, True):
    for end, act in acts.items():
        kept = None
        counted = Fill(act)
        before, rss = state(), psutil.Process().memory_info().rss
        Bank.mark = lambda bank, experts: counted(bank, experts)
        if end == "in the dense part":
            integration.LoadPlan.check_report = report
        ended = load(progress=progress)
        Bank.mark, integration.LoadPlan.check_report, budget.resident = mark, check_report, resident
        grown = psutil.Process().memory_info().rss - rss
        found[f"{end} {progress}"] = {
            "ended": ended, "kept": kept is not None, "calls": counted.calls, "grown": grown,
            "before": before, "after": state(),
        }
print(json.dumps(found))
"""

ENDS = {
    "interrupted": ("KeyboardInterrupt", ""),
    "failed": ("OSError", "the disk went away"),
    "starved": ("CapacityError", "the load was stopped: 1.00 MiB"),
    "in the dense part": ("KeyboardInterrupt", ""),
    "completed": (None, ""),
}


@pytest.fixture(scope="module")
def leaks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(LEAKS, folder, TMPDIR=str(tmp_path_factory.mktemp("temporary")))


@pytest.mark.parametrize("progress", [False, True])
@pytest.mark.parametrize("end", ENDS)
def test_nothing_stays_of_a_load(leaks: dict[str, Any], end: str, progress: bool) -> None:
    found, (error, text) = leaks[f"{end} {progress}"], ENDS[end]
    assert found["ended"]["error"] == error
    assert found["ended"].get("text", "").startswith(text)
    assert found["kept"] == (error is not None)
    if end in ("interrupted", "failed", "starved"):
        assert 48 <= found["calls"] < 64
    assert found["after"] == found["before"]
    # three quarters of the banks are 72 MiB; heaps of threads that have ended may stay
    assert found["grown"] < BANK_BYTES // 3
