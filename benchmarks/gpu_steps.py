"""Replays a graph of many nodes that waits for the host in each layer, and measures what a wait costs. Needs a GPU.

    python benchmarks/gpu_steps.py [--steps 2000] [--layers 48] [--nodes 5000] [--delay-us 100]

A layer is a kernel that writes a number to the host's memory and rings, a wait, a kernel that compares the duty's
answer in the host's memory, and small kernels of torch. Two steps are in flight, duties take a random time. Hand-off
is what a trip to the host takes beyond the duty: from a reading of the GPU's clock (%globaltimer) just before the
bell is written to one at the start of the first kernel after the wait, less the time that the duty took by the host's
clock, from the first to the last instruction of its work. It has in it: the bell's way to the host, the worker's
poll, the answer's way back, the wait that wakes, the start of the kernel after it.
"""

import argparse
import ctypes
import importlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from Cython.Build import cythonize
from setuptools import Distribution, Extension

from freetoken.device.cuda import WAITS, CudaDevice
from freetoken.duties import Duty, Steps, Worker

KERNELS = """
typedef unsigned long long u64;
static __device__ u64 now() { u64 t; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)); return t; }

// step: how many have begun. times: (steps, layers, 2)
extern "C" __global__ void begin(long long *step) { *step += 1; }

extern "C" __global__ void ask(const long long *step, volatile long long *question, unsigned *bell, u64 *times,
                               int layer, int layers, int steps) {
    *question = *step * layers + layer;
    times[((*step % steps) * layers + layer) * 2] = now();
    ft_ring(bell, 0);
}

extern "C" __global__ void compare(const long long *step, const volatile long long *answer, u64 *times,
                                   long long *wrong, int layer, int layers, int steps) {
    times[((*step % steps) * layers + layer) * 2 + 1] = now();
    if (*answer != (*step * layers + layer) * 31 + 7) *wrong += 1;
}
"""


def compile_here(name: str) -> Any:
    """Compile a Cython module that lies beside this file into a temporary folder, and import it."""
    root, out = Path(__file__).resolve().parents[1], tempfile.mkdtemp()
    headers = [str(root / "freetoken" / folder) for folder in ("duties", "kernels", "memory")]
    extension = Extension(name, [str(root / "benchmarks" / f"{name}.pyx")], headers, extra_compile_args=["-O2"])
    modules = cythonize([extension], include_path=[str(root)], build_dir=out, quiet=True)
    command = Distribution({"ext_modules": modules}).get_command_obj("build_ext")
    command.build_lib = command.build_temp = out
    command.ensure_finalized()
    command.run()
    sys.path.insert(0, out)
    return importlib.import_module(name)


