"""`load`: an ordinary transformers model whose experts lie in host banks.

headers checked, memory checked        nothing allocated yet (checkpoint/, memory/budget.py)
memory watched from here on            a load that would starve the machine stops (memory/guard.py)
transformers builds the skeleton       experts modules lose their parameters (quantizer.py, plan.py)
transformers reads the dense part      nothing may be missing or of another shape (plan.py)
banks are filled, or files mapped       checkpoint/load.py
    torch's threads are clamped meanwhile  threads.py
each experts module gets its layer     executor.py, operator.py

A load that fails or is interrupted gives everything back at once, whoever keeps its exception.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
import transformers
from tqdm import tqdm
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)
from transformers.integrations.moe import ExpertsInterface

from freetoken import formats, settings, topology
from freetoken.banks import Bank, LayerBank, make_bank
from freetoken.checkpoint.experts import ExpertScan
from freetoken.checkpoint.experts import LayerExperts as ExpertGroup
from freetoken.checkpoint.gguf import GgufCheckpoint
from freetoken.checkpoint.inspect import check_config, experts_per_token, needed_bytes, require_memory
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.open import open_any, scan_any
from freetoken.checkpoint.records import RecordExperts, require_shareable
from freetoken.checkpoint.safetensors import Checkpoint
from freetoken.device.base import Device
from freetoken.errors import CheckpointError, ConfigError, FreeTokenError
from freetoken.executor import BoundLayer, Executor
from freetoken.formats.base import Format
from freetoken.integration import gguf
from freetoken.integration.device import check_asked, check_room, move, opened
from freetoken.integration.hub import local_folder
from freetoken.integration.operator import IMPLEMENTATION, attach_layer, experts_forward, layer_of, refuse_after_fork
from freetoken.integration.plan import LoadPlan
from freetoken.integration.quantizer import BeforeWeights, FreetokenConfig
from freetoken.integration.threads import clamp_threads
from freetoken.memory import guard, residency
from freetoken.memory.guard import Guard
from freetoken.memory.placement import Placer, choose
from freetoken.offload.room import Asked
from freetoken.offload.slots import LayerExperts

logger = logging.getLogger(__name__)

ExpertsInterface.register(IMPLEMENTATION, experts_forward)

_DENSE_LOAD = threading.Lock()
"""transformers patches itself while it builds a model: two loads at once lose tied weights, for good."""

_OURS = (
    "config", "device_map", "experts_implementation", "gguf_file", "ignore_mismatched_sizes", "output_loading_info",
    "quantization_config", "state_dict",
)  # fmt: skip
"""Arguments of from_pretrained that load sets itself or that would bypass it."""

P = ParamSpec("P")
R = TypeVar("R")


def _leaves_nothing(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a call give back its memory when it fails, and stop the thread that progress bars have started.

    A traceback holds the variables of its frames, and a console or notebook holds the last one: half-filled banks would
    stay until the next error.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        monitor = tqdm.monitor
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            _forget_variables(error)
            gc.collect()
            raise
        finally:
            if monitor is None and tqdm.monitor is not None:
                tqdm.monitor.exit()  # type: ignore[no-untyped-call]
                tqdm.monitor = None

    return call


def _forget_variables(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@_leaves_nothing
def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    expert_format: str | None = None,
    shared: bool = False,
    threads: int | Literal["auto"] = "auto",
    placement: str | int | None = None,
    device: str | torch.device | Device = "cpu",
    strategy: str | None = None,
    cache: str | float = "auto",
    max_fetch: str | float = "auto",
    dtype: torch.dtype | str | None = None,
    progress: bool | None = None,
    **model_kwargs: Any,
) -> tuple[Any, Any]:
    """Load a mixture-of-experts checkpoint: (model, tokenizer), the experts in quantized host banks.

    path_or_hub_id: a folder of safetensors, one that `ft convert` made, a GGUF file (any of its parts), or a hub id.
    expert_format: None keeps what the checkpoint holds; a format's name re-quantizes expert by expert while loading.
    shared: map the experts of a converted folder read-only instead of reading them: all processes that do so share one
    copy. Checksums are verified once, now; a file that is changed in place afterwards changes the model. threads:
    workers for experts, "auto" for one per allowed physical core, of this rank's share where a launcher started several
    here. placement: where banks that are not shared lie on a machine of several NUMA nodes: "auto", "off",
    "interleave", "shard" or a node id; None is FREETOKEN_CPU_MOE_NUMA.

    device: "cpu", or "cuda" or "cuda:N" for the dense part. strategy: where experts are computed then. "offload": on
    the device, from slots for the ones used last, into which missing ones are fetched from pinned host memory.
    "hybrid": the same, but while some of what is missing is fetched the host computes the rest. "resident": on the
    device, which holds all of them; the host's copy is dropped. "cpu": on the host. None takes "resident" where all
    fit, else "offload". cache: how much of the device's memory is for slots: "auto" for what is free, a size such as
    "4GiB", a share of all experts (0.25), or a number of slots. max_fetch: of hybrid, what is fetched of the missing
    experts of a layer: "auto" for what is measured to be done first, a share (0.5), or at most a number of experts.
    Banks are pinned in the background; until then, and where it is refused, their layers are computed on the host.

    dtype: of the dense part (default: the checkpoint's; bfloat16 for GGUF). progress: bars; None shows them on a
    terminal only. model_kwargs go to transformers' from_pretrained. The tokenizer is None where there is none.

    Raises `CheckpointError`, `ConfigError`, `UnsupportedError` or `CapacityError`, before anything large is allocated.
    """
    show = sys.stderr.isatty() if progress is None else progress
    asked = Asked(strategy, cache, max_fetch)
    check_asked(device, asked)
    for name in _OURS:
        if name in model_kwargs:
            raise ConfigError(
                f"load() takes no {name}: it sets that itself, for experts in host banks and a dense part on the CPU",
                name=name,
                value=model_kwargs[name],
                expected="no such argument",
            )
    fmt = None if expert_format is None else formats.get(expert_format)
    machine = topology.read()
    workers = machine.workers(threads)
    where = choose(machine, workers, placement)
    folder = local_folder(path_or_hub_id, revision, token, trust_remote_code, show)
    found = scan_any(open_any(folder), fmt)
    if shared:
        require_shareable(found, fmt)
    check_config(found)
    config = _read_config(found.checkpoint, trust_remote_code)
    resolved = resolve_dtype(config, dtype)
    readers = require_memory(found, fmt, shared, resolved.itemsize, len(workers), where.pieces)
    with tqdm(total=found.scale_parts, desc="checking scales", disable=not show, delay=1, leave=False) as bar:
        found.check_scales(bar.update, readers)
    with opened(device) as target:
        if target is not None:
            _, dense = needed_bytes(found, fmt, resolved.itemsize)
            check_room(target, _shapes(found, fmt, config), dense, asked)
        executor, watch = Executor(workers, resolved, machine.why(threads), where), guard.from_settings()
        tokenizer = _load_tokenizer(found.checkpoint, trust_remote_code)
        plan = LoadPlan(found, fmt)
        with watch, clamp_threads(machine):
            with _DENSE_LOAD:
                model = _load_dense(config, resolved, plan, trust_remote_code, show, model_kwargs)
            _attach_experts(model, plan, executor, shared, readers, watch, show)
        if target is not None:
            move(model, target, asked, owned=target is not device)
    return model, tokenizer


def _shapes(found: ExpertScan, fmt: Format | None, config: Any) -> list[LayerExperts]:
    """What the layers of a checkpoint ask of a device, which its headers say; shards are not cut yet."""
    top_k = max(1, experts_per_token(config.get_text_config().to_dict()))
    return [LayerExperts(group.n_experts, top_k, (group.layout(fmt).nbytes,)) for group in found.groups]


def _read_config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    file = checkpoint.config_file
    try:
        if isinstance(checkpoint, GgufCheckpoint):
            return AutoConfig.for_model(**checkpoint.config)
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code)
    except Exception as error:  # its validators and converters raise many unrelated classes
        raise CheckpointError(
            f"{file}: transformers {transformers.__version__} cannot use it: {_first_line(error)}", file=str(file)
        ) from error
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def resolve_dtype(config: Any, dtype: torch.dtype | str | None) -> torch.dtype:
    """The dtype of the dense part: what was asked for or else what the config says; raises `ConfigError`."""
    value: Any = dtype if dtype not in (None, "auto") else getattr(config.get_text_config(), "dtype", None)
    if isinstance(value, str):
        value = getattr(torch, value, value)
    value = torch.bfloat16 if value is None else value
    if value not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"dtype {value!r} is not one of float32, bfloat16, float16",
            name="dtype",
            value=dtype,
            expected="float32, bfloat16, float16",
        )
    resolved: torch.dtype = value
    return resolved


def _load_dense(
    config: Any,
    dtype: torch.dtype,
    plan: LoadPlan,
    trust_remote_code: bool,
    show: bool,
    model_kwargs: dict[str, Any],
) -> Any:
    checkpoint = plan.scan.checkpoint
    loader: Any = _auto_class(config)
    source: Path | None = checkpoint.path
    state: dict[str, torch.Tensor] | None = None
    before_weights: BeforeWeights = plan.before_weights
    if isinstance(checkpoint, GgufCheckpoint):  # transformers takes a path or a state dict, and its Auto class a path
        loader, source, state = getattr(transformers, config.architectures[0]), None, {}
        before_weights = gguf.filling(state, plan)
    hooks = FreetokenConfig(plan.scan.dense, before_weights)
    with _transformers_bars(show):
        try:
            model, info = loader.from_pretrained(
                source,
                state_dict=state,
                config=config,
                dtype=dtype,
                quantization_config=hooks,
                experts_implementation=IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # else its error names no tensor; check_report raises ours
                **model_kwargs,
            )
        except FreeTokenError:
            raise
        except Exception as error:  # a model's constructor may raise anything
            raise CheckpointError(
                f"{checkpoint.path}: transformers {transformers.__version__} cannot load the dense part: "
                f"{_first_line(error)}",
                file=str(checkpoint.path),
            ) from error
    plan.check_report(info)
    plan.check_unexpected(model, info)
    plan.check_dense(model)
    return model


def _auto_class(config: Any) -> Any:
    """transformers' class for text alone; where a family has none, the one that also takes images."""
    kind = type(config)
    images_too = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if images_too else AutoModelForCausalLM


def _attach_experts(
    model: Any, plan: LoadPlan, executor: Executor, shared: bool, readers: int, watch: Guard, show: bool
) -> None:
    """readers: threads that bring experts into banks."""
    assert executor.placement is not None
    placer, step = Placer(executor.placement), executor.shard_step
    pairs = [(_make_bank(group, plan.format, shared, placer, step), group) for _, group, _ in plan.modules]
    total = sum(bank.nbytes for bank, _ in pairs)
    with banks_bar(total, show) as bar:

        def on_bytes(n: int) -> None:
            watch.check()
            bar.update(n)

        fill_banks(pairs, readers, on_bytes, executor.placement)
    for (module, _, activation), (bank, _) in zip(plan.modules, pairs, strict=True):
        attach_layer(module, executor.bind(bank, activation))
    finish(model)
    logger.info("%d expert layers, %d bytes in banks", len(pairs), total)


def banks_bar(total: int, show: bool) -> Any:
    """A bar of bytes of banks filled."""
    return tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="expert banks", disable=not show, delay=1
    )


