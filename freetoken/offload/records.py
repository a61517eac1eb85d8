"""Records of banks as tensors."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray


def as_tensor(records: NDArray[np.uint8]) -> torch.Tensor:
    """A tensor over C-contiguous records, only to be read, which does not keep them.

    torch would warn of memory that cannot be written.
    """
    run = (ctypes.c_uint8 * records.nbytes).from_address(records.ctypes.data)
    return torch.from_numpy(np.ctypeslib.as_array(run)).view(records.shape)
