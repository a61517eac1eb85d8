"""Tile functions for many vectors give the bits of those for one.

The matrix unit's instructions are replaced by plain C (`tests/support/amx_twin.h`), so any processor with AVX-512 BF16
runs this. `make twin` runs the tests of whole layers on such a build.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from freetoken import formats
from freetoken.formats import Format, Matrix
from freetoken.kernels._isa import ACTIVATIONS, LEVELS, available_levels
from freetoken.kernels.reference import ERROR_BOUND
from tests.support.experts import table

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ROOT / "freetoken" / "kernels"
MOST = 64

PROGRAM = """
#include "tile_{name}.h"
#include "values.h"
#include <stdio.h>
#include <stdlib.h>

enum {{ BLOCK = {block}, LINE = {line} }};

static void prepare(const ft_kernel *f, const float *x, ptrdiff_t k, int many, uint8_t *out) {{
    const ptrdiff_t blocks = (k + BLOCK - 1) / BLOCK;
    int8_t *codes = (int8_t *)out;
    if (f->act == FT_INT15 && many)
        for (ptrdiff_t b = 0; b < blocks; b++)
            ft_wide_block(x + b * BLOCK, BLOCK, 127 * 128, f->many_order, LINE, (uint16_t *)out + 2 * b * BLOCK,
                          (float *)(out + 4 * k) + b);
    else if (f->act == FT_INT15)
        for (ptrdiff_t b = 0; b < blocks; b++)
            ft_whole_block(x + b * BLOCK, BLOCK, 127 * 128, f->offset, f->unit, f->order, LINE, codes + b * BLOCK,
                           codes + k + b * BLOCK, (float *)(out + 2 * k) + b,
                           (int32_t *)(out + 2 * k + 4 * blocks) + b);
    else
        for (ptrdiff_t i = 0; i < k; i++) {{
            const ptrdiff_t at = i - i % LINE + (f->order ? f->order[i % LINE] : i % LINE);
            if (f->act == FT_BF16)
                ((uint16_t *)out)[at] = ft_float_to_bf16(x[i]);
            else
                ((float *)out)[at] = x[i];
        }}
}}

/* Arguments: k, n, bytes of a tile. A tile and n x k activations on standard input. For each function that takes many:
 * level and kind, how many of n x 16 sums differ in a bit from those for one vector and for few, and the sums. */
