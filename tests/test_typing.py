"""The package is typed throughout, and what stubs say about compiled modules is true."""

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

import freetoken

pytest.importorskip("mypy", reason="mypy is not installed: `make lint` installs it")

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(next(iter(freetoken.__path__)))
CONFIG = ROOT / "pyproject.toml"

ALLOWED = r"""
.*\.__test__
.*\.__pyx_capi__
.*\.__(reduce|setstate)_cython__
"""
"""What Cython adds to each module and class, as stubtest's regular expressions."""


def compiled_modules(package: Path) -> list[str]:
    """Dotted names of the extension modules in a package's folder."""
    files = (file for file in package.rglob("*") if file.name.endswith(tuple(EXTENSION_SUFFIXES)))
    return sorted({".".join((package.name, *file.relative_to(package).parts)).split(".cpython-")[0] for file in files})


def check(module: str, *arguments: str, cwd: Path = PACKAGE.parent) -> None:
    found = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env={**os.environ, "MYPY_CACHE_DIR": str(ROOT / ".mypy_cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_mypy_finds_nothing() -> None:
    check("mypy", f"--config-file={CONFIG}")


def test_each_compiled_module_has_a_stub() -> None:
    modules = compiled_modules(PACKAGE)

    assert modules
    assert [name for name in modules if not (PACKAGE.parent / (name.replace(".", "/") + ".pyi")).is_file()] == []


def test_stubs_match_the_compiled_modules(tmp_path: Path) -> None:
    allowlist = tmp_path / "allowed.txt"
    allowlist.write_text(ALLOWED)

    check(
        "mypy.stubtest",
        *compiled_modules(PACKAGE),
        f"--allowlist={allowlist}",
        "--ignore-unused-allowlist",
        f"--mypy-config-file={CONFIG}",
    )


def test_stubtest_would_notice(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("def f(a): return a\n")
    (tmp_path / "wrong.pyi").write_text("def f(b: int) -> int: ...\n")

    with pytest.raises(AssertionError, match=r"wrong\.f is inconsistent"):
        check("mypy.stubtest", "wrong", cwd=tmp_path)
