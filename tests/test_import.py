"""Importing the package costs nothing: no threads, no transformers, no files, no look at the machine."""

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

import freetoken

# Prints what `import freetoken` changed in a process that has its requirements already, as JSON.
SCRIPT = """
import json, os, sys, threading
import numpy, psutil, torch

def count():
    threads = os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else []
    files = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    return [threading.active_count(), len(threads), len(files), torch.get_num_threads()]

events = []

def watch(event, arguments):
    if event == "open":
        events.append(str(arguments[0]))
    elif event in ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "ctypes.dlopen"):
        events.append(event)

before = count()
sys.addaudithook(watch)
import freetoken
after = count()
print(json.dumps({"before": before, "after": after, "events": events, "modules": list(sys.modules)}))
"""


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_starts_no_thread_and_leaves_no_file_open(imported: dict[str, Any]) -> None:
    assert imported["after"] == imported["before"]


@pytest.mark.parametrize("name", ["transformers", "triton", "huggingface_hub", "gguf", "accelerate"])
def test_leaves_the_heavy_packages_alone(imported: dict[str, Any], name: str) -> None:
    assert name not in imported["modules"]


def test_opens_nothing_but_code(imported: dict[str, Any]) -> None:
    code = (".py", ".pyc", ".so", ".zip", "METADATA", "PKG-INFO")  # the last two hold the version
    others = [event for event in imported["events"] if not event.endswith(code) and ".pyc." not in event]

    assert others == []


def test_version_is_that_of_the_metadata() -> None:
    assert freetoken.__version__ == metadata.version("freetoken")
