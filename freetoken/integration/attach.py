"""`attach`: a transformers model that is in memory already gives its experts to host banks.

everything that can be refused is      nothing changed yet; every weight was looked at
one layer: bank filled, kernel bound   the model is still as it was until the first bank is complete
its parameters go, its bank is in      the peak is the model and one layer's bank, not two models
... the next layer                     an interruption leaves a model that says so; attach again finishes it
all layers may run                     last of all, when nothing else is left to do
"""

from __future__ import annotations

import copy
import itertools
import logging
import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedConfig, PreTrainedModel

from freetoken import formats, settings, topology
from freetoken.banks import make_bank
from freetoken.checkpoint.experts import gate_and_up_rows
from freetoken.checkpoint.inspect import choose_threads, packing_bytes
from freetoken.checkpoint.jobs import run_jobs
from freetoken.checkpoint.load import fill_banks
from freetoken.errors import ConfigError, FormatError, UnsupportedError
from freetoken.executor import Activation, Executor
from freetoken.formats.base import Format, Matrix
from freetoken.formats.record import Expert, RecordLayout
from freetoken.integration.activation import find_activation
from freetoken.integration.operator import IMPLEMENTATION, attach_layer, is_ready, keep_layer, layer_of
from freetoken.integration.plan import drop_parameters, find_experts, shape_of_module
from freetoken.integration.quantizer import FreetokenConfig, FreetokenQuantizer
from freetoken.integration.transformers import banks_bar, finish, resolve_dtype
from freetoken.memory import budget, guard
from freetoken.memory.placement import Placer, choose

logger = logging.getLogger(__name__)

_BF16 = formats.get("bf16")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attach(
    model: Any,
    *,
    expert_format: str | None = None,
    threads: int | Literal["auto"] = "auto",
    placement: str | int | None = None,
    progress: bool | None = None,
) -> Any:
    """Move the experts of a transformers model into quantized host banks; returns the same model.

    model: any that transformers built or loaded, with plain fp32, bf16 or fp16 experts, on the CPU or a GPU. It gets a
    config of its own, `eval()`, and no gradients. expert_format: a format's name; None keeps bf16 and is refused for
    other experts, which no format holds whole. As in `load`, fp32 and fp16 weights are rounded to bf16 first, so that
    both give the same bits. threads, placement, progress: as for `load`.

    Raises `ConfigError`, `UnsupportedError`, `FormatError` or `CapacityError` before anything in the model is changed.
    Layers are moved one by one: the peak is the model and one layer's bank. An interruption before the first layer is
    done leaves the model as it was; a later one leaves a model whose layers refuse to run, and attaching again moves
    the rest.
    """
    show = sys.stderr.isatty() if progress is None else progress
    fmt = None if expert_format is None else formats.get(expert_format)
    machine = topology.read()
    workers = machine.workers(threads)
    where = choose(machine, workers, placement)
    _check_model(model)
    experts = find_experts(model)
    if all(map(is_ready, experts.values())):
        raise ConfigError(
            f"the experts of this {type(model).__name__} lie in banks already; for another format load or build the "
            "model anew",
            name="model",
            value=type(model),
            expected="a model whose experts are still parameters",
        )
    sources = [_read_module(name, module, fmt) for name, module in experts.items() if layer_of(module) is None]
    _check_owners(model, sources)
    executor = Executor(workers, resolve_dtype(model.config, model.dtype), machine.why(threads), where)
    placer, total = Placer(where), sum(source.bank_bytes for source in sources)
    per_thread = max((source.transient_bytes for source in sources), default=0)

    def need(n: int) -> budget.Need:
        return budget.Need(
            banks=_peak_bytes(sources),
            transient=n * per_thread,
            pinned=total if settings.MLOCK.read() == "on" else 0,
            threads=n,
            spare=guard.min_available_bytes(),
        )

    readers = choose_threads(need, len(workers), what=f"attaching the experts of {type(model).__name__}")
    _check_weights(sources, readers)
    with guard.from_settings() as watch, banks_bar(total, show) as bar:

        def on_bytes(n: int) -> None:
            watch.check()
            bar.update(n)

        for source in sources:
            bank = make_bank(source.layout, source.n_experts, placer, executor.shard_step)
            fill_banks([(bank, source)], readers, on_bytes, where)
            layer = executor.bind(bank, source.activation)
            _dispatch_here(model, experts)
            keep_layer(source.module, layer)
            drop_parameters(source.module)
    for module in experts.values():
        drop_parameters(module)  # of a layer in which an earlier call was interrupted
    finish(model.eval())
    for module in experts.values():
        kept = layer_of(module)
        assert kept is not None, "every layer was bound"
        attach_layer(module, kept)
    logger.info("%d expert layers attached, %d bytes in banks", len(sources), total)
    return model


