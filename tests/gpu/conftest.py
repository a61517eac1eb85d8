"""Where kernels run: on a CUDA device if there is one, else on ordinary memory, in Triton's interpreter."""

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
