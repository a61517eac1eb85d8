"""Which experts on disk belong to which module of the model, and that everything else of it is on disk too.

A config and its tensors may disagree in many ways, and transformers fills what is missing with random numbers. Here
every module meets its experts, every set of experts its module, and every dense tensor its shape, or loading stops.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation

from freetoken.checkpoint.experts import ExpertScan, LayerExperts
from freetoken.errors import CheckpointError, UnsupportedError
from freetoken.executor import Activation
from freetoken.formats.base import Format
from freetoken.integration.activation import find_activation

_CHECKED_AT_ONCE = 1 << 22
_UNUSED = (
    "input_scale", "activation_scale", "input_global_scale", "k_scale", "v_scale", "q_scale", "output_scale",
    "inv_freq",
)  # fmt: skip
"""Suffixes of tensors that say nothing about weights: scales of activations and caches, tables that are computed."""


@dataclass
class LoadPlan:
    """What is decided between headers and banks: which group of experts belongs to which module, and how it acts."""

    scan: ExpertScan
    format: Format | None
    modules: tuple[tuple[torch.nn.Module, LayerExperts, Activation], ...] = ()
    dense: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    def before_weights(self, model: torch.nn.Module) -> None:
        """Match modules and groups on the skeleton, then take the experts' parameters away."""
        experts = find_experts(model)
        matched = match_groups(model, experts, self.scan)
        self.modules = tuple((experts[name], group, find_activation(experts[name])) for name, group in matched.items())
        for name, module in experts.items():
            check_shapes(name, module, matched[name])
            drop_parameters(module)
            block = model.get_submodule(name.rpartition(".")[0])  # some initialize their experts
            module._is_hf_initialized = block._is_hf_initialized = True  # type: ignore[assignment]
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        prefixes = [re.escape(prefix) for prefix in {*experts, *(g.prefix for g in self.scan.groups)}]
        model._keys_to_ignore_on_load_unexpected = ignored | {rf"(?:^|\.)(?:{'|'.join(prefixes)})\."}  # type: ignore[assignment]
        self.dense = _wanted_dense(model)

    def check_dense(self, model: Any) -> None:
        """What transformers read must be what config.json builds, and numbers: it checks neither in every version.

        A floating tensor of another width is cast: 5.17 leaves what it renames in the checkpoint's dtype.
        """
        for name, tensor in model.state_dict(keep_vars=True).items():
            shape, dtype = self.dense.get(name, (tensor.shape, tensor.dtype))
            if tensor.shape != shape or tensor.is_floating_point() != dtype.is_floating_point:
                raise self._dense_error(name, f"{tensor.dtype} {list(tensor.shape)}", f"{dtype} {list(shape)}")
            if tensor.dtype != dtype and dtype.is_floating_point:
                tensor.data = tensor.data.to(dtype)
            if name in self.dense and dtype.is_floating_point and not _is_finite(tensor):
                raise self._dense_error(name, "holding NaN or infinite numbers", "a model of finite ones")

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

    def check_unexpected(self, model: torch.nn.Module, report: dict[str, Any]) -> None:
        """A tensor below a module of a layer that the module has no place for would change what it computes.

        What belongs to no module that is there, as towers and layers that predict further tokens, is left out.
        """
        modules = dict(model.named_modules())
        for name in sorted(str(key) for key in report.get("unexpected_keys") or ()):
            parent, _, suffix = name.rpartition(".")
            while parent and parent not in modules:
                parent = parent.rpartition(".")[0]
            container = not parent or isinstance(modules[parent], torch.nn.ModuleList | PreTrainedModel)
            if not container and suffix not in _UNUSED:
                path = self.scan.checkpoint.path
                raise CheckpointError(
                    f"{path}: nothing claims the tensor {name!r}: {type(modules[parent]).__name__} {parent!r} has no "
                    "place for it; how this checkpoint was written is not supported",
                    file=str(path),
                    tensor=name,
                )

    def _dense_error(self, name: str, found: str, built: str) -> CheckpointError:
        info = self.scan.checkpoint.tensors.get(name)
        file = str(self.scan.checkpoint.path if info is None else info.file)
        return CheckpointError(
            f"{file}: tensor {name!r} is {found}, config.json builds {built}", file=file, tensor=name
        )


