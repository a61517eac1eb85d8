"""Kernels that compute, find and fetch experts on a GPU. Importing a module of this package may import triton.

layer.py        a layer's experts, few tokens or many; chooses and checks kernels
gemv.py         few tokens: products of records with vectors, in Triton; gemv_cuda.py, gemv.cu: in CUDA C
grouped.py      many tokens: matrix products that decode records on the way
combine.py      the weighted sum over a token's experts
tile_<name>.py  what is known of a format's tiles; tiles.py: where they lie in a record; e2m1.py: what two formats share
*.cuh           the same in CUDA C: tile_<name>.cuh, tile.cuh; device.cuh: the instructions that are used
attention.py    attention of one token of each sequence
topk.py         the largest values of rows: a router's choice
lookup.py       which slots hold experts, and which are given away; tables.py: what it knows
gather.py       records from the host's memory to slots
units.py        the lists that these hand to each other
"""
