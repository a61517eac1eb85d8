"""`load`: an ordinary transformers model whose experts lie in host banks.

headers checked, memory checked        nothing allocated yet (checkpoint/, memory/budget.py)
transformers builds the skeleton       experts modules lose their parameters (quantizer.py)
transformers reads the dense part
banks are mapped and filled            checkpoint/load.py
each experts module gets its layer     executor.py, operator.py
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.core_model_loading import build_glob_alternation
from transformers.integrations.moe import ExpertsInterface

from freetoken import formats, topology
from freetoken.banks import Bank
from freetoken.checkpoint.experts import ExpertGroup, ExpertScan
from freetoken.checkpoint.inspect import experts_per_token, require_memory
from freetoken.checkpoint.load import fill_banks
from freetoken.checkpoint.safetensors import open_checkpoint
from freetoken.checkpoint.scan import scan
from freetoken.errors import CheckpointError, ConfigError, FreeTokenError, UnsupportedError
from freetoken.executor import Activation, Executor
from freetoken.formats.base import Format
from freetoken.integration.activation import find_activation
from freetoken.integration.hub import local_folder
from freetoken.integration.operator import IMPLEMENTATION, attach_layer, experts_forward, refuse_after_fork
from freetoken.integration.quantizer import FreetokenConfig

logger = logging.getLogger(__name__)

ExpertsInterface.register(IMPLEMENTATION, experts_forward)

_OURS = (
    "config", "device_map", "experts_implementation", "gguf_file", "ignore_mismatched_sizes", "output_loading_info",
    "quantization_config", "state_dict",
)  # fmt: skip
"""Arguments of from_pretrained that load sets itself or that would bypass it."""


def load(
    path_or_hub_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    expert_format: str | None = None,
    threads: int | Literal["auto"] = "auto",
    dtype: torch.dtype | str | None = None,
    progress: bool | None = None,
    **model_kwargs: Any,
) -> tuple[Any, Any]:
    """Load a mixture-of-experts checkpoint: (model, tokenizer), the experts in quantized host banks.

    path_or_hub_id: a folder of safetensors, or a hub id. expert_format: None keeps what the checkpoint holds; a
    format's name re-quantizes expert by expert while loading. threads: workers for experts, "auto" for one per
    allowed physical core. dtype: of the dense part (default: the checkpoint's). progress: bars; None shows them on
    a terminal only. model_kwargs go to transformers' from_pretrained. The tokenizer is None where there is none.

    Raises `CheckpointError`, `ConfigError`, `UnsupportedError` or `CapacityError`, before anything large is allocated.
    """
    show = sys.stderr.isatty() if progress is None else progress
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
    folder = local_folder(path_or_hub_id, revision, token, trust_remote_code, show)
    found = scan(open_checkpoint(folder))
    require_memory(found, fmt)
    check_top_k(found)
    found.check_scales()
    config = _read_config(folder, trust_remote_code)
    resolved = _resolve_dtype(config, dtype)
    executor = Executor(workers, resolved, machine.why(threads))
    tokenizer = _load_tokenizer(folder, trust_remote_code)
    plan = LoadPlan(found, fmt)
    model = _load_dense(folder, config, resolved, plan, trust_remote_code, show, model_kwargs)
    _attach_experts(model, plan, executor, show)
    return model, tokenizer


def check_top_k(found: ExpertScan) -> None:
    """Refuse a config that wants more experts per token than there are."""
    wanted = experts_per_token(found.checkpoint.text_config)
    for group in found.groups:
        if wanted > group.n_experts:
            file = found.checkpoint.path / "config.json"
            raise CheckpointError(
                f"{file} wants {wanted} experts per token, {group.prefix} has {group.n_experts}", file=str(file)
            )


@dataclass
class LoadPlan:
    """What is decided between headers and banks: which group of experts belongs to which module, and how it acts."""

    scan: ExpertScan
    format: Format | None
    modules: tuple[tuple[torch.nn.Module, ExpertGroup, Activation], ...] = ()
    dense: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    def before_weights(self, model: torch.nn.Module) -> None:
        """Match modules and groups on the skeleton, then take the experts' parameters away."""
        experts = {name: module for name, module in model.named_modules() if _is_experts_module(module)}
        matched = match_groups(model, experts, self.scan)
        self.modules = tuple((experts[name], group, find_activation(experts[name])) for name, group in matched.items())
        for name, module in experts.items():
            check_shapes(name, module, matched[name])
            for parameter in list(module._parameters):
                module.register_parameter(parameter, None)
            module._is_hf_initialized = True
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        prefixes = [re.escape(prefix) for prefix in {*experts, *(g.prefix for g in self.scan.groups)}]
        model._keys_to_ignore_on_load_unexpected = ignored | {rf"(?:^|\.)(?:{'|'.join(prefixes)})\."}  # type: ignore[assignment]
        self.dense = _wanted_dense(model)

    def check_dense(self, model: Any) -> None:
        """What transformers read must be what config.json builds: 5.17 compares no shapes, neither compares kinds.

        A floating tensor of another width is cast: 5.17 leaves what it renames in the checkpoint's dtype.
        """
        for name, tensor in model.state_dict(keep_vars=True).items():
            shape, dtype = self.dense.get(name, (tensor.shape, tensor.dtype))
            if tensor.shape != shape or tensor.is_floating_point() != dtype.is_floating_point:
                raise self._dense_error(name, f"{tensor.dtype} {list(tensor.shape)}", f"{dtype} {list(shape)}")
            if tensor.dtype != dtype and dtype.is_floating_point:
                tensor.data = tensor.data.to(dtype)

    def check_report(self, report: dict[str, Any]) -> None:
        """Nothing that transformers had to make up may stay."""
        for name, found, built in sorted(report.get("mismatched_keys") or (), key=str):
            raise self._dense_error(name, str(list(found)), str(list(built)))
        missing = sorted(str(key) for key in report.get("missing_keys") or ())
        if missing:
            folder = self.scan.checkpoint.path
            raise CheckpointError(
                f"{folder}: {len(missing)} tensors of the model are missing, first {missing[0]!r}; the checkpoint is "
                "incomplete or its config.json belongs to another model",
                file=str(folder),
                tensor=missing[0],
            )

    def _dense_error(self, name: str, found: str, built: str) -> CheckpointError:
        info = self.scan.checkpoint.tensors.get(name)
        file = str(self.scan.checkpoint.path if info is None else info.file)
        return CheckpointError(
            f"{file}: tensor {name!r} is {found}, config.json builds {built}", file=file, tensor=name
        )


def match_groups(
    model: torch.nn.Module, experts: dict[str, torch.nn.Module], found: ExpertScan
) -> dict[str, ExpertGroup]:
    """Module name -> group: by the same name, else by the same layer number. Every one on either side must match."""
    if not experts:
        raise UnsupportedError(
            f"{type(model).__name__} has no experts module of the kind transformers dispatches; "
            "its experts cannot be moved into banks",
            feature=type(model).__name__,
        )
    by_layer: dict[int, list[ExpertGroup]] = {}
    for group in found.groups:
        by_layer.setdefault(group.layer, []).append(group)
    matched: dict[str, ExpertGroup] = {}
    for name in experts:
        same = [g for g in found.groups if g.prefix == name or g.prefix.endswith(f".{name}")]
        numbers = re.findall(r"\.(\d+)(?=\.)", name)
        same = same or by_layer.get(int(numbers[-1]) if numbers else -1, [])
        if len(same) != 1:
            raise CheckpointError(
                f"{found.checkpoint.path}: {name} ({type(experts[name]).__name__}) needs one set of experts and "
                f"{len(same)} fit: {', '.join(g.prefix for g in same) or 'none'}",
                file=str(found.checkpoint.path),
                tensor=name,
            )
        matched[name] = same[0]
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    used = {id(group) for group in matched.values()}
    for group in found.groups:
        tensor = next(iter(next(iter(group.parts.values())).values()))
        if id(group) not in used and not any(pattern.search(tensor.name) for pattern in ignored):
            raise CheckpointError(
                f"{tensor.file}: no module of {type(model).__name__} claims the experts {group.prefix} "
                f"(first tensor {tensor.name!r})",
                file=str(tensor.file),
                tensor=tensor.name,
            )
    return matched


def check_shapes(name: str, module: torch.nn.Module, group: ExpertGroup) -> None:
    """The skeleton built from config.json and the tensors on disk must agree on experts, widths, biases, order."""
    gate_up = module._parameters.get("gate_up_proj")
    if gate_up is None:
        raise UnsupportedError(
            f"{type(module).__name__} has no gate_up_proj; its experts are of a kind that is not supported",
            feature=type(module).__name__,
        )
    n, a, b = gate_up.shape
    wide, hidden = (b, a) if module.is_transposed else (a, b)
    built = {"experts": n, "expert width": wide // 2, "hidden size": hidden, "biases": bool(module.has_bias)}
    on_disk = {
        "experts": group.n_experts,
        "expert width": group.intermediate,
        "hidden size": group.hidden,
        "biases": group.bias,
    }
    if group.fused:
        built["interleaved gate and up"] = not module.is_concatenated
        on_disk["interleaved gate and up"] = group.interleaved
    for what, expected in built.items():
        if on_disk[what] != expected:
            info = next(iter(next(iter(group.parts.values())).values()))
            raise CheckpointError(
                f"{info.file}: {group.prefix} has {what} {on_disk[what]}, config.json builds {name} with {expected}",
                file=str(info.file),
                tensor=info.name,
            )


def _is_experts_module(module: torch.nn.Module) -> bool:
    return all(hasattr(module, name) for name in ("is_transposed", "has_bias", "has_gate", "_apply_gate"))


def _read_config(folder: Path, trust_remote_code: bool) -> Any:
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # its validators and converters raise many unrelated classes
        raise CheckpointError(
            f"{folder / 'config.json'}: transformers {transformers.__version__} cannot use it: {_first_line(error)}",
            file=str(folder / "config.json"),
        ) from error
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config
    return config


def _resolve_dtype(config: Any, dtype: torch.dtype | str | None) -> torch.dtype:
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
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    plan: LoadPlan,
    trust_remote_code: bool,
    show: bool,
    model_kwargs: dict[str, Any],
) -> Any:
    hooks = FreetokenConfig(plan.scan.dense, plan.before_weights)
    with _transformers_bars(show):
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
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
                f"{folder}: transformers {transformers.__version__} cannot load the dense part: {_first_line(error)}",
                file=str(folder),
            ) from error
    plan.check_report(info)
    plan.check_dense(model)
    return model


def _attach_experts(model: Any, plan: LoadPlan, executor: Executor, show: bool) -> None:
    pairs = [(Bank(g.layout(plan.format), g.n_experts), g) for _, g, _ in plan.modules]
    total = sum(bank.nbytes for bank, _ in pairs)
    with tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="expert banks", disable=not show, delay=1
    ) as bar:
        fill_banks(pairs, len(executor.workers), bar.update)
    for (module, _, activation), (bank, _) in zip(plan.modules, pairs, strict=True):
        attach_layer(module, executor.bind(bank, activation))
    model.requires_grad_(False)
    refuse_after_fork(model)
    logger.info("%d expert layers, %d bytes in banks", len(pairs), total)


def _load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
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


def _wanted_dense(model: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> shape and dtype of the skeleton's tensors; fp32 where the model asks to be kept in it."""
    plan = model._get_dtype_plan(model.dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None

    def dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
        return torch.float32 if kept is not None and kept.search(name) else tensor.dtype

    return {name: (tensor.shape, dtype(name, tensor)) for name, tensor in model.state_dict().items()}