def match_groups(
    model: torch.nn.Module, experts: dict[str, torch.nn.Module], found: ExpertScan
) -> dict[str, LayerExperts]:
    """Module name -> group: by the same name, else by the same layer number. Every one on either side must match.

    Experts that the model's class ignores may stay without a module.
    """
    spare = {group.prefix for group in found.groups if _is_ignored(model, group)}
    by_layer: dict[int, list[LayerExperts]] = {}
    for group in found.groups:
        if group.prefix not in spare:
            by_layer.setdefault(group.layer, []).append(group)
    matched: dict[str, LayerExperts] = {}
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
        other = next((n for n, group in matched.items() if group.prefix == same[0].prefix), None)
        if other is not None:
            raise UnsupportedError(
                f"{type(experts[name]).__name__}: {other} and {name} share the experts {same[0].prefix}, "
                "which is not supported",
                feature=type(experts[name]).__name__,
            )
        matched[name] = same[0]
    used = {group.prefix for group in matched.values()}
    for group in found.groups:
        if group.prefix not in used | spare:
            tensor = group.tensors[0]
            raise CheckpointError(
                f"{tensor.file}: no module of {type(model).__name__} claims the experts {group.prefix} "
                f"(first tensor {tensor.name!r})",
                file=str(tensor.file),
                tensor=tensor.name,
            )
    return matched


def _is_ignored(model: Any, group: LayerExperts) -> bool:
    """Whether the model's class does without these experts: they predict further tokens (MTP, next-n layers)."""
    config = model.config.get_text_config()
    layers, more = (getattr(config, n, None) for n in ("num_hidden_layers", "num_nextn_predict_layers"))
    if isinstance(layers, int) and isinstance(more, int) and layers <= group.layer < layers + more:
        return True
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any(re.search(pattern, group.tensors[0].name) for pattern in ignored)


def check_shapes(name: str, module: torch.nn.Module, group: LayerExperts) -> None:
    """The skeleton built from config.json and the tensors on disk must agree on experts, widths, biases, order."""
    n, hidden, intermediate = shape_of_module(module)
    built = {"experts": n, "expert width": intermediate, "hidden size": hidden, "biases": bool(module.has_bias)}
    on_disk = {
        "experts": group.n_experts,
        "expert width": group.intermediate,
        "hidden size": group.hidden,
        "biases": group.bias,
    }
    if group.interleaving is not None and not module.is_concatenated:  # the other way round transformers reorders rows
        built["interleaved gate and up"] = True
        on_disk["interleaved gate and up"] = group.interleaving
    for what, expected in built.items():
        if on_disk[what] != expected:
            info = group.tensors[0]
            raise CheckpointError(
                f"{info.file}: {group.prefix} has {what} {on_disk[what]}, "
                f"{group.checkpoint.config_file.name} builds {name} with {expected}",
                file=str(info.file),
                tensor=info.name,
            )


def find_experts(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Name -> module of all experts that transformers dispatches; raises `UnsupportedError` when there are none."""
    signs = ("is_transposed", "has_bias", "has_gate", "_apply_gate")
    experts = {n: module for n, module in model.named_modules() if all(hasattr(module, sign) for sign in signs)}
    if not experts:
        raise UnsupportedError(
            f"{type(model).__name__} has no experts module of the kind transformers dispatches; "
            "its experts cannot be moved into banks",
            feature=type(model).__name__,
        )
    return experts


def shape_of_module(module: torch.nn.Module) -> tuple[int, int, int]:
    """(experts, hidden size, expert width) that an experts module was built with."""
    gate_up = module._parameters.get("gate_up_proj")
    if gate_up is None or gate_up.dim() != 3:
        raise UnsupportedError(
            f"{type(module).__name__} has no gate_up_proj; its experts are of a kind that is not supported",
            feature=type(module).__name__,
        )
    n, a, b = gate_up.shape
    wide, hidden = (b, a) if module.is_transposed else (a, b)
    return n, hidden, wide // 2


def drop_parameters(module: torch.nn.Module) -> None:
    """Take a module's own parameters away; their names stay, without a value."""
    for name in list(module._parameters):
        module.register_parameter(name, None)


def _is_finite(tensor: torch.Tensor) -> bool:
    """In parts: torch's own way takes twice the tensor beside it, and a vocabulary is large."""
    flat = tensor.detach().reshape(-1)
    starts = range(0, len(flat), _CHECKED_AT_ONCE)
    return all(bool(torch.isfinite(flat[start : start + _CHECKED_AT_ONCE]).all()) for start in starts)


def _wanted_dense(model: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Name -> shape and dtype of the skeleton's tensors; fp32 where the model asks to be kept in it."""
    plan = model._get_dtype_plan(model.dtype)
    kept = build_glob_alternation(list(plan))[0] if plan else None

    def dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
        return torch.float32 if kept is not None and kept.search(name) else tensor.dtype

    return {name: (tensor.shape, dtype(name, tensor)) for name, tensor in model.state_dict().items()}
