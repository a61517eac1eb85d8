"""CPU kernels: one function computes a layer, and one tile function per format, precision and instruction set.

    _experts.pyx  layer(job, thread, n): prepare -> gate and up -> down; calls a tile function for 16 rows at a time
    tile_<format>.h  the tile functions of a format, scalar first; _tile_<format>.pyx lists them
    _isa.pyx, isa.h  instruction set levels and the type of a tile function
    reference.py  the float64 twin

torch is imported here, before any compiled module of this package: its wheel brings the OpenMP runtime that they then
share. With two runtimes in a process each has its own spinning threads, and they get in each other's way.
"""

import torch  # noqa: F401
