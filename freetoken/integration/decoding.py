"""The loop of `generate` in captured steps, from the logits of a prompt on.

A step is launched, and while it runs the tokens of the step before are looked at: that a text has ended is known one
step late, and the step too many is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import EosTokenCriteria
from transformers.generation.configuration_utils import GenerationMode

from freetoken.decode.graph import SIZES, DecodeGraph, length_of, size_of
from freetoken.decode.ring import TokenRing
from freetoken.device.base import Graph
from freetoken.duties.steps import StepGraph
from freetoken.errors import DeviceError, StepError
from freetoken.integration.fixed_cache import FixedForward, cache_argument, why_not_copied
from freetoken.integration.sampling import Sampler, sampler_key, unknown
from freetoken.offload.experts import DeviceExperts

logger = logging.getLogger(__name__)

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_EXTRAS = ("return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores", "output_logits")
"""What a generation config may ask for beside tokens."""
_KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep"}
"""Arguments of a forward pass that the loop understands, beside the cache."""
_AHEAD = 1024
"""Tokens behind a prompt that the cache has room for, or fewer where fewer are asked for; it grows when it is full."""
_SAMPLERS = 8
"""Kinds of sampling whose graphs are kept."""


class UnsuitedError(Exception):
    """This generation is for transformers' own loop; its text says why."""


class Streamer(Protocol):
    """What is told of tokens as they come."""

    def release(self) -> None:
        """From now on tokens are final."""

    def put(self, value: torch.Tensor) -> None:
        """The next token of each text."""

    def end(self) -> None:
        """There will be no more."""


class _Text:
    """What is generated, as transformers' loop has it, but on the host.

    prompts: (B, T). longest: tokens of each with the prompt; pad: what comes after one that has ended.
    """

    def __init__(self, prompts: torch.Tensor, criteria: Sequence[Any], pad: int | None, longest: int) -> None:
        self._prompts, self._criteria = prompts, criteria
        self._pad = pad if any(hasattr(criterion, "eos_token_id") for criterion in criteria) else None
        self._going = torch.ones(len(prompts), dtype=torch.int64)
        self._ids = torch.empty(len(prompts), longest, dtype=torch.int64)
        self._n = prompts.shape[1]
        self._ids[:, : self._n].copy_(prompts)

    def add(self, tokens: torch.Tensor) -> torch.Tensor:
        """The next token of each text (B,), padding where one has ended."""
        if self._pad is not None:
            tokens = tokens * self._going + self._pad * (1 - self._going)
        self._ids[:, self._n] = tokens
        self._n += 1
        here = self._ids[:, : self._n]
        there: torch.Tensor | None = None
        for criterion in self._criteria:
            if type(criterion).__module__.startswith("transformers."):
                ended = criterion(here, None)
            else:  # it may compare with tensors of its own
                there = here.to(self._prompts.device, copy=True) if there is None else there
                ended = torch.as_tensor(criterion(there, None)).cpu()
            self._going *= ~ended
        return tokens

    @property
    def has_ended(self) -> bool:
        """Whether all texts have."""
        return not bool(self._going.any())

    def result(self) -> torch.Tensor:
        """(B, tokens): prompts and what was generated."""
        new = self._ids[:, self._prompts.shape[1] : self._n]
        return torch.cat([self._prompts, new.to(self._prompts.device)], dim=1)


@dataclass
class _Way:
    """How the texts of one call are decoded.

    prompt: tokens before; most: new ones. size: rows of a step. length: columns that steps see now; graphs: none where
    steps of that length are not captured.
    """

    prompt: int
    most: int
    rows: int
    size: int
    key: Hashable
    sampler: Sampler
    ring: TokenRing
    length: int = 0
    graphs: tuple[StepGraph, Graph] | None = None


