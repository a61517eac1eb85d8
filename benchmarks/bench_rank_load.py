"""The load of N ranks on one machine: how many intra-op threads of torch each should use.

N spawned processes each write expert slices into one large buffer of their own with torch, as a tensor-parallel loader
does: their rows of gate and up, their columns of down, expert by expert. A round is all ranks from a common start to
the last one's end; arms take turns. All arms' buffers are there at once: 2 GiB for 2 ranks of 128 MiB.

FREETOKEN_BENCH_RANKS=4 FREETOKEN_BENCH_MIB=512 FREETOKEN_BENCH_ROUNDS=9 make bench ARGS="-k rank_load -s"
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from interleave import compare

from freetoken import topology
from freetoken.integration.threads import clamp_threads

HIDDEN, WIDTH = 2048, 768  # of Qwen3-30B-A3B; the ranks share the width
RANKS = int(os.environ.get("FREETOKEN_BENCH_RANKS", "2"))
MIB = int(os.environ.get("FREETOKEN_BENCH_MIB", "128"))  # that each rank writes in a round
ROUNDS = int(os.environ.get("FREETOKEN_BENCH_ROUNDS", "5"))
ARMS = ("default", "passive", "1", "2", "3", "6", "8", "clamp")


def bench_rank_load(benchmark: Any) -> None:
    """Seconds of a load by arm, and how many times longer the default took."""
    teams = {arm: Team(arm) for arm in ARMS}
    try:
        sides = {arm: team.load for arm, team in teams.items()}
        result = benchmark.pedantic(lambda: compare(sides, ROUNDS), rounds=1)
    finally:
        for team in teams.values():
            team.close()
    machine = topology.read()
    print(
        f"\n{RANKS} ranks on {len(machine.physical_core_cpus())} cores, {MIB} MiB each, {ROUNDS} interleaved rounds; "
        f"torch's default is {torch.get_num_threads()} threads"
    )
    print(f"{'arm':<10}{'threads':>9}{'median s':>10}{'least':>8}{'most':>8}{'GB/s':>8}{'default / arm':>15}")
    for arm, team in teams.items():
        seconds, ratio = result.seconds[arm], result.ratio(arm, "default")
        rate = RANKS * MIB * 2**20 / result.median(arm) / 1e9
        print(
            f"{arm:<10}{team.threads:>9}{result.median(arm):>10.3f}{min(seconds):>8.3f}{max(seconds):>8.3f}"
            f"{rate:>8.2f}{ratio:>15.2f}"
        )
        benchmark.extra_info[arm] = {"threads": team.threads, "seconds": seconds, "ratio": ratio}


class Team:
    """The ranks of one arm, waiting for their next load."""

    def __init__(self, arm: str) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take over this process's OpenMP pool
        start = context.Barrier(RANKS)
        self._ends, self._processes = [], []
        for number in range(RANKS):
            ours, theirs = context.Pipe()
            with environment(arm, number):  # OpenMP reads it once, when the process starts
                process = context.Process(target=run_rank, args=(arm, number, start, theirs), daemon=True)
                process.start()
            theirs.close()  # so that a rank that dies is noticed
            self._ends.append(ours)
            self._processes.append(process)
        self.threads = max(end.recv() for end in self._ends)

    def load(self) -> None:
        """One load by all ranks."""
        for end in self._ends:
            end.send(True)
        for end in self._ends:
            end.recv()

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.terminate()
            process.join()


@contextmanager
def environment(arm: str, number: int) -> Iterator[None]:
    """What a launcher sets for a rank, and the wait policy of its arm."""
    before = dict(os.environ)
    os.environ |= {"LOCAL_RANK": str(number), "LOCAL_WORLD_SIZE": str(RANKS)}
    if arm == "passive":
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def run_rank(arm: str, number: int, start: Barrier, end: Connection) -> None:
    """Load each time the parent says so, and say when it is done."""
    share = WIDTH // RANKS
    random = torch.Generator().manual_seed(number)
    gate, up, down = (
        torch.randn(shape, generator=random).bfloat16() for shape in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    n_experts = max(1, MIB * 2**20 // (3 * share * HIDDEN * 2))
    gate_up = torch.empty(n_experts, 2 * share, HIDDEN, dtype=torch.bfloat16)
    downs = torch.empty(n_experts, HIDDEN, share, dtype=torch.bfloat16)
    mine = slice(number * share, (number + 1) * share)

    def load() -> None:
        for expert in range(n_experts):
            gate_up[expert, :share].copy_(gate[mine])
            gate_up[expert, share:].copy_(up[mine])
            downs[expert].copy_(down[:, mine])

    def is_right() -> bool:
        last = n_experts - 1
        return torch.equal(gate_up[last], torch.cat((gate[mine], up[mine]))) and torch.equal(downs[0], down[:, mine])

    if arm.isdigit():
        torch.set_num_threads(int(arm))
    with clamp_threads(topology.read()) if arm == "clamp" else nullcontext():
        end.send(torch.get_num_threads())
        while True:
            end.recv()
            start.wait()
            load()
            assert is_right(), "the slices are not those of the tensors"
            end.send(True)
