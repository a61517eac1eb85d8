"""`benchmarks/race.py`: order, figures, who is missing and why, and that no side is left behind; never a time."""

import re
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import race as racing
import sides

from freetoken import formats
from freetoken.errors import CapacityError
from freetoken.formats.record import RecordLayout

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TINY = ["--shape", "128", "32", "8", "2", "--gib", "0.001", "--rounds", "2", "--seconds", "0.01", "--threads", "2"]
BF16_BYTES = 2 * 3 * 128 * 32 * 2
RECORDS = 2 * RecordLayout(formats.get("bf16"), 128, 32).nbytes


def interpreter(folder: Path, name: str, body: str) -> str:
    """A program that takes a side's place."""
    file = folder / name
    file.write_text(f"#!{sys.executable}\nimport os, sys, time\n{body}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def dying(tmp_path: Path) -> str:
    """Ends while it runs."""
    body = f"print('READY {BF16_BYTES} a side', flush=True); sys.stdin.readline(); sys.exit('no more of this')"
    return interpreter(tmp_path, "dying", body)


class Scripted:
    """A side whose answers are known; started: in which order sides were asked."""

    asked: list[str]
    speeds: dict[str, float]
    nbytes: dict[str, int]
    fails_at: dict[str, int]
    closed: list[str]

    def __init__(self, name: str, python: str, task: tuple[object, ...], limit: float) -> None:
        if name == "kt-kernel":
            raise sides.SideError("not here")
        self.name, self.note = name, f"{name} 1.0"
        self.token_bytes = self.nbytes.get(name, BF16_BYTES)
        self.runs = 0

    def run(self, seconds: float) -> float:
        if self.fails_at.get(self.name) == self.runs:
            raise sides.SideError("ended with status 3: alas")
        self.asked.append(self.name)
        self.runs += 1
        return self.speeds[self.name] * (100 if self.runs == 1 else 1)

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        self.closed.append(self.name)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    fresh = {"asked": [], "closed": [], "nbytes": {}, "fails_at": {}}
    for name, value in (fresh | {"speeds": {"freetoken": 4e6, "torch": 1e6, "ggml": 2e6}}).items():
        monkeypatch.setattr(Scripted, name, value, raising=False)
    monkeypatch.setattr(racing, "Side", Scripted)
    monkeypatch.setattr(racing, "roof", lambda memory, threads: 1e11)
    return Scripted


def run(*arguments: str) -> tuple[racing.Race, dict[str, racing.Result]]:
    race, names = racing.parse([*TINY, *arguments])
    return race, {name: race.run(name) for name in names}


def test_sides_take_turns_and_the_first_round_does_not_count(scripted: type[Scripted]) -> None:
    race, results = run("--formats", "bf16", "--sides", "freetoken", "torch", "ggml", "kt-kernel")
    assert scripted.asked == [
        "freetoken", "torch", "ggml",
        "torch", "ggml", "freetoken",
        "ggml", "freetoken", "torch",
    ]  # fmt: skip
    assert sorted(scripted.closed) == ["freetoken", "ggml", "torch"]
    assert racing.report(race, results).split("\n\n")[:5] == [
        "| format | side | GB/s | share of the roof | freetoken's multiple |\n"
        "|---|---|---|---|---|\n"
        "| bf16 | freetoken | 196.6 | 1.97 |  |\n"
        "| bf16 | ggml | 98.3 | 0.98 | 2.00 |\n"
        "| bf16 | torch | 49.2 | 0.49 | 4.00 |",
        "Missing:",
        "- kt-kernel (bf16): not here",
        "Raced:",
        "- freetoken (bf16): freetoken 1.0\n- ggml (bf16): ggml 1.0\n- torch (bf16): torch 1.0",
    ]


def test_side_that_dies_later_is_missing_and_the_others_go_on(scripted: type[Scripted]) -> None:
    scripted.fails_at["torch"] = 1
    race, results = run("--formats", "bf16", "--sides", "freetoken", "torch", "ggml")
    assert scripted.asked.count("freetoken") == scripted.asked.count("ggml") == 3
    assert results["bf16"].missing == {"torch": "ended with status 3: alas"}
    assert list(results["bf16"].lanes) == ["freetoken", "ggml"]
    assert scripted.closed[0] == "torch"
    assert "| torch |" not in racing.report(race, results)


def test_without_our_side_there_is_no_multiple(scripted: type[Scripted]) -> None:
    scripted.fails_at["freetoken"] = 0
    race, results = run("--formats", "bf16", "--sides", "freetoken", "torch")
    assert "| bf16 | torch | 49.2 | 0.49 |  |" in racing.report(race, results)


def test_side_that_reads_other_bytes_is_left_out(scripted: type[Scripted]) -> None:
    scripted.nbytes["ggml"] = BF16_BYTES // 2
    _, results = run("--formats", "bf16", "--sides", "freetoken", "ggml")
    assert results["bf16"].missing == {"ggml": f"reads 24,576 bytes for a token, expected {RECORDS:,}"}
    assert "ggml" not in scripted.asked


def test_foreign_time_is_what_neither_this_process_nor_sides_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = namedtuple("machine", "user system idle iowait steal")(100.0, 20.0, 900.0, 50.0, 4.0)
    own = namedtuple("own", "user system children_user children_system iowait")(10.0, 5.0, 2.0, 1.0, 70.0)
    monkeypatch.setattr(racing.psutil, "cpu_times", lambda: machine)
    monkeypatch.setattr(racing.psutil, "Process", lambda: SimpleNamespace(cpu_times=lambda: own))
    lane = racing.Lane(SimpleNamespace(cpu_seconds=lambda: 30.0))
    assert racing.Result({"freetoken": lane, "torch": lane}).foreign_seconds() == 124 - 18 - 60


def test_formats_with_one_reason_share_a_line() -> None:
    facts = [("torch", "q8_0", "bf16 only"), ("ggml", "nvfp4", "no"), ("torch", "q4_0", "bf16 only")]
    assert racing.grouped(facts) == ["- ggml (nvfp4): no", "- torch (q8_0, q4_0): bf16 only"]


def test_what_does_not_fit_is_refused_before_it_starts(scripted: type[Scripted]) -> None:
    race, _ = racing.parse(["--gib", "1e6"])
    with pytest.raises(CapacityError, match=r"bf16 of freetoken, after 0 others, needs .* of host memory"):
        race.run("bf16")
    assert not scripted.asked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--python", "torch"], "'torch' is no NAME=PATH"),
        (["--python", "numpy=/bin/true"], "'numpy=/bin/true' is no NAME=PATH with a NAME of freetoken, torch"),
        (["--formats", "q3"], "invalid choice: 'q3'"),
        (["--rounds", "0"], "every number must be above 0, and finite"),
        (["--gib", "nan"], "every number must be above 0, and finite"),
        (["--seconds", "inf"], "every number must be above 0, and finite"),
        (["--formats", "nvfp4", "--shape", "10", "10", "8", "2"], "--shape: nvfp4: the hidden size is 10"),
        (["--shape", "64", "32", "4", "8"], "a token cannot have 8 of 4 experts"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        racing.parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit('first\\nlast words')", "ended with status 1: last words"),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL: it said nothing"),
        ("time.sleep(600)", "said nothing for 2 s"),
        ("print('HELLO there you all', flush=True); time.sleep(600)", "answered 'HELLO there you all', expected READY"),
        ("print('READY many bytes', flush=True); time.sleep(600)", "expected READY <bytes> <note>"),
    ],
)
def test_side_that_does_not_start_is_named(body: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(sides.SideError) as caught:
        sides.Side("torch", interpreter(tmp_path, "python", body), ("bf16",), 2)
    assert message in str(caught.value)
    assert not psutil.Process().children()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sys.exit(4)", "ended with status 4: it said nothing"),
        ("time.sleep(600)", "said nothing for 2 s"),
        ("print('fast', flush=True); time.sleep(600)", "answered 'fast', expected <layers> <seconds>"),
        ("print('3 0', flush=True); time.sleep(600)", "answered '3 0', expected <layers> <seconds>"),
    ],
)
def test_side_that_fails_while_it_runs_is_named(body: str, message: str, tmp_path: Path) -> None:
    python = interpreter(tmp_path, "python", f"print('READY 5 x', flush=True); sys.stdin.readline(); {body}")
    side = sides.Side("torch", python, ("bf16",), 2)
    try:
        with pytest.raises(sides.SideError) as caught:
            side.run(0.01)
        assert message in str(caught.value)
    finally:
        side.close()
    assert not psutil.Process().children()