def finish(model: Any) -> None:
    """What any model with banks is: its banks locked if that is set, without gradients, and refused after a fork."""
    if settings.MLOCK.read() == "on":
        for bank in (layer.bank for layer in map(layer_of, model.modules()) if isinstance(layer, BoundLayer)):
            for shard in bank.shards:
                residency.lock(shard.records)
    model.requires_grad_(False)
    refuse_after_fork(model)


def _make_bank(group: ExpertGroup, fmt: Format | None, shared: bool, placer: Placer, step: int) -> LayerBank:
    if shared and isinstance(group, RecordExperts):
        return Bank(group.layout(fmt), group.n_experts, group.map_records())
    return make_bank(group.layout(fmt), group.n_experts, placer, step)


def _load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    folder = checkpoint.path
    if isinstance(checkpoint, GgufCheckpoint):
        return gguf.load_tokenizer(checkpoint)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).exists() for name in names):
        logger.warning("%s holds no tokenizer; load() returns None for it", folder)
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(
            f"{folder}: its tokenizer cannot be used: {_first_line(error)}", file=str(folder)
        ) from error


@contextlib.contextmanager
def _transformers_bars(show: bool) -> Iterator[None]:
    """transformers draws its own bar on anything; quiet it where ours are quiet."""
    log = transformers.utils.logging
    was_on = log.is_progress_bar_enabled()
    if not show:
        log.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            log.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    """The first line that says something: one that ends in a colon is followed by the next."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return f"{type(error).__name__}: {text}" if isinstance(error, KeyError | TypeError | ArithmeticError) else text
