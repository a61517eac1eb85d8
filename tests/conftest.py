"""What tests of more than one module share: the folder of test data, and markers for what a machine may lack."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if not Path(
    "/dev/nvidiactl"
).exists():  # kernels in Triton run in its interpreter, chosen before anything imports triton
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of large or recorded test data: FREETOKEN_TEST_DATA, or `shared` beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared"
    folder = Path(os.environ.get("FREETOKEN_TEST_DATA") or beside)
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}: set FREETOKEN_TEST_DATA to the folder that holds it")
    return folder


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Triton's, if any test that was collected has it."""
    with pytest.MonkeyPatch.context() as patch:
        if "triton.runtime.interpreter" in sys.modules:
            from tests.support.interpreter import patch_once

            patch_once(patch)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # not at the top: it takes a minute in an emulated machine, where few tests want it

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("numa") and len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) < 2:
        pytest.skip("needs a machine of two or more NUMA nodes")