def test_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(sides.SideError, match="does not start: No such file or directory"):
        sides.Side("torch", str(tmp_path / "none"), ("bf16",), 2)


def test_side_is_stopped_while_others_run(tmp_path: Path) -> None:
    body = "print('READY 5 x', flush=True)\nfor line in sys.stdin: print('6 2.0', flush=True)"
    side = sides.Side("torch", interpreter(tmp_path, "python", body), ("bf16",), 60)
    (child,) = psutil.Process().children()
    try:
        for _ in range(2):
            end = time.monotonic() + 60
            while child.status() != psutil.STATUS_STOPPED and time.monotonic() < end:
                time.sleep(0.01)
            assert child.status() == psutil.STATUS_STOPPED
            assert side.run(0.01) == 3
    finally:
        side.close()
    assert not child.is_running()


def start_race(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(BENCHMARKS / "race.py"), *arguments]
    environment = {"PYTHONPATH": str(BENCHMARKS.parent), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_race_of_real_sides(dying: str) -> None:
    others = ["--sides", "freetoken", "torch", "ggml", "--python", f"ggml={dying}"]
    process = start_race("--formats", "bf16", "q8_0", *TINY, *others)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line.startswith("| ")]
    assert sorted(row[:2] for row in rows[1:]) == [["bf16", "freetoken"], ["bf16", "torch"], ["q8_0", "freetoken"]]
    for row in rows[1:]:
        assert float(row[2]) >= 0
        assert float(row[3]) >= 0
        assert (row[4] == "") == (row[1] == "freetoken")
    missing = out.partition("Missing:")[2].partition("Raced:")[0].split("\n")
    assert "- ggml (bf16): ended with status 1: no more of this" in missing
    assert "- torch (q8_0): torch has no product with such blocks" in missing
    assert any(line.startswith("- ggml (q8_0): reads 49,152 bytes for a token, expected ") for line in missing)
    assert "2 threads; 128/32 top 2 of 8" in out
    assert re.search(r"that others used meanwhile: bf16 \d\.\d\d, q8_0 \d\.\d\d$", out)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_race_leaves_no_side(number: signal.Signals, tmp_path: Path) -> None:
    body = f"print('READY {BF16_BYTES} x', flush=True)\nfor line in sys.stdin: time.sleep(600)"
    python = interpreter(tmp_path, "python", body)
    pythons = [f"--python={name}={python}" for name in ("torch", "ggml")]
    process = start_race("--formats", "bf16", *TINY, "--sides", "torch", "ggml", *pythons)
    parent = psutil.Process(process.pid)
    while len(children := parent.children(recursive=True)) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
