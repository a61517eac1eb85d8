"""Text generation for the command line: a prompt in, text as it comes, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import TextStreamer

from freetoken.errors import ConfigError


@dataclass(frozen=True)
class Generation:
    """A finished generation. Rates are tokens per second; GB/s counts expert records read while decoding."""

    text: str
    prompt_tokens: int
    new_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    expert_bytes_per_token: int
    finish_reason: str

    @property
    def expert_gb_per_s(self) -> float:
        """Expert bytes read per second of decoding, in GB/s."""
        return self.expert_bytes_per_token * self.decode_tokens_per_s / 1e9

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, ready for JSON."""
        return asdict(self) | {"expert_gb_per_s": self.expert_gb_per_s}


class _TimedStreamer(TextStreamer):  # type: ignore[misc]
    """Passes text on and notes when each token came; the first call brings the prompt."""

    def __init__(self, tokenizer: Any, on_text: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.on_text = on_text
        self.pieces: list[str] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        self.on_text(text)


def encode_prompt(model: Any, tokenizer: Any, prompt: str) -> Any:
    """The tokenizer's output for a prompt; raises `ConfigError` when it is empty or leaves no room in the context."""
    if tokenizer is None:
        raise ConfigError("this model has no tokenizer", name="model", value=None, expected="a folder with a tokenizer")
    inputs = tokenizer(prompt, return_tensors="pt", verbose=False)
    n = inputs["input_ids"].shape[1]
    if n == 0:
        raise ConfigError("the prompt is empty; give some text", name="prompt", value=prompt, expected="some text")
    context = context_length(model)
    if context is not None and n >= context:
        raise ConfigError(
            f"the prompt has {n} tokens and the model's context is {context}; shorten it to at most {context - 1}",
            name="prompt",
            value=n,
            expected=f"at most {context - 1} tokens",
        )
    return inputs


def context_length(model: Any) -> int | None:
    """Positions the model was made for, or None when its config does not say."""
    value = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return value if isinstance(value, int) and value > 0 else None


def generate_text(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int | None,
    expert_bytes_per_token: int,
    on_text: Callable[[str], object],
) -> Generation:
    """Generate at most `max_new_tokens`, fewer where the context ends; temperature 0 is greedy.

    on_text is called with the prompt, then with pieces of text as they are complete. finish_reason: "stop" at an
    end-of-text token, "length" otherwise.
    """
    inputs = encode_prompt(model, tokenizer, prompt).to(model.device)
    prompt_tokens = inputs["input_ids"].shape[1]
    context = context_length(model)
    limit = max_new_tokens if context is None else min(max_new_tokens, context - prompt_tokens)
    sampling: dict[str, Any] = {"do_sample": False}
    if temperature > 0:  # top_k 0: transformers would keep the best 50 besides
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    if seed is not None:
        torch.manual_seed(seed)
    on_text(prompt)
    streamer = _TimedStreamer(tokenizer, on_text)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=limit, streamer=streamer, **sampling)
    new_tokens = output.shape[1] - prompt_tokens
    start, first, *_, last = (*streamer.times[:2], streamer.times[-1])  # the first is the prompt handed back
    ends = model.generation_config.eos_token_id
    ended = int(output[0, -1]) in (ends if isinstance(ends, list) else [ends])
    return Generation(
        text="".join(streamer.pieces),
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        prefill_tokens_per_s=prompt_tokens / (first - start),
        decode_tokens_per_s=(new_tokens - 1) / (last - first) if new_tokens > 1 else 0.0,
        expert_bytes_per_token=expert_bytes_per_token,
        finish_reason="stop" if ended else "length",
    )
