"""Says what is wrong with a wheel: sources or an OpenMP runtime inside, something missing, or too large."""

import re
import sys
import zipfile
from pathlib import Path

LARGEST_BYTES = 7_000_000
FORBIDDEN = re.compile(r"\.(pyx|h|c|cpp|py[co])$|libgomp|^(tests|benchmarks|docs)/|^freetoken\.libs/")
REQUIRED = [
    r"freetoken/__init__\.py",
    r"freetoken/py\.typed",
    r"freetoken/kernels/_experts\.[\w.-]+\.so",
    r"freetoken/kernels/_experts\.pxd",
    r"freetoken/kernels/_experts\.pyi",
    r"freetoken/device/handoff\.cu",
    r"freetoken/device/handoff\.cuh",
    r"freetoken/gpu/gemv\.cu",
    r"freetoken/gpu/tile_mxfp4\.cuh",
    r"freetoken/demo/config\.json",
    r"freetoken/demo/generation_config\.json",
    r"freetoken/demo/model\.safetensors",
    r"freetoken/demo/tokenizer\.json",
    r"freetoken/demo/tokenizer_config\.json",
    r"freetoken-[\w.]+\.dist-info/licenses/LICENSE",
    r"freetoken-[\w.]+\.dist-info/entry_points\.txt",
]


def find_faults(names: list[str], size: int) -> list[str]:
    """One line for each fault of a wheel of that size with files of these names."""
    faults = [f"holds {name}" for name in names if FORBIDDEN.search(name)]
    faults += [f"lacks {wanted}" for wanted in REQUIRED if not any(re.fullmatch(wanted, name) for name in names)]
    if size > LARGEST_BYTES:
        faults.append(f"has {size} bytes, more than {LARGEST_BYTES}")
    return faults


def main(wheel: Path) -> None:
    """Print one line, or exit with the faults."""
    size = wheel.stat().st_size
    faults = find_faults(zipfile.ZipFile(wheel).namelist(), size)
    if faults:
        sys.exit("\n".join(f"{wheel.name} {fault}" for fault in faults))
    print(f"{wheel.name} has {size} bytes and what it should")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
