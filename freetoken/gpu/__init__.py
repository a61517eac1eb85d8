"""Kernels of a GPU: which expert is in which slot, records into slots, experts' products.

Triton is imported when a module of this package is that has kernels, never by importing the package.
"""
