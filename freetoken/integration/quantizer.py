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
from transformers.core_model_loading import ConversionOps, WeightConverter
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from freetoken.checkpoint.experts import QuantizedDense
from freetoken.errors import UnsupportedError
from freetoken.formats.base import Format, Matrix, Spelling

METHOD = "freetoken"
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
        suffixes = {s for d in dense for s in (*(t for t, _ in d.spelling.tensors.values()), *d.spelling.optional)}
        patterns = [rf"\.{re.escape(suffix)}$" for suffix in sorted(suffixes | {"weight"}, key=len, reverse=True)]
        return [*weight_conversions, WeightConverter(patterns, ".weight", [UnpackDense(self, dense)])]

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """Raises: save_pretrained would answer a False with a hint at warnings that are not there."""
        raise UnsupportedError(
            "a model whose experts lie in host banks cannot be saved; keep the checkpoint that it was loaded from",
            feature="save_pretrained",
        )

    @property
    def is_trainable(self) -> bool:
        """Quantized experts have no gradients."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The experts operator has a fake kernel."""
        return True


class UnpackDense(ConversionOps):  # type: ignore[misc]
    """Packed codes and their scales to a plain weight in the parameter's dtype; plain weights pass through."""

    def __init__(self, hf_quantizer: HfQuantizer, dense: tuple[QuantizedDense, ...]) -> None:
        self.hf_quantizer = hf_quantizer  # tells the loader to leave dtypes to this operation
        kinds = {(d.format.name, d.spelling.name): (d.format, d.spelling) for d in dense}
        # the spelling with the most tensors first: one may be contained in another
        self.kinds = sorted(kinds.values(), key=lambda kind: -len(kind[1].tensors))

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
        for fmt, spelling in self.kinds:
            if all(suffix in tensors for suffix, _ in spelling.tensors.values()):
                return {full_layer_name: _unpack(fmt, spelling, tensors).to(dtype)}
        raise ValueError(f"{full_layer_name}: no known spelling in {sorted(tensors)}")

    @property
    def reverse_op(self) -> ConversionOps:
        """There is none: saving is refused."""
        raise NotImplementedError("freetoken models are not saved")


def _unpack(fmt: Format, spelling: Spelling, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    def bits(role: str) -> np.ndarray[Any, Any] | None:
        if role not in spelling.tensors:
            return None
        tensor = tensors[spelling.tensors[role][0]]
        return tensor.contiguous().view(torch.uint8 if tensor.element_size() == 1 else torch.uint16).numpy()

    codes, scales = bits("codes"), bits("scales")
    assert codes is not None
    factor = 1.0
    if "global" in spelling.tensors:
        factor = float(tensors[spelling.tensors["global"][0]].float().reshape(-1)[0])
    matrix = Matrix(fmt, codes.view(np.uint8), scales, factor, spelling.divides)
    return torch.from_numpy(matrix.dequantize())
