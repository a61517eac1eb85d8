"""The hooks into transformers' loader, in the shape it offers for them: a quantizer.

Before weights are read, experts modules lose their parameters, so their tensors are never read by transformers;
afterwards the caller fills banks. Packed weights outside the experts are unpacked to the model's dtype by the same
formats that hold experts, whatever tool wrote them. Works with the loader of transformers 5.17 and of 5.24, which
differ: only names that both have are used here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from freetoken.checkpoint.experts import QuantizedDense, Written
from freetoken.errors import UnsupportedError
from freetoken.formats.base import Matrix

METHOD = "freetoken"
_RENAMED = {"scale": "weight_scale_inv"}
"""Suffixes that are renamed before the model's own renamings, which make other names that end so (DeepSeek-V4)."""
_SAFETENSORS = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
"""The safetensors dtypes of scales."""
BeforeWeights = Callable[[torch.nn.Module], None]


class FreetokenConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Carries what the hooks need through `from_pretrained`; only its method name is ever written out."""

    def __init__(self, dense: tuple[QuantizedDense, ...] = (), before_weights: BeforeWeights | None = None) -> None:
        self.quant_method = METHOD
        self.dense = dense
        self.before_weights = before_weights

    def to_dict(self) -> dict[str, Any]:
        """What goes into a printed or saved config."""
        return {"quant_method": METHOD}

    def __deepcopy__(self, memo: object) -> FreetokenConfig:
        return FreetokenConfig()


@register_quantizer(METHOD)
class FreetokenQuantizer(HfQuantizer):  # type: ignore[misc]
    """Runs the hooks; holds nothing of the model afterwards."""

    def __init__(self, quantization_config: FreetokenConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True  # else the loader goes single-threaded
        self.compiles = True

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        hook = self.quantization_config.before_weights
        if hook is not None:
            hook(model)
        return model

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **kwargs: Any) -> torch.nn.Module:
        self.quantization_config.before_weights = None
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        """The model's own conversions, then ours for packed weights outside the experts."""
        dense: tuple[QuantizedDense, ...] = self.quantization_config.dense
        if not dense:
            return weight_conversions
        kinds = tuple(
            {(d.written.format.name, d.written.spelling.name, d.written.block): d.written for d in dense}.values()
        )
        spellings = [kind.spelling for kind in kinds]
        suffixes = {
            s for spelling in spellings for s in (*(t for t, _ in spelling.tensors.values()), *spelling.optional)
        }
        renamed = [WeightRenaming(rf"^(.+)\.{old}$", rf"\1.{new}") for old, new in _RENAMED.items() if old in suffixes]
        patterns = [
            rf"\.{re.escape(suffix)}$"
            for suffix in sorted({*map(_loaded_as, suffixes), "weight"}, key=len, reverse=True)
        ]
        unpack = WeightConverter(patterns, ".weight", [UnpackDense(self, kinds)])
        return [*renamed, *weight_conversions, unpack]

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Raises: save_pretrained would answer a False with a hint at warnings that are not there."""
        raise UnsupportedError(
            "a model whose experts lie in host banks cannot be saved; keep the checkpoint that it was loaded from, "
            "or save the model before attaching it",
            feature="save_pretrained",
        )

    @property
    def is_trainable(self) -> bool:
        """Quantized experts have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """Whether generate may compile the decode step: the experts operator has a fake kernel."""
        return self.compiles


class UnpackDense(ConversionOps):  # type: ignore[misc]
    """Packed codes and their scales to a plain weight in the parameter's dtype; plain weights pass through."""

    def __init__(self, hf_quantizer: HfQuantizer, kinds: tuple[Written, ...]) -> None:
        self.hf_quantizer = hf_quantizer  # tells the loader to leave dtypes to this operation
        # the spelling with the most tensors first: one may be contained in another
        self.kinds = sorted(kinds, key=lambda kind: -len(kind.spelling.tensors))

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: torch.nn.Module, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        """input_dict: source pattern -> its tensor (or a list of one)."""
        tensors = {
            pattern.removeprefix(r"\.").removesuffix("$").replace("\\", ""): value[0]
            if isinstance(value, list)
            else value
            for pattern, value in input_dict.items()
        }
        dtype = model.get_parameter(full_layer_name).dtype
        if set(tensors) == {"weight"}:
            return {full_layer_name: tensors["weight"].to(dtype)}
        for written in self.kinds:
            parts = {role: tensors.get(_loaded_as(suffix)) for role, (suffix, _) in written.spelling.tensors.items()}
            found = {role: part for role, part in parts.items() if part is not None}
            if len(found) == len(parts) and _fits(written, found):
                return {full_layer_name: _unpack(written, found).to(dtype)}
        raise ValueError(f"{full_layer_name}: no known spelling in {sorted(tensors)}")

    @property
    def reverse_op(self) -> ConversionOps:
        """There is none: saving is refused."""
        raise NotImplementedError("freetoken models are not saved")


def _loaded_as(suffix: str) -> str:
    return _RENAMED.get(suffix, suffix)


def _fits(written: Written, parts: dict[str, torch.Tensor]) -> bool:
    """Whether these tensors are of this kind: kinds may differ in the shape of scales alone."""
    if "scales" not in parts:
        return True
    n, width = parts["codes"].shape
    shapes = written.format.stored_scale_shapes(n, width * 8 // written.format.bits, written.block)
    return tuple(parts["scales"].shape) in shapes


def _unpack(written: Written, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    codes, scales = parts["codes"], None
    if written.spelling.tensors["codes"][1] == ("F8_E4M3",):
        codes = codes.to(torch.float8_e4m3fn)  # 5.17 has cast what it did not rename: exactly, so this takes it back
    if "scales" in parts:
        dtype = _SAFETENSORS[parts["scales"].dtype]
        scales = written.format.read_scales(_bits(parts["scales"]), dtype)
    factor = float(parts["global"].float().reshape(-1)[0]) if "global" in parts else 1.0
    matrix = Matrix(written.format, _bits(codes).view(np.uint8), None, factor, written.spelling.divides)
    return torch.from_numpy(written.format.dequantize_stored(matrix, scales, written.block))


def _bits(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    same_size = {1: torch.uint8, 2: torch.uint16, 4: torch.float32}
    return tensor.contiguous().view(same_size[tensor.element_size()]).numpy()
