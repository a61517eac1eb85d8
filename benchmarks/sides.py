"""Sides of a comparison as processes: started, asked, given up when they are silent, and never left behind."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
ROOT = HERE.parent


@dataclass(frozen=True)
class Program:
    """A side's file, and what is said to it beside the task."""

    file: str
    options: tuple[str, ...] = ()


PROGRAMS: Mapping[str, Program] = {
    "freetoken": Program("worker.py"),
    "torch": Program("peers/torch_loop.py"),
    "transformers-eager": Program("peers/transformers_experts.py", ("eager",)),
    "transformers-grouped_mm": Program("peers/transformers_experts.py", ("grouped_mm",)),
    "ggml": Program("peers/ggml.py", ("plain",)),
    "ggml-repack": Program("peers/ggml.py", ("repack",)),
    "kt-kernel": Program("peers/kt.py"),
}


class SideError(Exception):
    """A side cannot take part: it said so, died, was silent for too long, or answered something else."""


class Side:
    """One side, from READY to `close`; stopped while it is not asked, so that its threads do not spin into others.

    arguments: the task; limit: seconds for any answer beyond what it is asked to run. Its process group belongs to this
    session: if this process is killed, the kernel continues and ends stopped groups that nobody is left to continue.
    """

    def __init__(self, name: str, python: str, arguments: Sequence[object], limit: float) -> None:
        self._limit = limit
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        program = PROGRAMS[name]
        command = [python, str(HERE / program.file), *program.options, *map(str, arguments)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        }
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, env=environment,
                process_group=0,
            )  # fmt: skip
        except OSError as error:
            self._errors.close()
            raise SideError(f"{python} does not start: {error.strerror}") from error
        try:
            answer = self._answer(limit)
            word, _, rest = answer.partition(" ")
            if word == "NO":
                raise SideError(rest)
            nbytes, _, self.note = rest.partition(" ")
            if word != "READY" or not nbytes.isdecimal():
                raise SideError(f"answered {answer!r}, expected READY <bytes> <note>")
            self.token_bytes = int(nbytes)
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.close()
            raise

    def run(self, seconds: float) -> float:
        """Layers of a token per second, over about so many seconds."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(f"run {seconds}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None
        answer = self._answer(seconds + self._limit)
        self._signal(signal.SIGSTOP)
        try:
            layers, taken = map(float, answer.split())
            return layers / taken
        except (ValueError, ZeroDivisionError):
            raise SideError(f"answered {answer!r}, expected <layers> <seconds>") from None

    def cpu_seconds(self) -> float:
        """What it has used."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        """End it and all that it started; once is enough."""
        if self._errors.closed:
            return
        self._signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with contextlib.suppress(BrokenPipeError):
                stream.close()  # type: ignore[union-attr]

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, limit: float) -> str:
        """The next line."""
        output = self._process.stdout
        assert output is not None
        end, text = time.monotonic() + limit, b""
        with selectors.DefaultSelector() as selector:
            selector.register(output, selectors.EVENT_READ)
            while not text.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise SideError(f"said nothing for {limit:.0f} s")
                piece = os.read(output.fileno(), 4096)
                if not piece:
                    raise self._death()
                text += piece
        return text.decode(errors="replace").strip()

    def _death(self) -> SideError:
        try:
            code = self._process.wait(self._limit)
        except subprocess.TimeoutExpired:
            return SideError("closed its output")
        self._errors.seek(0)
        lines = self._errors.read().split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        return SideError(f"{how}: {last[:200]}")


def choose_pythons(assignments: Sequence[str]) -> dict[str, str]:
    """Interpreters by side, from NAME=PATH; all others get this one's. Raise ValueError for one that is nothing."""
    pythons = dict.fromkeys(PROGRAMS, sys.executable)
    for assignment in assignments:
        name, equals, path = assignment.partition("=")
        if name not in PROGRAMS or not equals or not path:
            raise ValueError(f"{assignment!r} is no NAME=PATH with a NAME of {', '.join(PROGRAMS)}")
        pythons[name] = path
    return pythons
