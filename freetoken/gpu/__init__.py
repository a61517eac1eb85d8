"""Kernels that compute, find and fetch experts on a GPU. Importing a module of this package may import triton.

layer.py        a layer's experts, few tokens or many; chooses and checks kernels
gemv.py         few tokens: products of records with vectors, in Triton; gemv_cuda.py, gemv.cu: in CUDA C
grouped.py      many tokens: matrix products that decode records on the way
tile_<name>.py  what is known of a format's tiles; tile_<name>.cuh: the same in CUDA C
combine.py      the weighted sum over a token's experts
lookup.py       which slots hold experts, and which are given away; tables.py: what it knows
gather.py       records from the host's memory to slots
units.py        the lists that these hand to each other
"""
