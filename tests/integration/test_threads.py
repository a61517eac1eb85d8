"""How many intra-op threads torch has while a model loads, and that it has its own again afterwards."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import freetoken
import freetoken.integration.transformers as loading
from freetoken import topology
from freetoken.errors import CheckpointError
from freetoken.integration.threads import clamp_threads, count_threads
from freetoken.topology import Rank, Topology, ranks
from tests.support.sysfs import FakeSystem, paired_cores, single_cores


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No limit from outside, and torch's number as it was after each test."""
    for name in ("OMP_NUM_THREADS", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def machine(root: Path, n_cores: int, ranks: int, *, allowed: int | None = None) -> Topology:
    FakeSystem(root).add_cpus(single_cores(n_cores))
    return topology.read(root, affinity=range(allowed or n_cores), rank=Rank(0, ranks))


# --- the number ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_cores", "allowed", "ranks", "before", "asked", "threads"),
    [
        (6, 6, 2, 12, None, 3),
        (6, 6, 2, 6, None, 3),
        (32, 32, 2, 32, None, 16),
        (32, 32, 1, 32, None, 32),
        (4, 4, 8, 4, None, 1),
        (32, 8, 2, 32, None, 4),
        (32, 32, 2, 32, "2", 2),
        (32, 32, 2, 5, None, 5),
        (32, 32, 2, 1, "8", 1),
        (32, 32, 2, 32, "4,2", 4),
        (32, 32, 2, 32, "many", 16),
        (32, 32, 2, 32, "0", 16),
        (32, 32, 2, 32, "", 16),
    ],
)
def test_number(
    tmp_path: Path, n_cores: int, allowed: int, ranks: int, before: int, asked: str | None, threads: int
) -> None:
    environ = {} if asked is None else {"OMP_NUM_THREADS": asked}

    assert count_threads(machine(tmp_path, n_cores, ranks, allowed=allowed), before, environ) == threads


def test_second_threads_of_cores_do_not_count(tmp_path: Path) -> None:
    FakeSystem(tmp_path).add_cpus(paired_cores(6))

    assert count_threads(topology.read(tmp_path, affinity=range(12), rank=Rank(1, 2)), 12, {}) == 3


# --- setting and giving back -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "during"), [(12, 3), (6, 3), (2, 2)])
def test_clamp_gives_back_what_was_there(tmp_path: Path, before: int, during: int) -> None:
    torch.set_num_threads(before)
    found = machine(tmp_path, 6, 2)
    with clamp_threads(found) as number:
        assert number == torch.get_num_threads() == during
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError), clamp_threads(found):
        raise KeyError
    assert torch.get_num_threads() == before


def test_logged_once_with_both_numbers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(12)
    with caplog.at_level(logging.INFO, logger="freetoken"), clamp_threads(machine(tmp_path, 6, 2)):
        pass

    assert [record.message for record in caplog.records if "threads" in record.name] == [
        "torch's intra-op threads: 3 while loading instead of 12 (ranks here: 2)"
    ]


@pytest.mark.parametrize("first_out", ["first", "second"])
def test_two_loads_at_once(tmp_path: Path, first_out: str) -> None:
    """The second thread never used torch, so what it finds there is the clamp of the first."""
    torch.set_num_threads(12)
    found = machine(tmp_path, 6, 2)
    inside, leave = threading.Event(), threading.Event()
    after = []

    def load() -> None:
        with clamp_threads(found):
            inside.set()
            leave.wait(30)
        after.append(torch.get_num_threads())

    other = threading.Thread(target=load)
    with clamp_threads(found):
        other.start()
        assert inside.wait(30)
        if first_out == "second":
            leave.set()
            other.join()
    assert torch.get_num_threads() == 12
    leave.set()
    other.join()

    fresh = threading.Thread(target=lambda: after.append(torch.get_num_threads()))
    fresh.start()
    fresh.join()
    assert after == [12, 12]
    assert torch.get_num_threads() == 12


# --- in load() -------------------------------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Makes this process rank 0 of 2 on a machine of 6 cores; collects torch's threads where a load works."""
    numbers: list[int] = []

    def watch(name: str) -> None:
        work: Any = getattr(loading, name)

        def watched(*arguments: Any) -> Any:
            numbers.append(torch.get_num_threads())
            return work(*arguments)

        monkeypatch.setattr(loading, name, watched)

    watch("_load_dense")
    watch("fill_banks")
    found = machine(tmp_path / "root", 6, 2)
    monkeypatch.setattr(topology, "read", lambda: found)
    return numbers


def test_a_load_is_clamped_as_a_whole(tiny: Path, seen: list[int]) -> None:
    torch.set_num_threads(5)
    model, _ = freetoken.load(tiny)

    assert seen == [3, 3]
    assert torch.get_num_threads() == 5
    assert freetoken.report(model).cores == (0, 1, 2)


@pytest.mark.parametrize("name", ["_load_dense", "fill_banks", "attach_layer"])
def test_a_load_that_fails_gives_back(tiny: Path, seen: list[int], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail(*arguments: Any) -> None:
        assert torch.get_num_threads() == 3
        raise CheckpointError("half-way")

    monkeypatch.setattr(loading, name, fail)
    torch.set_num_threads(5)
    with pytest.raises(CheckpointError, match="half-way"):
        freetoken.load(tiny)

    assert torch.get_num_threads() == 5


def test_a_rank_takes_its_slice(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(ranks, "_is_pinned_by_launcher", lambda variable: False)
    facts = freetoken.report(freetoken.load(tiny)[0])

    assert facts.cores == topology.read(rank=Rank(0, 2)).workers()
    assert "rank 0 of 2 on this machine" in facts.cores_why
