"""Converting: bytes per second and peak memory, and what loading the converted folder takes, read or mapped.

Each step runs in a process of its own, whose peak resident size is read from the system.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CONVERT = """
import json, pathlib, re, sys, time
from freetoken import formats, topology
from freetoken.checkpoint.convert import Conversion
from freetoken.checkpoint.open import open_any, scan_any
fmt = formats.get(sys.argv[3]) if sys.argv[3] != "as it is" else None
threads = len(topology.read().workers("auto"))
conversion = Conversion(scan_any(open_any(sys.argv[1]), fmt), sys.argv[2], fmt)
pathlib.Path("/proc/self/clear_refs").write_text("5")
status = pathlib.Path("/proc/self/status")
before = int(re.search(r"VmRSS:\\s+(\\d+) kB", status.read_text()).group(1)) * 1024
start, used = time.perf_counter(), time.process_time()
done = conversion.run(threads)
seconds, used = time.perf_counter() - start, time.process_time() - used
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text()).group(1)) * 1024
print(json.dumps({**done.to_dict(), "seconds": seconds, "cpu_seconds": used, "growth": peak - before,
                  "record": max(b.layout.nbytes for b in conversion.banks), "threads": threads}))
"""

LOAD = """
import json, sys, time
import freetoken.integration.transformers
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.integration.transformers import _make_bank
groups = scan_any(open_any(sys.argv[1])).groups
start = time.perf_counter()
pairs = [(_make_bank(group, None, sys.argv[2] == "shared"), group) for group in groups]
fill_banks(pairs, 2)
seconds = time.perf_counter() - start
print(json.dumps({"seconds": seconds, "banks": sum(bank.nbytes for bank, _ in pairs)}))
"""


def run(code: str, *args: Any) -> Any:
    command = [sys.executable, "-c", code, *map(str, args)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["as it is", "nvfp4", "mxfp4", "q8_0"])
def bench_conversion(benchmark: Any, large: Path, tmp_path: Path, name: str) -> None:
    """Bytes read per second, and growth of the process in records."""
    read = sum(file.stat().st_size for file in large.glob("*.safetensors"))
    found: dict[str, Any] = {}
    benchmark.pedantic(lambda: found.update(run(CONVERT, large, tmp_path / "m", name)), rounds=1)
    loads = {"read": run(LOAD, tmp_path / "m", "read"), "mapped": run(LOAD, tmp_path / "m", "shared")}
    benchmark.extra_info.update(found, loads=loads)
    written = found["bank_bytes"] + found["dense_bytes"]
    speeds = ", ".join(f"{how} {load['banks'] / 1e9 / load['seconds']:.2f}" for how, load in loads.items())
    print(
        f"\n{name:<9} {read / 1e6:.0f} MB to {written / 1e6:.0f} MB in {found['seconds']:.1f} s = "
        f"{read / 1e6 / found['seconds']:.0f} MB/s ({found['cpu_seconds']:.1f} s of CPU), peak growth "
        f"{found['growth'] / 1e6:.1f} MB, records of {found['record'] / 1e6:.2f} MB, {found['threads']} threads; "
        f"banks filled at GB/s: {speeds}"
    )
