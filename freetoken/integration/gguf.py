"""What transformers would read from a GGUF file and cannot beside a quantizer: the dense part; and the tokenizer.

Its loader refuses to combine `gguf_file` with a quantizer of ours (5.17 to 5.24). So the tensors that are not experts
are dequantized here, by the gguf package and under its own table of names, and handed over as a state dict.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, PreTrainedTokenizerFast

from freetoken.checkpoint.beside import Beside, DenseTensor
from freetoken.checkpoint.experts import ExpertScan
from freetoken.checkpoint.gguf import GgufCheckpoint, gguf_package, read_token
from freetoken.checkpoint.gguf_experts import dequantize
from freetoken.checkpoint.safetensors import TensorInfo
from freetoken.errors import CheckpointError
from freetoken.integration.plan import LoadPlan
from freetoken.integration.quantizer import BeforeWeights

logger = logging.getLogger(__name__)

_STRIP_WEIGHTS = 1 << 20
_STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Types of GGUF that safetensors have, too."""


def filling(state: dict[str, torch.Tensor], plan: LoadPlan) -> BeforeWeights:
    """The hook that does the plan's part on a skeleton and then puts the dense tensors for it into `state`."""

    def before_weights(model: torch.nn.Module) -> None:
        plan.before_weights(model)
        state.update(dense_tensors(model, plan.scan))

    return before_weights


def dense_tensors(model: Any, found: ExpertScan) -> dict[str, torch.Tensor]:
    """Every tensor of the file that is not experts, by the model's names and in its dtypes.

    model: a skeleton without experts' parameters. Raises `CheckpointError` naming the tensor when one has another
    shape than the model's, or belongs to nothing of it.
    """
    checkpoint = found.checkpoint
    assert isinstance(checkpoint, GgufCheckpoint)
    wanted = _wanted_tensors(model, found)
    return {name: _unpack(info, checkpoint, dtype) for name, (info, dtype) in wanted.items()}


def _wanted_tensors(model: torch.nn.Module, found: ExpertScan) -> dict[str, tuple[TensorInfo, torch.dtype]]:
    """The model's name of every tensor that is not experts -> where it lies, and the model's dtype for it."""
    checkpoint = found.checkpoint
    assert isinstance(checkpoint, GgufCheckpoint)
    wanted = model.state_dict()
    names = _model_names(wanted, checkpoint)
    tensors: dict[str, tuple[TensorInfo, torch.dtype]] = {}
    for name, info in checkpoint.tensors.items():
        if name in found.expert_tensors:
            continue
        if name not in names:
            raise _error(info, f"({info.dtype} {list(info.shape)}) belongs to nothing in {type(model).__name__}")
        like = wanted[names[name]]
        if info.shape != tuple(like.shape):
            raise _error(info, f"has shape {list(info.shape)}, the metadata build {list(like.shape)}")
        tensors[names[name]] = info, like.dtype
    return tensors


def beside_experts(found: ExpertScan) -> Beside:
    """What a conversion writes beside the experts: dense tensors by the model's names, its config, its tokenizer.

    Types of 16 and 32 bits stay what they are, blocks become bfloat16, the dtype in which these models load. Raises
    `CheckpointError` as `dense_tensors` does.
    """
    checkpoint = found.checkpoint
    assert isinstance(checkpoint, GgufCheckpoint)
    config = AutoConfig.for_model(**checkpoint.config)
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        model = getattr(transformers, config.architectures[0])(config)
    wanted = _wanted_tensors(model, found)

    def write_files(target: Path) -> None:
        config.save_pretrained(target)
        tokenizer = load_tokenizer(checkpoint)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)

    return Beside(tuple(_stored(name, info, checkpoint) for name, (info, _) in wanted.items()), write_files)


def _stored(name: str, info: TensorInfo, checkpoint: GgufCheckpoint) -> DenseTensor:
    dtype = info.dtype if info.dtype in _STORED else "BF16"

    def pieces() -> Iterator[NDArray[np.uint8]]:
        for values in _strips(info, checkpoint):
            yield torch.from_numpy(values).to(_STORED[dtype]).view(torch.uint8).numpy().reshape(-1)

    return DenseTensor(name, dtype, info.shape, pieces)


def _unpack(info: TensorInfo, checkpoint: GgufCheckpoint, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a dtype, in strips of rows: a vocabulary of fp32 would be twice the rest."""
    out = torch.empty(info.shape, dtype=dtype, device="cpu")  # the skeleton is being built on another
    flat, start = out.view(-1, info.shape[-1]), 0
    for values in _strips(info, checkpoint):
        flat[start : start + len(values)] = torch.from_numpy(values)
        start += len(values)
    return out


def _strips(info: TensorInfo, checkpoint: GgufCheckpoint) -> Iterator[NDArray[np.float32]]:
    """The values of a tensor as (rows, K), some rows at a time."""
    width = info.shape[-1]
    rows = checkpoint.read_bytes(info.name).reshape(math.prod(info.shape) // width, -1)
    step = max(1, _STRIP_WEIGHTS // width)
    for start in range(0, len(rows), step):
        yield dequantize(info, rows[start : start + step])


def _model_names(wanted: dict[str, torch.Tensor], checkpoint: GgufCheckpoint) -> dict[str, str]:
    """GGUF name -> the model's, by the gguf package's table. A parameter that is no weight is called one there."""
    gguf = gguf_package()
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == checkpoint.architecture)
    table = gguf.get_tensor_name_map(arch, checkpoint.config["num_hidden_layers"])
    names = {}
    for name in wanted:
        module, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            module, suffix = name, "weight"
        known = table.get_name(module)
        if known is not None:
            names[f"{known}.{suffix}"] = name
    return names


def load_tokenizer(checkpoint: GgufCheckpoint) -> Any:
    """The tokenizer that transformers makes of the file's metadata, or None where there is none.

    Special tokens are told to it: 5.17 would invent `<s>` and `</s>` beyond the vocabulary. Not by `AutoTokenizer`,
    which reads the config too.
    """
    if "tokenizer.ggml.model" not in checkpoint.metadata:
        logger.warning("%s holds no tokenizer; load() returns None for it", checkpoint.path)
        return None
    config = checkpoint.config
    ids = {f"{name}_token": config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    special = {name: None if token is None else read_token(checkpoint, token) for name, token in ids.items()}
    try:
        return PreTrainedTokenizerFast.from_pretrained(
            checkpoint.path.parent,
            gguf_file=checkpoint.path.name,
            model_max_length=config["max_position_embeddings"],
            **special,
        )
    except Exception as error:  # a vocabulary may be wrong in many ways
        text = str(error).strip().splitlines()
        raise CheckpointError(
            f"{checkpoint.path}: transformers {transformers.__version__} cannot use its tokenizer: "
            f"{text[0] if text else type(error).__name__}; a newer one may",
            file=str(checkpoint.path),
        ) from error


def _error(info: TensorInfo, what: str) -> CheckpointError:
    return CheckpointError(f"{info.file}: tensor {info.name!r} {what}", file=str(info.file), tensor=info.name)