class Replays:
    """A model's step, with or without statistics: kernels on a stream beside."""

    def __init__(self, device: CudaDevice, o: argparse.Namespace, timed: Any, statistics: bool, python: bool) -> None:
        self.device, self.o = device, o
        self.worker = Worker("experts")
        self.steps = Steps(device, [self.worker], deadline=30)
        on, layers = device.torch_device, o.layers
        begin, ask, compare = device.compile(KERNELS, "begin", "ask", "compare")
        questions, answers = (device.host_tensor((layers, 1), torch.int64) for _ in range(2))
        self.step_number = torch.full((1,), -1, dtype=torch.int64, device=on)
        self.wrong = torch.zeros(1, dtype=torch.int64, device=on)
        self.times = torch.zeros(o.steps, layers, 2, dtype=torch.int64, device=on)
        x, y = torch.zeros(2048, device=on), torch.zeros(2048, device=on)
        x.add_(1), y.add_(1)
        bells, flags = device.flags(layers), device.flags(layers)
        rest = -(-max(0, o.nodes - 3 * layers - 2) // layers)  # the bell is in `ask`
        step, wrong, times = self.step_number.data_ptr(), self.wrong.data_ptr(), self.times.data_ptr()

        def build(stream: Any) -> None:
            stream.kernel(lambda: begin(step))
            for i in range(layers):
                bell, question, answer = (device.pointer(a) for a in (bells[i], questions[i], answers[i]))
                sizes = [ctypes.c_int(n) for n in (i, layers, o.steps)]
                side = stream.fork() if statistics else None
                stream.kernel(lambda: ask(step, question, bell, times, *sizes))  # noqa: B023
                stream.wait(flags[i])
                stream.kernel(lambda: compare(step, answer, times, wrong, *sizes))  # noqa: B023
                for _ in range(rest):
                    stream.kernel(lambda: x.add_(1))
                if side:
                    for _ in range(4):
                        side.kernel(lambda: y.add_(1))
                    stream.join(side)
            stream.ring(self.steps.finished_flag)

        random = np.random.default_rng(0)
        self.lasts = random.exponential(o.delay_us * 1e3, (layers, o.steps)).astype(np.int64)
        self.took = np.zeros((layers, o.steps), np.int64)
        places = [(questions[i].numpy(), answers[i].numpy(), self.lasts[i], self.took[i]) for i in range(layers)]
        works = [timed.TimedDuty(*place) for place in places]
        if python:
            works = [self._python_duty(*place) for place in places]
        self.graph = device.capture(build)
        duties = [Duty("experts", i, works[i], flags[i], bells[i]) for i in range(layers)]
        self.step = self.steps.bind(self.graph, {self.worker: duties})

    @staticmethod
    def _python_duty(question: Any, answer: Any, lasts: Any, took: Any) -> Any:
        done = iter(range(len(lasts)))

        def work() -> None:
            begin = time.monotonic_ns()
            i = next(done)
            answer[0] = question[0] * 31 + 7
            while time.monotonic_ns() - begin < lasts[i]:
                pass
            took[i] = time.monotonic_ns() - begin

        return work

    def run(self) -> dict[str, float]:
        """All steps, two at once; what was measured. Raises if an answer was wrong."""
        launches, before = [], None
        inner = self.device.launch

        def launch(graph: Any) -> None:
            begin = time.perf_counter()
            inner(graph)
            launches.append(time.perf_counter() - begin)

        self.device.launch = launch  # type: ignore[method-assign]
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in range(self.o.steps):
            number = self.steps.launch(self.step)
            if before is not None:
                self.steps.wait(before)
            before = number
        self.steps.wait(number)
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        self.device.launch = inner  # type: ignore[method-assign]
        torch.cuda.synchronize()
        asked, answered = self.times.cpu().numpy().astype(np.int64).transpose(2, 1, 0)
        hand_off = (answered - asked - self.took)[:, 10:].ravel() * 1e-3  # the first steps load kernels
        if self.wrong.item() or self.step_number.item() != self.o.steps - 1:
            raise SystemExit(f"{self.wrong.item()} wrong answers in {self.step_number.item() + 1} steps")
        time.sleep(0.2)  # until nobody spins any more
        idle, idle_cpu = time.perf_counter(), time.process_time()
        time.sleep(1.0)
        idle_cpu = (time.process_time() - idle_cpu) / (time.perf_counter() - idle)
        self.steps.close()
        return {
            "nodes": self.graph.nodes,
            "steps": self.o.steps,
            "ms/step": wall / self.o.steps * 1e3,
            "hand-off p50 us": float(np.percentile(hand_off, 50)),
            "p99": float(np.percentile(hand_off, 99)),
            "max": float(hand_off.max()),
            "launch p50 us": float(np.percentile(launches, 50)) * 1e6,
            "p99 ": float(np.percentile(launches, 99)) * 1e6,
            "CPUs running": cpu / wall,
            "idle": idle_cpu,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--nodes", type=int, default=5000)
    parser.add_argument("--delay-us", type=float, default=100, help="of a duty, on average (exponential)")
    parser.add_argument("--duties", nargs="+", choices=("C", "Python"), default=["C", "Python"], help="which to run")
    o = parser.parse_args()
    timed = compile_here("timed_duty")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {o.layers} waits, duties of {o.delay_us:g} us")
    rows = []
    for kind in WAITS:
        for statistics, duties in ((False, "C"), (True, "C"), (False, "Python")):
            if duties not in o.duties:
                continue
            device = CudaDevice(waits=kind)
            found = Replays(device, o, timed, statistics, duties == "Python").run()
            device.close()
            labels = [kind, duties, "yes" if statistics else "no"]
            if not rows:
                rows.append(["waits", "duty", "statistics", *found])
            rows.append([*labels, *(f"{value:.4g}" if value < 1e4 else f"{value:.0f}" for value in found.values())])
            print("; ".join(f"{name} {value}" for name, value in zip(*rows[:: len(rows) - 1], strict=True)), flush=True)
    for row in (rows[0], ["---"] * len(rows[0]), *rows[1:]):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
