"""A transformers cache in memory that stays where it is, and a forward pass on it that nothing waits for.

transformers' own static cache of a sliding window decides on the host where it writes, and its masks are made anew for
each step from what the host knows. Here all layers keep everything, at a column that the device knows, and masks are
made on the device: they make the window, and hide padding.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from freetoken.integration.attention import ATTENTIONS, implementation, step_attention
from freetoken.integration.compiled import compiled_layers
from freetoken.integration.topk import OwnTopK

_KINDS = {"full_attention", "sliding_attention"}
"""Kinds of layers that masks are made for."""


def cache_argument(model: Any) -> str:
    """What this version of transformers calls the cache that a forward pass takes and returns."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


def why_not_fixed(model: Any) -> str | None:
    """Why a model cannot step on a fixed cache; None if it can."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers does not say of {name} that a step of it can be captured"
    if config.is_encoder_decoder or model.config.is_encoder_decoder:
        return f"{name} has an encoder"
    if hasattr(model, "create_masks_for_generate"):
        return f"{name} makes masks of its own"
    if implementation(config) not in ATTENTIONS:
        return f"attention {implementation(config)!r} is none of {', '.join(ATTENTIONS)}"
    kinds = set(getattr(config, "layer_types", None) or ()) - _KINDS
    if kinds or getattr(config, "attention_chunk_size", None) is not None:
        return f"{name} has layers of kind {', '.join(sorted(kinds)) or 'chunked_attention'}"
    return why_not_copied(DynamicCache(config=model.config))


def why_not_copied(cache: Any) -> str | None:
    """Why what a cache holds cannot be copied into a fixed one; None if it can."""
    if type(cache) is not DynamicCache or cache.offloading:
        return f"the cache is a {type(cache).__name__}{' that is offloaded' if type(cache) is DynamicCache else ''}"
    strange = {
        type(layer).__name__ for layer in cache.layers if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
    }
    return f"its cache has layers of kind {', '.join(sorted(strange))}" if strange else None


class _Memory:
    """Keys and values of one layer, (rows, heads, length, width) each; none before their heads are known."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def reserve(self, rows: int, length: int, *like: torch.Tensor) -> None:
        """At least so much, for keys and values such as these; what is there stays."""
        olds: Sequence[torch.Tensor | None] = self.tensors or [None] * len(like)
        self.tensors = [_grown(old, rows, length, one) for old, one in zip(olds, like, strict=True)]


def _grown(old: torch.Tensor | None, rows: int, length: int, like: torch.Tensor) -> torch.Tensor:
    if old is not None and old.shape[0] >= rows and old.shape[2] >= length:
        return old
    with torch.inference_mode(False):  # it is used inside and outside of that
        new = torch.zeros(rows, like.shape[1], length, like.shape[3], dtype=like.dtype, device=like.device)
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]].copy_(old)
    return new


