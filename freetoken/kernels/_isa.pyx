"""Which instruction set levels exist and which this CPU has; the handle of one tile function.

Tile functions live in tile_<format>.h and are listed by _tile_<format>.pyx; executor.py chooses among them.
"""

LEVELS = ("scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx")
"""Level names, lowest first; a CPU that has one has those before it."""
ACTIVATIONS = ("fp32", "bf16", "int8", "int15")


def available_levels():
    """Names of the levels this process can run, lowest first. For amx the system is asked, which may refuse."""
    return LEVELS[: ft_best_level() + 1]


cdef class TileKernel:
    """One tile function: its format, level and activations; few, many: it decodes once for several vectors.

    Made by the _tile modules only.
    """

    def __init__(self):
        raise TypeError("tile kernels are listed by freetoken.kernels._tile_<format>.kernels()")

    def __repr__(self):
        return f"<tile {self.format} {self.act} {self.level}>"


cdef list table(const ft_kernel *entries, str format):
    """A handle for each entry of a header's table."""
    cdef list found = []
    cdef TileKernel kernel
    while entries.tile != NULL:
        kernel = TileKernel.__new__(TileKernel)
        kernel.entry = entries[0]
        kernel.format = format
        kernel.level = LEVELS[entries.level]
        kernel.act = ACTIVATIONS[entries.act]
        kernel.few = entries.few != NULL
        kernel.many = entries.many != NULL
        found.append(kernel)
        entries += 1
    return found