class Decoder:
    """Decodes in captured steps, on a fixed cache that it keeps for the next call. experts: the model's."""

    def __init__(self, experts: DeviceExperts) -> None:
        self._experts = experts
        self._lock = threading.Lock()
        self._thread = 0  # which has it
        self._forward: FixedForward | None = None
        self._placed: object = None  # where that found the model
        self._graph: DecodeGraph | None = None
        self._samplers: dict[Hashable, tuple[Sampler, TokenRing]] = {}
        self._eager: set[tuple[int, int]] = set()  # rows and lengths of steps that there was no memory to capture
        self._too_large = 0  # rows times length of a cache that there was no memory for
        self.why_not = ""
        """Why steps of this model cannot be captured, once that was found."""

    def decode(
        self,
        model: Any,
        input_ids: torch.Tensor,
        streamer: Streamer | None,
        *,
        logits_processor: Sequence[Any],
        stopping_criteria: Sequence[Any],
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """What transformers' `_sample` returns for the same arguments.

        Raises `UnsuitedError` before anything was streamed or any random number was drawn.
        """
        if self._thread == threading.get_ident():
            raise UnsuitedError("it was called by a streamer or criterion of itself")
        with self._lock:
            self._thread = threading.get_ident()
            try:
                why = self._why_not(model, input_ids, logits_processor, generation_config, model_kwargs)
                if why:
                    raise UnsuitedError(why)
                logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1]
                with torch.inference_mode(False), torch.no_grad():  # what is kept is used outside of that too
                    text = _Text(input_ids, stopping_criteria, _pad(generation_config), generation_config.max_length)
                    numbers = _Numbers(model.device)
                    try:
                        how = logits_processor, stopping_criteria, generation_config
                        way = self._begin(model, input_ids, logits, *how, model_kwargs)
                    except UnsuitedError:
                        numbers.rewind()
                        raise
                    self._decode(way, text, numbers, streamer)
            finally:
                self._thread = 0
        return text.result()

    def _why_not(self, model: Any, ids: torch.Tensor, processors: Sequence[Any], config: Any, given: Any) -> str:
        """Why this call is for transformers' own loop; nothing if it is not."""
        cache_name = cache_argument(model)
        cache, positions = given.get(cache_name), given.get("position_ids")
        mode = config.get_generation_mode(None)
        extras = [name for name in _EXTRAS if getattr(config, name, None)]
        more = [name for name, value in given.items() if value is not None and name not in {*_KNOWN, cache_name}]
        size = size_of(len(ids))
        if mode not in _MODES:
            return f"{mode.value} is not for it"
        if extras or more:
            return f"{', '.join(extras + more)} was given"
        if names := unknown(processors):
            return f"it does not know {', '.join(names)}"
        if not given.get("use_cache") or cache is None:
            return "there is no cache"
        if positions is None or positions.dim() != 2:
            return "positions are more than a number for each token"
        if why := why_not_copied(cache):
            return why
        if ids.device.type != model.device.type and config.do_sample:
            return f"tokens on {ids.device} are sampled there"
        if size is None:
            return f"{len(ids)} sequences are more than {SIZES[-1]}"
        if self._too_large and size * length_of(_room(ids, config)) >= self._too_large:
            return "there was no memory for a cache of fixed size"
        return ""

    def _begin(
        self,
        model: Any,
        ids: torch.Tensor,
        logits: torch.Tensor,
        processors: Sequence[Any],
        criteria: Sequence[Any],
        config: Any,
        given: dict[str, Any],
    ) -> _Way:
        """Take over the prompts, choose their first tokens, and capture the step of the next ones."""
        (rows, prompt), vocabulary = ids.shape, logits.shape[1]
        size = size_of(rows)
        assert size is not None
        try:
            forward, graph = self._reserve(model, vocabulary, size, length_of(_room(ids, config)))
            positions = given["position_ids"][:, -1:].expand(rows, 1)
            forward.begin(given[cache_argument(model)], given.get("attention_mask"), positions, prompt)
        except torch.OutOfMemoryError:
            self._too_large = size * length_of(_room(ids, config))
            self._forward = self._graph = None
            self._samplers.clear()
            raise UnsuitedError(
                f"there is no memory for a cache of {length_of(_room(ids, config))} tokens for {size} sequences"
            ) from None
        ends: list[int] = next((c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria), [])
        key = rows, bool(config.do_sample), tuple(ends), _pad(config), sampler_key(processors)
        if key not in self._samplers:
            while len(self._samplers) >= _SAMPLERS:
                oldest = next(iter(self._samplers))
                del self._samplers[oldest]
                graph.forget_tail(oldest)
            valid = forward.valid[:rows]
            sampler = Sampler(processors, vocabulary, valid, sampled=config.do_sample, ends=ends, pad=_pad(config) or 0)
            self._samplers[key] = sampler, TokenRing(self._experts.device, rows)
        sampler, ring = self._samplers[key]
        way = _Way(prompt, config.max_length - prompt, rows, size, key, sampler, ring)
        with graph.between():
            sampler.begin(ids.to(model.device), processors)
            ring.count.zero_()
            forward.logits[:rows].copy_(logits)
            self._choose(way)
        if way.most > 1:
            self._lengthen(way, prompt + 1)
        return way

    def _reserve(self, model: Any, vocabulary: int, size: int, length: int) -> tuple[FixedForward, DecodeGraph]:
        """With room for so many rows and tokens."""
        placed = _placed(model)
        if self._forward is None or self._graph is None or self._forward.rows < size or placed != self._placed:
            self._forward = self._graph = None
            self._samplers.clear()
            self._placed = placed
            self._forward = FixedForward(model, vocabulary, size, length)
            self._graph = DecodeGraph(self._experts, self._forward)
        elif length > self._forward.length:
            self._graph.forget()
            self._forward.grow(length)
        return self._forward, self._graph

    def _choose(self, way: _Way) -> None:
        """The next tokens, of the logits that are there; they are what comes next."""
        assert self._forward is not None
        tokens = way.sampler(self._forward.logits[: way.rows])
        self._forward.feed(tokens)
        way.ring.write(tokens)

    def _lengthen(self, way: _Way, tokens: int) -> None:
        """From now on steps see so many tokens, or more."""
        assert self._forward is not None and self._graph is not None
        first, way.length = not way.length, length_of(tokens)
        if way.length > self._forward.length:
            self._graph.forget()
            with self._graph.between():
                self._forward.grow(way.length)
        way.graphs = None
        if (way.size, way.length) in self._eager or self.why_not:
            return
        try:
            step = self._graph.step(way.size, way.length)
            moved = (*way.sampler.moved, *way.ring.moved)
            way.graphs = step, self._graph.tail(way.key, lambda: self._choose(way), way.ring.send, moved)
        except torch.OutOfMemoryError:
            self._eager.add((way.size, way.length))
            logger.warning(
                "no memory to capture steps of %d sequences with %d tokens: they run without", way.size, way.length
            )
        except Exception as error:  # a model's code may raise anything
            if isinstance(error, StepError) or (isinstance(error, DeviceError) and error.facts["lost"]):
                raise
            self.why_not = f"a step cannot be captured: {type(error).__name__}: {error}"
            if first:
                raise UnsuitedError(self.why_not) from error
            logger.warning("steps are not replayed any more: %s", self.why_not)

    def _decode(self, way: _Way, text: _Text, numbers: _Numbers, streamer: Streamer | None) -> None:
        """From the first tokens, which are chosen, to the last."""
        tokens = way.ring.fetch(0, way.rows)
        if streamer is not None:
            streamer.release()
        with self._experts.stepping():
            try:
                shown = self._loop(way, text, tokens, streamer)
            except BaseException:
                self._experts.host.steps.cancel()
                raise
        if way.sampler.sampled and shown < way.most:
            numbers.rewind(way.sampler.draw, shown)
        if streamer is not None:
            streamer.end()

    def _loop(self, way: _Way, text: _Text, tokens: torch.Tensor, streamer: Streamer | None) -> int:
        """How many tokens each text got. tokens: the first ones, which are chosen."""
        assert self._graph is not None
        ahead = self._launch(way, 1)
        for n in range(way.most):
            if n:
                step, ahead = ahead, self._launch(way, n + 1)
                tokens = self._read(way, n, step)
            shown = text.add(tokens)
            if streamer is not None:
                streamer.put(shown)
            if text.has_ended:
                break
        if ahead:
            self._experts.wait(ahead)  # a step too many
        return n + 1

    def _launch(self, way: _Way, n: int) -> int:
        """Let the device come to the n-th tokens, from 0; the number of the step, 0 where none was launched."""
        assert self._forward is not None and self._graph is not None
        if n >= way.most:
            return 0
        if way.prompt + n > way.length:
            self._lengthen(way, way.prompt + n)
        if way.graphs is not None:
            return self._experts.launch(*way.graphs)
        with self._graph.between():
            self._forward.forward(way.size, way.length)
            self._choose(way)
        return 0

    def _read(self, way: _Way, n: int, step: int) -> torch.Tensor:
        """The n-th tokens, which came of a step."""
        assert self._graph is not None
        if not step:
            return way.ring.fetch(n, way.rows)
        self._experts.wait(step)
        return way.ring.read(n, way.rows)


def _room(ids: torch.Tensor, config: Any) -> int:
    """Tokens that a cache has room for at first."""
    return max(1, min(int(config.max_length) - 1, ids.shape[1] + _AHEAD))


def _placed(model: Any) -> object:
    """What graphs of a model depend on: where its tensors lie, and how it attends."""
    tensors = (*model.parameters(), *model.buffers())
    return model.config.get_text_config()._attn_implementation, tuple(tensor.data_ptr() for tensor in tensors)


def _pad(config: Any) -> int | None:
    """The token that comes after a text, if there is one."""
    pad = config._pad_token_tensor
    return None if pad is None else int(pad.reshape(-1)[0])


class _Numbers:
    """torch's random numbers as they are now."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()

    def rewind(self, draw: Callable[[], object] = lambda: None, times: int = 0) -> None:
        """Let them be as if only this had been drawn since."""
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(self._state, self._device)
        else:
            torch.set_rng_state(self._state)
        for _ in range(times):
            draw()
