"""Kernels that run experts on a GPU, from records as they lie in host banks (docs/record.md).

    tile_<name>.py  what the dwords and scales of a format's tiles stand for; the only place that knows the format
    tiles.py        where they lie
    gemv.py         decode: a few routes, exact, the plain version
    grouped.py      prefill: all routes of an expert at once, on the tensor cores
    combine.py      the weighted sum of a token's routes

Triton is imported when one of these modules is.
"""