int main(int argc, char **argv) {{
    if (argc != 4) return 1;
    const ptrdiff_t k = atoi(argv[1]), n = atoi(argv[2]), nbytes = atoi(argv[3]), stride = (5 * k + 127) / 64 * 64;
    uint8_t *tile = aligned_alloc(64, (size_t)(nbytes + 63) / 64 * 64);
    uint8_t *vectors = aligned_alloc(64, (size_t)(stride * n));
    float *x = malloc(4 * (size_t)(n * k));
    static float many[64 * 16], one[16], few[FT_FEW * 16];
    if (fread(tile, 1, (size_t)nbytes, stdin) != (size_t)nbytes) return 2;
    if (fread(x, 4, (size_t)(n * k), stdin) != (size_t)(n * k)) return 3;
    for (const ft_kernel *f = ft_kernels_{name}; f->tile != NULL; f++) {{
        int32_t head[4] = {{f->level, f->act, 0, 0}};
        if (f->many == NULL) continue;
        memset(vectors, 0xff, (size_t)(stride * n));
        for (ptrdiff_t t = 0; t < n; t++) prepare(f, x + t * k, k, 1, vectors + t * stride);
        f->many(tile, k, vectors, stride, (int)n, many);
        for (ptrdiff_t t = 0; t < n; t++) prepare(f, x + t * k, k, 0, vectors + t * stride);
        for (ptrdiff_t t = 0; t < n; t++) {{
            const void *next[FT_FEW];
            for (ptrdiff_t i = 0; i < FT_FEW; i++) next[i] = vectors + (t + i < n ? t + i : n - 1) * stride;
            f->tile(tile, k, next[0], one);
            f->few(tile, k, next, few);
            for (int row = 0; row < 16; row++) {{
                head[2] += memcmp(&one[row], &many[16 * t + row], 4) != 0;
                head[3] += memcmp(&one[row], &few[row], 4) != 0;
            }}
        }}
        fwrite(head, 4, 4, stdout);
        fwrite(many, 4, (size_t)(16 * n), stdout);
    }}
    return 0;
}}
"""


def widths(fmt: Format) -> list[int]:
    """One block, several strips, and rests of every kind that the format has."""
    return [width for width in (2, 4, 12, 16, 32, 34, 92, 160, 260, 544, 768, 1100) if width % fmt.width_step == 0]


@pytest.fixture(scope="module", params=sorted(p.stem.removeprefix("tile_") for p in HEADERS.glob("tile_*.h")))
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Format, Path]:
    """A format and the compiled program of its tile functions."""
    if not HEADERS.is_dir() or shutil.which("gcc") is None:
        pytest.skip("needs the source tree and gcc")
    if "avx512bf16" not in available_levels():
        pytest.skip("what surrounds the matrix unit's instructions needs avx512bf16")
    fmt, folder = formats.get(request.param), tmp_path_factory.mktemp(request.param)
    source = folder / "main.c"
    source.write_text(PROGRAM.format(name=fmt.name, block=fmt.block, line=fmt.line_k))
    flags = ["-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-Wno-unused-const-variable"]
    folders = [f"-I{HEADERS}", f"-I{ROOT / 'tests' / 'support'}"]
    subprocess.run(
        ["gcc", "-DFT_AMX_TWIN", *flags, *folders, source, "-o", folder / "main", "-lm"], check=True, cwd=folder
    )
    return fmt, folder / "main"


def edge_matrix(fmt: Format, width: int, random: np.random.Generator) -> Matrix:
    """(16, width) with scales of ordinary weights and codes of any kind: -128, subnormals, mxfp4's scale of code 0."""
    matrix = replace(fmt.quantize(random.standard_normal((16, width), np.float32)), global_scale=1.0)
    if fmt.bits == 16:
        codes = matrix.codes.copy()
        codes.view(np.uint16)[:, ::5] = random.integers(0, 0x80, codes.view(np.uint16)[:, ::5].shape)
        return replace(matrix, codes=codes)
    codes = random.integers(0, 256, matrix.codes.shape).astype(np.uint8)
    if fmt.name == "fp8_block":
        codes[codes & 0x7F == 0x7F] = 0x80
    assert matrix.scales is not None
    scales = matrix.scales.copy()
    if fmt.name == "mxfp4":
        scales[::3, ::2] = 0
    return replace(matrix, codes=codes, scales=scales)


@pytest.mark.parametrize("n", [5, 15, 16, 17, 33, 49, MOST])
def test_many_vectors_give_the_sums_of_one(program: tuple[Format, Path], n: int) -> None:
    fmt, path = program
    random = np.random.default_rng(n)
    for width in widths(fmt):
        matrix = edge_matrix(fmt, width, random)
        tile = fmt.pack(matrix).tobytes()
        x = random.standard_normal((n, width)).astype(np.float32)
        x[1] *= np.float32(2.0**-123)  # sums that are subnormal, or were on the way
        x[2] = 0
        given = tile + x.tobytes()
        command = [path, str(width), str(n), str(len(tile))]
        left = subprocess.run(command, input=given, stdout=subprocess.PIPE, check=True).stdout
        expected = x.astype(np.float64) @ matrix.dequantize().astype(np.float64).T
        levels = []
        while left:
            level, act, differ, differ_few = struct.unpack("4i", left[:16])
            sums = np.frombuffer(left[16:], np.float32, 16 * n).reshape(n, 16)
            left = left[16 + sums.nbytes :]
            levels.append(LEVELS[level])
            assert (differ, differ_few) == (0, 0), f"{width} weights, {levels[-1]}"
            usual = np.arange(n) != 1
            error = np.linalg.norm((sums - expected)[usual]) / np.linalg.norm(expected[usual])
            assert error <= ERROR_BOUND[ACTIVATIONS[act]], f"{width} weights, {levels[-1]}"
            assert not sums[2].any()
        assert "amx" in levels


@pytest.mark.parametrize("name", formats.names())
def test_every_format_has_a_tile_for_many(name: str) -> None:
    assert any(kernel.many and kernel.level == "amx" for kernel in table(formats.get(name)))