@dataclass(frozen=True)
class ModuleExperts:
    """The experts that a module holds as parameters, and what they become."""

    name: str
    module: torch.nn.Module
    layout: RecordLayout
    n_experts: int
    activation: Activation

    @property
    def bank_bytes(self) -> int:
        """Bytes of the layer's bank."""
        return self.n_experts * self.layout.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that its parameters occupy."""
        return sum(p.nbytes for p in self.module.parameters(recurse=False) if p.device.type == "cpu")

    @property
    def transient_bytes(self) -> int:
        """What a thread holds at most while it makes a record: the expert in bf16, and what packing takes."""
        source = sum(p.numel() for p in self.module.parameters(recurse=False)) // self.n_experts * 2
        return source + packing_bytes(self.layout, source)

    def read(self, expert: int) -> Expert:
        """One expert in bf16, to which wider weights are rounded."""
        interleaved = not self.module.is_concatenated
        first, second = gate_and_up_rows(interleaved, self.layout.intermediate)
        both, bias = self._weights("gate_up_proj", expert), self._bias("gate_up_proj_bias", expert)
        return Expert(
            _to_matrix(both[first]),
            _to_matrix(both[second]),
            _to_matrix(self._weights("down_proj", expert)),
            None if bias is None else np.ascontiguousarray(bias[first]),
            None if bias is None else np.ascontiguousarray(bias[second]),
            self._bias("down_proj_bias", expert),
        )

    def check(self, expert: int) -> None:
        """Raise `FormatError` when a weight or bias of an expert is no number."""
        found = self.read(expert)
        for what in ("gate", "up", "down"):
            bias = getattr(found, f"{what}_bias")
            bad = _BF16.find_bad(getattr(found, what))
            if bias is not None and not np.isfinite(bias).all():
                bad = bad or "the bias holds a NaN or infinite number"
            if bad:
                raise FormatError(
                    f"{self.name}: {what} of expert {expert}: {bad}; bf16 and what is made from it need finite ones",
                    format=_BF16.name,
                )

    def _tensor(self, name: str, expert: int) -> torch.Tensor:
        return self.module.get_parameter(name)[expert].detach().cpu()

    def _weights(self, name: str, expert: int) -> NDArray[Any]:
        """(rows, width): bf16 as bits, others as numbers."""
        tensor = self._tensor(name, expert)
        array: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        return array.T if self.module.is_transposed else array

    def _bias(self, name: str, expert: int) -> NDArray[np.float32] | None:
        return self._tensor(name, expert).float().numpy() if self.layout.bias else None


def _to_matrix(rows: NDArray[Any]) -> Matrix:
    if rows.dtype == np.uint16:
        return Matrix(_BF16, np.ascontiguousarray(rows).view(np.uint8))
    return _BF16.quantize_strips(rows.shape, lambda start, stop: np.ascontiguousarray(rows[start:stop], np.float32))


def _check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"attach() takes a model of transformers, not a {type(model).__name__}",
            name="model",
            value=type(model),
            expected="a transformers.PreTrainedModel",
        )
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not isinstance(quantizer, FreetokenQuantizer):
        method = quantizer.quantization_config.quant_method
        raise UnsupportedError(
            f"this {type(model).__name__} is quantized ({getattr(method, 'value', method)}); attach() takes plain "
            "weights: give the checkpoint to freetoken.load",
            feature=type(quantizer).__name__,
        )
    if getattr(model, "_tp_size", None) is not None:
        raise UnsupportedError(
            f"this {type(model).__name__} is split over several processes, which attach() does not support",
            feature="tensor parallelism",
        )


def _read_module(name: str, module: torch.nn.Module, fmt: Format | None) -> ModuleExperts:
    """What a module's experts are; everything about them is checked here but the weights themselves."""
    n, hidden, intermediate = shape_of_module(module)
    activation = find_activation(module)
    wide, narrow = (hidden, 2 * intermediate), (intermediate, hidden)
    turn = -1 if module.is_transposed else 1
    wanted = {"gate_up_proj": (n, *wide[::-turn]), "down_proj": (n, *narrow[::-turn])}
    if module.has_bias:
        wanted |= {"gate_up_proj_bias": (n, 2 * intermediate), "down_proj_bias": (n, hidden)}
    found = {p: tensor for p, tensor in module._parameters.items() if tensor is not None}
    for parameter, tensor in found.items():
        _check_parameter(f"{name}.{parameter}", module, tensor)
    shapes = {parameter: tuple(tensor.shape) for parameter, tensor in found.items()}
    if shapes != wanted or getattr(module, "num_experts", n) != n or getattr(module, "_is_expert_parallel", False):
        raise UnsupportedError(
            f"{name} ({type(module).__name__}) holds {shapes}, expected {wanted} for "
            f"{getattr(module, 'num_experts', n)} experts, all of them in this process",
            feature=type(module).__name__,
        )
    other = next((p for p in ("gate_up_proj", "down_proj") if found[p].dtype != torch.bfloat16), None)
    if fmt is None and other is not None:
        raise ConfigError(
            f"{name}.{other} holds {found[other].dtype} weights, which no format holds whole; "
            "name the expert_format they become (bf16 is the nearest)",
            name="expert_format",
            value=None,
            expected=", ".join(formats.names()),
        )
    return ModuleExperts(
        name, module, RecordLayout(fmt or _BF16, hidden, intermediate, bool(module.has_bias)), n, activation
    )


