"""Kernels run on a CUDA device where there is one, else in Triton's interpreter, which must be chosen before triton is
imported.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
