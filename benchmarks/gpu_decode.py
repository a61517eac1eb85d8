"""Decodes with a synthetic model of real shape, and says how far from the limits of the machine that is.

    python benchmarks/gpu_decode.py --model gpt-oss-120b --layers 12 --strategy offload resident --cache 0.25 0.5 \\
        --tokens 256 --out table.jsonl

A row is appended to the table as soon as it is measured; what the table has already is not measured again. Tokens per
second are the median, and 10th to 90th percentile, over blocks of 8 tokens, with a wait for the device only at a
block's ends. Two limits stand beside them: the bytes of the step's experts alone, at the rates that were measured just
before (`rates.py`); and a run, or with --graph a replay, of the same model whose experts do nothing, plus these bytes.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from race import processor
from rates import Rates, byte_seconds, measure, wait_for
from synthetic import SHAPES, Routing, Synthetic, draw_routes, stubbed
from transformers import DynamicCache

import freetoken
from freetoken import formats, settings
from freetoken.errors import DeviceError, FreeTokenError, UnsupportedError
from freetoken.integration.device import place
from freetoken.integration.fixed_cache import FixedForward, cache_argument, why_not_fixed
from freetoken.integration.operator import layer_of
from freetoken.offload.experts import DeviceExperts
from freetoken.offload.pinning import REFUSED
from freetoken.offload.usage import Usage
from freetoken.units import format_bytes

BLOCK = 8
"""Tokens between two looks at the clock."""
PROFILED = 8
"""Steps of a profile."""
STUB_BLOCKS = 8
"""At most so many blocks with experts that do nothing."""
PREFILLS = 3
"""Times that a prompt is read, after one that is not timed."""
WITH_CACHE = ("offload", "hybrid")
STRATEGIES = ("cpu", "offload", "hybrid", "resident")
QUANTILES = ("mean", "p50", "p99")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KEY = (
    "what", "model", "layers", "format", "strategy", "cache", "batch", "skew", "locality", "seed", "dtype", "device",
    "threads", "tokens", "warmup", "graph", "captures", "compile", "attention", "prefill",
)  # fmt: skip
"""What makes a row the same as another: all that was asked for, and where."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Counters:
    """What a model has counted since it was put on a device. slots: None where it has no cache of experts.

    hits, misses: distinct experts of a step that were in slots or not. moved: bytes copied over the link for the latter
    and for whole layers.
    """

    slots: int | None = None
    hits: int = 0
    misses: int = 0
    moved: int = 0

    def since(self, before: "Counters") -> "Counters":
        """What was counted after `before`."""
        return Counters(self.slots, self.hits - before.hits, self.misses - before.misses, self.moved - before.moved)

    @property
    def hit_rate(self) -> float | None:
        """Share of experts that were in slots; None before any was looked up."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    def moved_for_each(self, times: int) -> float | None:
        """Bytes over the link for each of so many; None without a cache."""
        return None if self.slots is None else self.moved / times


def read_counters(model: Any) -> Counters:
    """From `freetoken.report`; waits for the device."""
    usage = getattr(freetoken.report(model), "device", None)
    counted = None if usage is None else usage.statistics
    if counted is None:
        return Counters()
    return Counters(usage.slots, counted.hits, counted.misses, counted.fetched_bytes + usage.streamed_bytes)


def put_on(model: Any, device: torch.device, strategy: str, cache: Any) -> None:
    """Move the dense part and the work of the experts to where they are wanted; returns when banks are pinned."""
    if device.type == "cpu":
        return
    place(model, device=str(device), strategy=strategy, cache="auto" if cache is None else cache)
    pinned = experts_of(model).wait_until_pinned()
    if pinned is not None and pinned.layers(REFUSED):
        print(f"{strategy}: {pinned}", file=sys.stderr, flush=True)


def experts_of(model: Any) -> DeviceExperts:
    """Those of a model on a device."""
    experts: DeviceExperts = next(filter(None, map(layer_of, model.modules()))).experts
    return experts


class Table:
    """Rows in a file, one JSON object a line, each written when it is there; or in memory alone."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.rows: list[Row] = []
        self._torn = False
        if file is not None and file.exists():
            text = file.read_text()
            self._torn = bool(text) and not text.endswith("\n")
            for number, line in enumerate(text.splitlines(), 1):
                try:
                    self.rows.append(json.loads(line))
                except ValueError:
                    print(f"{file}:{number} is no row and is left alone: {line[:60]!r}", file=sys.stderr)

    def find(self, wanted: Row) -> Row | None:
        """The row that was measured as `wanted` asks, if there is one."""
        return next((row for row in self.rows if all(row.get(name) == wanted.get(name) for name in KEY)), None)

    def add(self, row: Row) -> None:
        """Append a row, on the disk when this returns."""
        self.rows.append(row)
        if self.file is None:
            return
        with self.file.open("a") as out:
            out.write("\n" * self._torn + json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())
        self._torn = False


