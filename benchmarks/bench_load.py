"""Peak memory and time of loading a checkpoint that is made for it: experts must exist once, in their banks.

Each load runs in a process of its own, whose peak resident size is read from the system.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = """
import json, pathlib, re, sys, time
import torch, freetoken
from freetoken import formats
import freetoken.integration.transformers  # what loading imports is not part of what loading takes
torch.ones(64, 64) @ torch.ones(64, 64)
import psutil
pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, also the parent's
before = psutil.Process().memory_info().rss
start = time.perf_counter()
model, _ = freetoken.load(sys.argv[1], expert_format=sys.argv[2] if sys.argv[2] != "as it is" else None)
seconds = time.perf_counter() - start
status = pathlib.Path("/proc/self/status").read_text()
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status).group(1)) * 1024
dense = sum(p.numel() * p.element_size() for p in model.parameters())
banks = freetoken.report(model).bank_bytes
print(json.dumps({"peak": peak - before, "banks": banks, "dense": dense, "seconds": seconds}))
"""


@pytest.mark.parametrize("name", ["as it is", "nvfp4", "q8_0"])
def bench_peak_memory(benchmark: Any, large: Path, name: str) -> None:
    """Peak growth of the process while loading, against banks and dense part."""
    found: dict[str, Any] = {}

    def load() -> None:
        out = subprocess.run([sys.executable, "-c", CHILD, large, name], capture_output=True, text=True, check=True)
        found.update(json.loads(out.stdout.splitlines()[-1]))

    benchmark.pedantic(load, rounds=1)
    ratio = (found["peak"] - found["dense"]) / found["banks"]
    benchmark.extra_info.update(found, ratio=ratio)
    print(
        f"\n{name:<9} banks {found['banks'] / 1e6:7.1f} MB, dense {found['dense'] / 1e6:5.1f} MB, peak growth "
        f"{found['peak'] / 1e6:7.1f} MB = {ratio:.2f} x banks + dense; {found['seconds']:.1f} s"
    )
