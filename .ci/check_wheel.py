"""Says what is wrong with a wheel: sources or an OpenMP runtime inside, something missing, or too large."""

import re
import sys
import zipfile
from pathlib import Path

LARGEST_BYTES = 7_000_000
FORBIDDEN = re.compile(r"\.(pyx|h|c|cpp|py[co])$|libgomp|^(tests|benchmarks|docs)/|^freetoken\.libs/")
PACKAGE = Path(__file__).resolve().parents[1] / "freetoken"
REQUIRED = [
    r"freetoken-[\w.]+\.dist-info/licenses/LICENSE",
    r"freetoken-[\w.]+\.dist-info/entry_points\.txt",
]


def required() -> list[str]:
    """Patterns of all that must be inside: each file of the package, and for sources what is compiled of them."""
    found = list(REQUIRED)
    for path in sorted(PACKAGE.rglob("*")):
        name = re.escape(path.relative_to(PACKAGE.parent).with_suffix("").as_posix())
        if path.suffix == ".pyx":
            found.append(name + r"\.[\w-]+\.so")
        elif path.is_file() and path.suffix != ".so" and not FORBIDDEN.search(path.name):
            found.append(name + re.escape(path.suffix))
    return found


def find_faults(names: list[str], size: int) -> list[str]:
    """One line for each fault of a wheel of that size with files of these names."""
    faults = [f"holds {name}" for name in names if FORBIDDEN.search(name)]
    faults += [f"lacks {wanted}" for wanted in required() if not any(re.fullmatch(wanted, name) for name in names)]
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