def _check_parameter(name: str, module: torch.nn.Module, tensor: torch.nn.Parameter) -> None:
    """Ordinary numbers in ordinary memory, or `UnsupportedError`: nothing packed, sharded or elsewhere."""
    problem = ""
    if tensor.is_meta:
        problem = "is on the meta device: load its weights first, and without offloading them"
    elif type(tensor) is not torch.nn.Parameter or type(tensor.data) is not torch.Tensor:
        problem = f"is a {type(tensor.data).__name__}; attach() takes plain tensors, neither packed nor sharded"
    elif tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
        problem = f"is {tensor.dtype}; attach() takes float32, bfloat16 and float16"
    if problem:
        raise UnsupportedError(f"{name} ({type(module).__name__}) {problem}", feature=type(module).__name__)


def _check_owners(model: torch.nn.Module, sources: list[ModuleExperts]) -> None:
    """Experts' parameters must be nobody else's: what is tied would stay, or change under its other owner."""
    ours = {id(source.module): source.name for source in sources}
    owners: dict[int, str] = {}
    held = [(n, m, p) for n, m in model.named_modules() for p in m.parameters(recurse=False) if p.numel()]
    for name, module, parameter in sorted(held, key=lambda h: id(h[1]) in ours):
        key = parameter.data_ptr()
        other = owners.setdefault(key, name)
        if other != name and id(module) in ours:
            raise UnsupportedError(
                f"{type(module).__name__}: {other} and {name} share the experts' parameters, which is not supported",
                feature=type(module).__name__,
            )


def _peak_bytes(sources: list[ModuleExperts]) -> int:
    """The most host memory wanted at one time beside what the model has now."""
    freed = itertools.accumulate((source.host_bytes for source in sources[:-1]), initial=0)
    banks = itertools.accumulate(source.bank_bytes for source in sources)
    return max((bank - gone for bank, gone in zip(banks, freed, strict=False)), default=0)


def _check_weights(sources: list[ModuleExperts], threads: int) -> None:
    jobs = [(source, expert) for source in sources for expert in range(source.n_experts)]
    run_jobs(lambda job: job[0].check(job[1]), jobs, threads)


def _dispatch_here(model: PreTrainedModel, experts: dict[str, torch.nn.Module]) -> None:
    """Switch the experts function, in configs of the model's own: others may have been built from the same objects.

    From here on the model counts as quantized, which refuses to save it.
    """
    if isinstance(getattr(model, "hf_quantizer", None), FreetokenQuantizer):
        return
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)
    for module in (model, *experts.values()):
        module.config._experts_implementation = IMPLEMENTATION
    quantizer = FreetokenQuantizer(FreetokenConfig())
    model.is_quantized, model.quantization_method = True, quantizer.quantization_config.quant_method
    quantizer.postprocess_model(model)
    model.hf_quantizer = quantizer