class _FixedLayer(CacheLayerMixin):  # type: ignore[misc]
    """The first rows and columns of a layer's memory, written at a column that the device knows."""

    is_sliding = False

    def __init__(
        self, memory: _Memory, column: torch.Tensor, rows: int, length: int, reserved: tuple[int, int]
    ) -> None:
        super().__init__()
        self._memory, self._column, self._rows, self._length = memory, column, rows, length
        self._reserved = reserved
        if memory.tensors:
            self.lazy_initialization(*memory.tensors)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self._memory.reserve(*self._reserved, key_states, value_states)
        self.keys, self.values = (whole[: self._rows, :, : self._length] for whole in self._memory.tensors)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        columns = self._column + torch.arange(key_states.shape[2], device=key_states.device)
        self.keys.index_copy_(2, columns, key_states)
        self.values.index_copy_(2, columns, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length, 0

    def get_seq_length(self) -> Any:
        return self._column[0]

    def get_max_length(self) -> int:
        return self._length


class FixedForward:
    """A model's forward pass of few tokens on tensors that stay where they are. The model is held weakly.

    rows: sequences; length: tokens of each that there is room for. Tokens (rows, 1), positions (rows, 1) and the
    column (1,) at which all rows write are those of the next step, logits (rows, vocabulary) in fp32 those of the last
    one, which the first one allocates; valid (rows,) bool, which rows are sequences that go on.
    """

    def __init__(self, model: Any, rows: int, length: int) -> None:
        self._model = weakref.ref(model)
        config = model.config.get_text_config()
        self._cache_name = cache_argument(model)
        self._kinds = set(getattr(config, "layer_types", None) or ())
        self._named = hasattr(config, "layer_types")  # masks by the names of kinds
        self._window: int | None = getattr(config, "sliding_window", None)
        self._memories = [_Memory() for _ in DynamicCache(config=model.config).layers]
        self._caches: dict[tuple[int, int], Cache] = {}
        self._dtype = model.dtype
        self._on = on = model.device
        self._compiled = compiled_layers(model, self._cache_name)
        self._attention = step_attention(model)
        self.rows = rows
        with torch.inference_mode(False):  # they are used inside and outside of that
            self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=on)
            self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=on)
            self.column = torch.zeros(1, dtype=torch.int64, device=on)
            self.valid = torch.zeros(rows, dtype=torch.bool, device=on)
            self.logits = torch.zeros(rows, 0, dtype=torch.float32, device=on)
            self._padding = torch.zeros(rows, 0, dtype=self._dtype, device=on)
            self._least = torch.full((), torch.finfo(self._dtype).min, dtype=self._dtype, device=on)
        self.length = 0
        self.grow(length)

    def grow(self, length: int) -> bool:
        """Make room for at least so many tokens; whether tensors that steps read have moved. What is there stays."""
        if length <= self.length:
            return False
        for memory in self._memories:
            memory.reserve(self.rows, length, *memory.tensors)
        with torch.inference_mode(False):
            more = torch.zeros(self.rows, length - self.length, dtype=self._dtype, device=self._on)
            self._padding = torch.cat([self._padding, more], dim=1)
            self._columns = torch.arange(length, device=self._on)
        self._caches.clear()
        self.length = length
        return True

    @property
    def moved(self) -> Sequence[torch.Tensor]:
        """See `StepModel`."""
        return self.tokens, self.positions, self.column, self.valid

    def begin(self, cache: Any, mask: torch.Tensor | None, positions: torch.Tensor, tokens: int) -> None:
        """Take over a prompt of so many tokens that was read with a dynamic cache, which is emptied layer by layer.

        mask: (B, tokens), 0 for padding; None without any. positions: (B, 1), of the last token. The next step is that
        of the last token; `feed` comes before it.
        """
        n = len(positions)
        for memory, layer in zip(self._memories, cache.layers, strict=True):
            memory.reserve(self.rows, self.length, layer.keys, layer.values)  # all, before anything is given up
        for memory, layer in zip(self._memories, cache.layers, strict=True):
            for target, source in zip(memory.tensors, (layer.keys, layer.values), strict=True):
                target.zero_()  # what earlier texts have left may be anything, and is hidden, not skipped
                target[:n, :, tokens - source.shape[2] : tokens].copy_(source)
            layer.keys = layer.values = None
        self.start(n, tokens - 1)
        self.positions[:n].copy_(positions)
        if mask is not None:
            self._padding[:n, :tokens].masked_fill_(mask == 0, self._least)

    def restart(self, rows: int) -> None:
        """Forget all sequences; the first rows are new ones, whose first token is the next."""
        for memory in self._memories:
            for tensor in memory.tensors:
                tensor.zero_()
        self.start(rows)

    def start(self, rows: int, column: int = 0) -> None:
        """The first rows are new sequences, whose next token is at a column. The cache is left as it is."""
        self.tokens.zero_()
        self.positions.zero_()
        self.column.fill_(column)
        self._padding.zero_()
        self.valid.fill_(False)
        self.valid[:rows].fill_(True)

    def feed(self, tokens: torch.Tensor, after: int = 1) -> None:
        """The next step is that of these tokens (n,), of the first n rows, which come after so many others."""
        self.tokens[: len(tokens), 0].copy_(tokens)
        self.positions.add_(after)
        self.column.add_(after)

    def forward(self, rows: int, length: int) -> None:
        """One token of each of the first rows, compiled where that is wanted; see `StepModel`."""
        with self.compiled(rows, length):
            self.run(rows, length)

    def compiled(self, rows: int, length: int) -> contextlib.AbstractContextManager[None]:
        """Inside, steps of so many rows and columns of this thread are compiled where that is wanted; not the first.

        Compiled or not, they choose experts by a kernel of ours.
        """
        if self._compiled is None or not all(memory.tensors for memory in self._memories):
            return OwnTopK()
        return self._compiled.used(self._model(), (rows, length, self.rows, self.length))

    def run(self, rows: int, length: int) -> None:
        """One token of each of the first rows, whose tensors may be views."""
        self.read(self.tokens[:rows], self.positions[:rows], length)

    def read(self, ids: torch.Tensor, positions: torch.Tensor, length: int) -> None:
        """Tokens (B, T), written from the next column on; leaves logits of the last ones. The column stays."""
        rows = len(ids)
        given = {self._cache_name: self._cache(rows, length), "attention_mask": self._masks(rows, ids.shape[1], length)}
        model = self._model()
        assert model is not None, "who steps holds the model"
        with contextlib.nullcontext() if self._attention is None else self._attention.used(model):
            out = model(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **given)
        logits = out.logits[:, -1]
        if self.logits.shape[1] != logits.shape[1]:
            with torch.inference_mode(False):
                self.logits = torch.zeros(self.rows, logits.shape[1], dtype=torch.float32, device=self._on)
        self.logits[:rows].copy_(logits)

    def _cache(self, rows: int, length: int) -> Cache:
        if (rows, length) not in self._caches:
            whole = self.rows, self.length
            layers = [_FixedLayer(memory, self.column, rows, length, whole) for memory in self._memories]
            self._caches[rows, length] = Cache(layers=layers)
        return self._caches[rows, length]

    def _masks(self, rows: int, tokens: int, length: int) -> Any:
        """What to add to the scores (rows, 1, tokens, length): for each kind of layers, or for all."""
        at = (self.column if tokens == 1 else self.column + self._columns[:tokens])[:, None]
        whole = torch.where(self._columns[:length] > at, self._least, self._padding[:rows, None, :length])[:, None]
        if self._named and "sliding_attention" not in self._kinds:
            return dict.fromkeys(self._kinds, whole)
        windowed = whole
        if self._window is not None:
            windowed = torch.where(self._columns[:length] <= at - self._window, self._least, whole)
        if self._named:
            return {kind: windowed if kind == "sliding_attention" else whole for kind in self._kinds}
        return windowed