class Decoder:
    """Greedy decoding in transformers' own forward; nothing of a step waits for the device, nor it for the host.

    The cache is the one that `generate` has in graphs, but for a family that cannot step on it. length: tokens that
    there is room for.
    """

    def __init__(self, model: Any, batch: int, length: int, device: torch.device) -> None:
        self.model, self.batch, self.device = model, batch, device
        self.fixed = None if why_not_fixed(model) else FixedForward(model, batch, length)
        self._length = length
        self.restart()

    def restart(self) -> None:
        """Forget the sequences, and the graph."""
        if self.fixed is not None:
            self.fixed.restart(self.batch)
            self.token, self.position = self.fixed.tokens, self.fixed.positions
        else:
            self._cache = DynamicCache(config=self.model.config)
            self.token = torch.zeros(self.batch, 1, dtype=torch.int64, device=self.device)
            self.position = torch.zeros(self.batch, 1, dtype=torch.int64, device=self.device)
        self._graph: Any = None
        self._experts: DeviceExperts | None = None
        self._last = 0

    def read(self, ids: torch.Tensor) -> None:
        """A prompt, (batch, tokens)."""
        positions = self.position + torch.arange(ids.shape[1], device=self.device)
        self._forward(ids, positions)

    def capture(self, experts: DeviceExperts | None = None) -> None:
        """From now on a step is a replay of this one, which is run once before that: kernels are compiled.

        Raises `UnsupportedError` where a step waits for the host.
        """
        graph: Any = None
        try:
            if self.fixed is None:
                raise RuntimeError("its cache grows")
            with self.fixed.compiled(self.batch, self._length):
                graph = self._capture() if experts is None else experts.capture(self.step)
        except (RuntimeError, DeviceError) as error:
            name = type(self.model).__name__
            raise UnsupportedError(f"a step of {name} cannot be captured: {error}", feature="graph") from error
        self._graph, self._experts = graph, experts

    def _capture(self) -> torch.cuda.CUDAGraph:
        self.step()
        wait_for(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph

    def steps(self, n: int) -> None:
        """So many tokens of each sequence."""
        with contextlib.nullcontext() if self._experts is None else self._experts.stepping():
            for _ in range(n):
                self.step()
            self.wait()

    def step(self) -> None:
        """One token of each sequence."""
        if self._experts is not None:
            self._last = self._experts.launch(self._graph)
        elif self._graph is not None:
            self._graph.replay()
        else:
            self._forward(self.token, self.position)

    def wait(self) -> None:
        """Until all steps of a graph with experts are done: they may wait for the host, so the device is not asked."""
        if self._experts is not None:
            self._experts.wait(self._last)

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor) -> None:
        if self.fixed is not None:
            self.fixed.read(ids, positions, self._length)
            self.fixed.feed(self.fixed.logits.argmax(-1), ids.shape[1])
            return
        given = {cache_argument(self.model): self._cache}
        out = self.model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **given)
        self.token.copy_(out.logits[:, -1:].argmax(-1))
        self.position.add_(ids.shape[1])


def time_blocks(decoder: Decoder, blocks: int) -> list[float]:
    """Seconds of each block of 8 steps."""
    found = []
    for _ in range(blocks):
        wait_for(decoder.device)
        start = time.perf_counter()
        decoder.steps(BLOCK)
        wait_for(decoder.device)
        found.append(time.perf_counter() - start)
    return found


