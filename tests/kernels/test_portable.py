"""Tile headers on a processor that is not x86: only the scalar tier is left, and it compiles without a warning."""

import shutil
import subprocess
from pathlib import Path

import pytest

HEADERS = Path(__file__).resolve().parents[2] / "freetoken" / "kernels"

PROGRAM = """
#include "tile_{name}.h"
int main(void) {{
    int levels = 0;
    for (const ft_kernel *k = ft_kernels_{name}; k->tile != NULL; k++) levels += k->level;
    return levels + ft_best_level();  /* 0: nothing above scalar */
}}
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.skipif(not HEADERS.is_dir(), reason="needs the source tree; this is an installed package")
@pytest.mark.parametrize("name", sorted(p.stem.removeprefix("tile_") for p in HEADERS.glob("tile_*.h")))
def test_scalar_tier_alone(name: str, tmp_path: Path) -> None:
    source = tmp_path / "main.c"
    source.write_text(PROGRAM.format(name=name))
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-DFT_SCALAR_ONLY"]
    subprocess.run(["gcc", *flags, f"-I{HEADERS}", source, "-o", tmp_path / "main"], check=True)
    subprocess.run([tmp_path / "main"], check=True)
