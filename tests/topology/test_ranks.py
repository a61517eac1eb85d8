import os
import subprocess
import sys

import pytest

from freetoken.topology import Rank, find_rank


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        pytest.param(
            {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "RANK": "3", "WORLD_SIZE": "4"}, (1, 2), id="torchrun"
        ),
        pytest.param({"LOCAL_RANK": "3", "LOCAL_SIZE": "4"}, (3, 4), id="DeepSpeed"),
        pytest.param({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, (0, 8), id="Open MPI"),
        pytest.param({"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 2), id="MPICH"),
        pytest.param({"MV2_COMM_WORLD_LOCAL_RANK": "1", "MV2_COMM_WORLD_LOCAL_SIZE": "3"}, (1, 3), id="MVAPICH"),
        pytest.param({"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4"}, (1, 4), id="Slurm, one node"),
        pytest.param(
            {"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "1"}, (2, 4), id="Slurm"
        ),
        pytest.param(
            {"SLURM_LOCALID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3", "SLURM_NODEID": "2"}, (2, 3), id="last node"
        ),
        pytest.param({"SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "8"}, (0, 1), id="one process of a batch script"),
        pytest.param(
            {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1"},
            (0, 2),
            id="torchrun below srun",
        ),
        pytest.param({}, (0, 1), id="nothing"),
        pytest.param({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, (0, 1), id="no count"),
        pytest.param({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, (0, 1), id="beyond the count"),
        pytest.param({"LOCAL_RANK": "-1", "LOCAL_WORLD_SIZE": "2"}, (0, 1), id="negative"),
        pytest.param({"LOCAL_RANK": "one", "LOCAL_WORLD_SIZE": "2"}, (0, 1), id="a word"),
        pytest.param({"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, (0, 1), id="empty"),
        pytest.param({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "9" * 50}, (0, 1), id="too large"),
        pytest.param(
            {"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "5"}, (0, 1), id="no such node"
        ),
        pytest.param({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "four"}, (0, 1), id="nonsense of Slurm"),
        pytest.param(
            {"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (1, 2),
            id="nonsense, then sense",
        ),
    ],
)
def test_rank_among_those_of_this_machine(variables: dict[str, str], rank: tuple[int, int]) -> None:
    assert find_rank(variables) == Rank(*rank)


RANK = (
    "from freetoken import topology; r = topology.find_rank(); "
    "print(r.number, r.count, r.pinned, topology.read().rank == r)"
)
PIN = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
WRAPPER = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
LAUNCHED = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def run(*arguments: str, prefix: str = "") -> str:
    """Run as a launcher does: it has no rank itself. `prefix` is what the rank does before anything else."""
    launch = (
        "import os, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', *sys.argv[1:]], check=True, env=os.environ | {LAUNCHED})"
    )
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    done = subprocess.run(
        [sys.executable, "-c", prefix + launch, *arguments], capture_output=True, text=True, check=True, env=clean
    )
    return done.stdout.strip()


needs_two_cpus = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs masks and two CPUs"
)


def test_rank_of_a_launcher_that_pins_nothing() -> None:
    assert run(RANK) == "1 2 False True"


@needs_two_cpus
def test_a_rank_with_a_mask_of_its_own_is_not_sliced_again() -> None:
    assert run(PIN + RANK) == "1 2 True True"


@needs_two_cpus
def test_nor_where_a_wrapper_with_that_mask_stands_between() -> None:
    assert run(PIN + WRAPPER, RANK) == "1 2 True True"


@needs_two_cpus
def test_a_launcher_that_was_given_a_mask_has_not_sliced_it() -> None:
    assert run(RANK, prefix=PIN) == "1 2 False True"