def print_profile(decoder: Decoder, steps: int = PROFILED, lines: int = 30) -> None:
    """Where the time of a step goes: kernels and copies by their time, as CUPTI sees them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decoder.steps(steps)
        wait_for(decoder.device)
    found: dict[str, list[float]] = {}
    spans = []
    for event in profile.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            found.setdefault(event.name[:90], []).append(event.time_range.elapsed_us())
            spans.append((event.time_range.start, event.time_range.end))
    if not spans:
        print("no operation of the device was seen")
        return
    busy, end = 0.0, 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    whole = end - min(spans)[0]
    took = f"a step takes {whole / steps:.0f} us, {busy / steps:.0f} of them with something running"
    print(f"{took}, {len(spans) // steps} operations")
    print("| us a step | times | us each | what |\n|---|---|---|---|")
    for name, times in sorted(found.items(), key=lambda item: -sum(item[1]))[:lines]:
        print(f"| {sum(times) / steps:.1f} | {len(times) / steps:.1f} | {statistics.median(times):.1f} | {name} |")


def time_prompts(decoder: Decoder, ids: torch.Tensor, before: Callable[[], object], times: int = PREFILLS) -> float:
    """Median seconds of a prompt read into an empty cache. before: called before each."""
    found = []
    for _ in range(times):
        decoder.restart()
        before()
        wait_for(decoder.device)
        start = time.perf_counter()
        decoder.read(ids)
        wait_for(decoder.device)
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def distinct(ids: torch.Tensor) -> float:
    """Experts that a step reads, over all layers, on average; ids as `draw_routes` gives them, (L, S, B, K)."""
    each = ids.flatten(2).sort(dim=2).values
    return float((1 + (each[:, :, 1:] != each[:, :, :-1]).sum(2)).double().mean(1).sum())


def limits(tokens: int, stub_seconds: float, bytes_seconds: float | None) -> tuple[float | None, float | None]:
    """Tokens per second that the bytes allow alone, and beside a run without experts."""
    if bytes_seconds is None:
        return None, None
    return tokens / bytes_seconds, tokens / (stub_seconds + bytes_seconds)


class Bench:
    """Rows of one format: banks are built when the first of them is missing from the table."""

    def __init__(self, o: argparse.Namespace, table: Table, fmt: str) -> None:
        self.o, self.table, self.fmt = o, table, fmt
        self.device = device_of(o.device)
        self._synthetic: Synthetic | None = None

    @property
    def synthetic(self) -> Synthetic:
        """The banks."""
        if self._synthetic is None:
            o = self.o
            shape, fmt = SHAPES[o.model], formats.get(self.fmt)
            more = {"dtype": DTYPES[o.dtype], "threads": o.threads, "seed": o.seed, "check_memory": o.memory_check}
            made = self._synthetic = Synthetic(shape, fmt, o.layers, **more)
            note = f"{made.plan.layers} layers, {format_bytes(made.bank_bytes)} of experts"
            print(f"{self.fmt}: {note} in {made.seconds:.1f} s, {made.bound[0].choice}", flush=True)
        return self._synthetic

    def wanted(self, strategy: str, cache: Any) -> list[Row]:
        """The rows to measure, as far as they are known before."""
        o = self.o
        known = {
            "model": o.model, "layers": o.layers, "format": self.fmt, "strategy": strategy,
            "cache": cache if strategy in WITH_CACHE else None, "batch": o.batch, "skew": o.skew,
            "locality": o.locality, "seed": o.seed, "dtype": o.dtype, "device": device_name(self.device),
            "threads": o.threads,
        }  # fmt: skip
        how = {"tokens": o.tokens, "warmup": o.warmup, "graph": o.graph, "compile": settings.COMPILE.read()}
        how |= {"attention": settings.ATTENTION.read(), "captures": settings.GRAPH.read()}
        rows = [{"what": "decode", **known, **how, "prefill": None}]
        if o.prefill:
            rows.append({"what": "prefill", **known, **dict.fromkeys(how), "prefill": o.prefill})
        return rows

    def run(self, strategy: str, cache: Any) -> list[Row]:
        """The rows of a strategy and cache, measured now or before."""
        wanted = self.wanted(strategy, cache)
        missing = [row for row in wanted if self.table.find(row) is None]
        if missing:
            rates = self._rates()
            model = self.synthetic.model(self.device)
            put_on(model, self.device, strategy, cache)
            for row in missing:
                measure_row = self._decode if row["what"] == "decode" else self._prefill
                measured = measure_row(model, row, rates)
                self.table.add(row | measured)
                print(describe(row | measured), flush=True)
        found = [self.table.find(row) for row in wanted]
        return [row for row in found if row is not None]

    def _routes(self, steps: int) -> torch.Tensor:
        o, made = self.o, self.synthetic
        sizes = (made.plan.layers, steps, o.batch, made.plan.n_experts, made.plan.top_k)
        return draw_routes(*sizes, skew=o.skew, locality=o.locality, seed=o.seed)

    def _rates(self) -> Rates:
        made = self.synthetic
        found = measure(self.device, made.memory, len(made.bound[0].executor.workers), made.dtype)
        free_device_memory()
        return found

    def _decode(self, model: Any, row: Row, rates: Rates) -> Row:
        o, made = self.o, self.synthetic
        blocks, stub_blocks = o.tokens // BLOCK, min(STUB_BLOCKS, o.tokens // BLOCK)
        steps = o.warmup + blocks * BLOCK
        more = PROFILED if o.profile else 0
        ids = self._routes(steps)
        routing = Routing(model, ids, self.device)
        with torch.no_grad():
            room = steps + BLOCK + more + 1  # a step before the stub is captured
            decoder = Decoder(model, o.batch, room, self.device)
            decoder.steps(o.warmup)
            if o.graph == "all":
                decoder.capture(experts_of(model))
                experts_of(model).reset_statistics()
            before = read_counters(model)
            seconds = time_blocks(decoder, blocks)
            counters = read_counters(model).since(before)
            usage = freetoken.report(model).device
            if o.profile:
                print_profile(decoder)
            decoder.restart()
            routing.restart()
            with stubbed(model):
                decoder.steps(BLOCK)
                if o.graph != "none":
                    decoder.capture()
                stubs = time_blocks(decoder, stub_blocks)
        routing.remove()
        per_second = BLOCK * o.batch / np.array(seconds)
        low, high = np.percentile(per_second, (10, 90))
        routed = distinct(ids[:, o.warmup :]) * made.expert_bytes
        fetched = counters.moved_for_each(blocks * BLOCK)
        missing = counters.misses / (blocks * BLOCK) * made.expert_bytes
        stub = statistics.median(stubs) / BLOCK
        least = byte_seconds(row["strategy"], routed, fetched, missing, rates)
        by_bytes, by_stub = limits(o.batch, stub, least)
        return {
            **finish_row(counters, rates, float(np.median(per_second)), by_bytes, by_stub),
            "p10": float(low),
            "p90": float(high),
            "hit_rate": counters.hit_rate,
            "routed_bytes_per_token": routed / o.batch,
            "fetched_bytes_per_token": None if fetched is None else fetched / o.batch,
            "stub_ms": stub * 1e3,
            **({} if usage is None else hybrid_row(usage)),
        }

    def _prefill(self, model: Any, row: Row, rates: Rates) -> Row:
        o, made, plan = self.o, self.synthetic, self.synthetic.plan
        tokens = o.prefill * o.batch
        ids = self._routes(o.prefill)
        routing = Routing(model, ids, self.device)
        vocabulary = model.config.vocab_size
        prompt = torch.randint(vocabulary, (o.batch, o.prefill), generator=torch.Generator().manual_seed(o.seed))
        prompt = prompt.to(self.device)
        with torch.no_grad():
            decoder = Decoder(model, o.batch, o.prefill, self.device)
            time_prompts(decoder, prompt, routing.restart, 1)
            before = read_counters(model)
            seconds = time_prompts(decoder, prompt, routing.restart)
            counters = read_counters(model).since(before)
            with stubbed(model):
                time_prompts(decoder, prompt, routing.restart, 1)
                stub = time_prompts(decoder, prompt, routing.restart)
        routing.remove()
        routed = distinct(ids.transpose(1, 2).reshape(ids.shape[0], 1, -1, ids.shape[3])) * made.expert_bytes
        copied = counters.moved_for_each(PREFILLS)
        least = byte_seconds("offload" if row["strategy"] == "hybrid" else row["strategy"], routed, copied, 0.0, rates)
        compute = stub
        if rates.product is not None and row["strategy"] != "cpu":
            products = 3 * plan.layout.hidden * plan.layout.intermediate
            compute += 2 * products * tokens * plan.layers * plan.top_k / rates.product
        slowest = max(least or 0.0, compute)
        return {
            **finish_row(counters, rates, tokens / seconds, limits(tokens, stub, least)[0], tokens / slowest),
            "seconds": seconds,
            "copied_bytes": copied,
            "copy_seconds": least,
            "compute_seconds": compute,
            "stub_ms": stub * 1e3,
        }


def hybrid_row(usage: Usage) -> Row:
    """What rows of graphs that wait for the host say besides; times in microseconds."""
    times = {"waited": usage.waited, "hand_off": usage.hand_off, "host_work": usage.host_work}
    return {
        "split": usage.split,
        "fetched_per_token": usage.fetched_per_token,
        "computed_per_token": usage.computed_per_token,
        **{f"{name}_{what}_us": getattr(found, what) * 1e6 for name, found in times.items() for what in QUANTILES},
    }


def finish_row(counters: Counters, rates: Rates, speed: float, by_bytes: float | None, limit: float | None) -> Row:
    """What rows of both kinds say."""
    return {
        "tokens_per_s": speed,
        "slots": counters.slots,
        "limit_bytes": by_bytes,
        "limit": limit,
        "share": None if limit is None else speed / limit,
        "rates": vars(rates),
        "torch": torch.__version__,
        "freetoken": freetoken.__version__,
    }


def device_of(name: str) -> torch.device:
    """With its number: not everything takes a `cuda` without one."""
    device = torch.device(name)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def free_device_memory() -> None:
    """Of what nobody refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_name(device: torch.device) -> str:
    """As people call it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor()


def number(value: float | None, digits: int = 1, scale: float = 1.0) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value / scale:.{digits}f}"


def describe(row: Row) -> str:
    """A row as a line of text."""
    head = f"{row['what']} {row['format']} {row['strategy']}{'' if row['cache'] is None else ' ' + str(row['cache'])}"
    if row["what"] == "prefill":
        found = f"{row['prefill']} tokens in {row['seconds']:.3f} s, {row['tokens_per_s']:.1f} tokens/s"
        parts = f"bytes {number(row['copy_seconds'], 3)} s, compute {number(row['compute_seconds'], 3)} s"
        return f"{head}: {found}; {parts}; {number(row['share'], 2)} of the limit"
    found = f"{row['tokens_per_s']:.1f} tokens/s ({row['p10']:.1f} to {row['p90']:.1f})"
    moved = f"{number(row['fetched_bytes_per_token'], 3, 1e9)} GB fetched of {row['routed_bytes_per_token'] / 1e9:.3f}"
    ends = f"bytes alone {number(row['limit_bytes'])}, stub {row['stub_ms']:.2f} ms + bytes {number(row['limit'])}"
    return f"{head}: {found}, hit rate {number(row['hit_rate'], 3)}, {moved}; {ends}; share {number(row['share'], 2)}"


def markdown(rows: Sequence[Row]) -> str:
    """The table for people."""
    names = (
        "what", "format", "strategy", "cache", "batch", "tokens/s", "p10 to p90", "hit rate", "GB fetched/token",
        "limit: bytes", "limit: stub + bytes", "share",
    )  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for row in rows:
        spread = f"{number(row.get('p10'))} to {number(row.get('p90'))}" if row["what"] == "decode" else "-"
        what = row["what"] if row["what"] == "decode" else f"prefill {row['prefill']}"
        cells = [what, row["format"], row["strategy"], "-" if row["cache"] is None else row["cache"], row["batch"]]
        cells += [number(row["tokens_per_s"]), spread, number(row.get("hit_rate"), 3)]
        cells += [number(row.get("fetched_bytes_per_token"), 3, 1e9), number(row["limit_bytes"])]
        cells += [number(row["limit"]), number(row["share"], 2)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def parse_cache(text: str) -> Any:
    """ "auto", a number of slots, a share such as 0.25 or 25%, or bytes such as 4GiB."""
    if text.endswith("%"):
        return float(text[:-1]) / 100
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What to measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", choices=tuple(SHAPES), default="qwen3-30b-a3b")
    add("--layers", type=int, help="of the model, the first so many (default: all)")
    add("--format", nargs="+", choices=formats.names(), metavar="FORMAT", help="of experts (default: the model's)")
    add("--strategy", nargs="+", choices=STRATEGIES, help="default: offload, on a CPU cpu")
    add(
        "--cache",
        nargs="+",
        type=parse_cache,
        default=["auto"],
        help="auto, slots, 0.25, 25%%, 4GiB; for offload and hybrid",
    )
    add("--tokens", type=int, default=128, help="decoded and timed, in blocks of 8")
    add("--warmup", type=int, default=32, help="decoded before")
    add("--prefill", type=int, default=0, metavar="N", help="also read a prompt of so many tokens")
    add("--batch", type=int, default=1, help="sequences at once")
    add("--skew", type=float, default=0.0, help="exponent of Zipf's law of experts; 0 is uniform")
    add("--locality", type=float, default=0.0, help="share of a token's experts that stay from the token before")
    add("--seed", type=int, default=0)
    add(
        "--graph",
        choices=("none", "stub", "all"),
        default="none",
        help="replay the stub, or the step too, as a CUDA graph",
    )
    add("--compile", action="store_true", help="let torch compile layers of what is replayed")
    add("--profile", action="store_true", help="also print where the time of a step goes")
    add("--dtype", choices=tuple(DTYPES), default="bfloat16", help="of the dense part")
    add("--threads", type=lambda text: text if text == "auto" else int(text), default="auto", help="CPU workers")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, help="JSON lines; rows that it has already are not measured again")
    add("--no-memory-check", dest="memory_check", action="store_false", help="where memory grows as it is used")
    o = parser.parse_args(arguments)
    if o.tokens < BLOCK or o.tokens % BLOCK or min(o.warmup, o.prefill) < 0 or o.batch < 1:
        parser.error(
            f"--tokens is a multiple of {BLOCK}, --warmup and --prefill are not negative, --batch is 1 or more"
        )
    if not 0 <= o.locality <= 1:
        parser.error("--locality is a share, from 0 to 1")
    whole = SHAPES[o.model].fields["num_hidden_layers"]
    if o.layers is not None and not 1 <= o.layers <= whole:
        parser.error(f"{o.model} has {whole} layers; --layers is 1 to {whole}")
    o.layers = o.layers or whole
    o.format = o.format or [SHAPES[o.model].format]
    on_cpu = torch.device(o.device).type == "cpu"
    o.strategy = o.strategy or ["cpu" if on_cpu else "offload"]
    if on_cpu and (o.strategy != ["cpu"] or o.graph != "none"):
        parser.error("strategies other than cpu, and graphs, need a GPU: give --device cuda")
    if o.compile:
        os.environ[settings.COMPILE.name] = "on"
    if o.compile and o.graph == "none":
        parser.error("--compile is for steps that are replayed: give --graph stub or all")
    if o.graph == "all" and not o.warmup:
        parser.error("--graph all needs a step before it: give --warmup")
    return o


def combinations(o: argparse.Namespace) -> Iterable[tuple[str, Any]]:
    """Strategies, and caches for that which has one."""
    for strategy in o.strategy:
        yield from itertools.product([strategy], o.cache if strategy in WITH_CACHE else [None])


def main(arguments: Sequence[str] | None = None) -> None:
    o = parse(arguments)
    table, rows, failed = Table(o.out), [], []
    print(f"{o.model}, {o.layers} layers, {device_name(device_of(o.device))}, torch {torch.__version__}", flush=True)
    for name in o.format:
        bench = Bench(o, table, name)
        for strategy, cache in combinations(o):
            try:
                rows += bench.run(strategy, cache)
            except (FreeTokenError, torch.OutOfMemoryError) as error:
                failed.append(f"{name} {strategy} {'' if cache is None else cache}: {error}")
                print(failed[-1], file=sys.stderr, flush=True)
            free_device_memory()
        del bench
    print(markdown(rows))
    if failed:
        sys.exit(f"{len(failed)} of the rows could not be measured")


if __name__ == "__main__":
    main()
