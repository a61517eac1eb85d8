"""The kernels on a processor that is not x86: only the scalar tier is left, compiles without a warning and is right."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freetoken import formats
from freetoken.kernels.reference import ERROR_BOUND

PACKAGE = Path(__file__).resolve().parents[2] / "freetoken"
HEADERS = PACKAGE / "kernels"
COMPILERS = {
    "scalar only": (["gcc", "-DFT_SCALAR_ONLY"], []),
    "aarch64": (["aarch64-linux-gnu-gcc", "-static"], ["qemu-aarch64"]),
}
"""A C compiler, and what runs its programs."""
WIDTH = 256

PROGRAM = """
#include "barrier.h"
#include "queue.h"
#include "read.h"
#include "team.h"
#include "tile_{name}.h"
#include "tiling.h"
#include "values.h"
#include "window.h"
#include <stdio.h>

enum {{ K = {k}, BLOCK = {block}, LINE = {line}, BYTES = {nbytes}, BLOCKS = (K + BLOCK - 1) / BLOCK }};

/* A tile and K activations on standard input; for each function of the table its kind and 16 sums. */
int main(void) {{
    static uint8_t tile[BYTES];
    static float x[K];
    if (fread(tile, 1, BYTES, stdin) != BYTES || fread(x, 4, K, stdin) != K || ft_best_level() != FT_SCALAR) return 1;
    for (const ft_kernel *f = ft_kernels_{name}; f->tile != NULL; f++) {{
        static union {{ float values[K]; int8_t codes[2 * K + 8 * BLOCKS]; }} v;
        float y[16];
        const int digits = f->act == FT_INT15 ? 2 : 1;
        float *scales = (float *)(v.codes + digits * K);
        int32_t *corrections = (int32_t *)(scales + BLOCKS);
        if (f->act == FT_FP32)
            for (int k = 0; k < K; k++) v.values[k - k % LINE + (f->order ? f->order[k % LINE] : k % LINE)] = x[k];
        else
            for (int b = 0; b < BLOCKS; b++)
                ft_whole_block(x + b * BLOCK, BLOCK, digits == 2 ? 127 * 128 : 127, f->offset, f->unit, f->order, LINE,
                               v.codes + b * BLOCK, digits == 2 ? v.codes + K + b * BLOCK : NULL, scales + b,
                               corrections + b);
        f->tile(tile, K, &v, y);
        printf("%d", f->act);
        for (int row = 0; row < 16; row++) printf(" %.9g", (double)y[row]);
        printf("\\n");
    }}
    return 0;
}}
"""


@pytest.mark.skipif(not HEADERS.is_dir(), reason="needs the source tree; this is an installed package")
@pytest.mark.parametrize("target", COMPILERS)
@pytest.mark.parametrize("name", sorted(p.stem.removeprefix("tile_") for p in HEADERS.glob("tile_*.h")))
def test_scalar_tier_alone(name: str, target: str, tmp_path: Path) -> None:
    (compiler, *options), emulator = COMPILERS[target]
    for tool in (compiler, *emulator):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    fmt, random = formats.get(name), np.random.default_rng(0)
    matrix = replace(fmt.quantize(random.standard_normal((16, WIDTH), np.float32)), global_scale=1.0)
    tile = fmt.pack(matrix).tobytes()
    x = random.standard_normal(WIDTH).astype(np.float32)
    source, program = tmp_path / "main.c", tmp_path / "main"
    source.write_text(PROGRAM.format(name=name, k=WIDTH, block=fmt.block, line=fmt.line_k, nbytes=len(tile)))
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unused-const-variable"]
    folders = [f"-I{PACKAGE / folder}" for folder in ("kernels", "checkpoint")]
    subprocess.run([compiler, *options, *flags, *folders, source, "-o", program, "-lm"], check=True)
    given = tile + struct.pack(f"{WIDTH}f", *x)
    printed = subprocess.run([*emulator, program], input=given, stdout=subprocess.PIPE, check=True).stdout.decode()
    expected = matrix.dequantize().astype(np.float64) @ x
    acts = []
    for line in printed.splitlines():
        act, *sums = line.split()
        acts.append(("fp32", "bf16", "int8", "int15")[int(act)])
        error = np.linalg.norm(np.array(sums, np.float64) - expected) / np.linalg.norm(expected)
        assert error <= ERROR_BOUND[acts[-1]], acts[-1]
    assert acts[0] == "fp32"
