"""The loop of `generate` in captured steps, from the logits of a prompt on.

Before the prompt is read all is captured: the step, which runs on whatever lies in its tensors, and the tail that
chooses tokens. From then on a step is launched, and while it runs the tokens of the step before are looked at: that a
text has ended is known one step late, and the step too many is dropped.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import EosTokenCriteria
from transformers.generation.configuration_utils import GenerationMode

from freetoken import settings
from freetoken.decode.graph import SIZES, DecodeGraph, length_of, size_of
from freetoken.decode.ring import TokenRing
from freetoken.device.base import Graph
from freetoken.duties.steps import StepGraph
from freetoken.errors import ClosedError, ConfigError, DeviceError, FreeTokenError, StepError
from freetoken.integration.attention import implementation
from freetoken.integration.fixed_cache import FixedForward, cache_argument, why_not_copied
from freetoken.integration.generated import Generated
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


@dataclass
class _Kept:
    """What stays between calls. placed: where the model's tensors lay."""

    forward: FixedForward
    graph: DecodeGraph
    placed: object
    samplers: dict[Hashable, tuple[Sampler, TokenRing]] = field(default_factory=dict)


class Decoder:
    """Decodes in captured steps, on a fixed cache that it keeps for the next call. experts: the model's."""

    def __init__(self, experts: DeviceExperts) -> None:
        self.experts = experts
        self._lock = threading.Lock()
        self._thread = 0  # which has it
        self._kept: _Kept | None = None
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

        Raises `UnsuitedError` before the prompt was read, anything was streamed or a random number was drawn.
        """
        if self._thread == threading.get_ident():
            raise UnsuitedError("it was called by a streamer or criterion of itself")
        with self._lock:
            self._thread = threading.get_ident()
            try:
                why = self._why_not(model, input_ids, logits_processor, generation_config, model_kwargs)
                if why:
                    raise UnsuitedError(why)
                self.experts.host.steps.drain()  # raises where a step before does not end: nothing may wait for it
                with torch.inference_mode(False), torch.no_grad():  # what is kept is used outside of that too
                    run = self._prepare(model, input_ids, logits_processor, stopping_criteria, generation_config)
                if streamer is not None:
                    streamer.release()
                logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1]
                with torch.inference_mode(False), torch.no_grad():
                    run.begin(input_ids, logits, logits_processor, model_kwargs, cache_argument(model))
                    text = Generated(input_ids, stopping_criteria, _pad(generation_config))
                    run.go(text, streamer)
                    return text.result()
            finally:
                self._thread = 0

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
        if config.max_length - ids.shape[1] <= 1:
            return "a single token is asked for"
        if self._too_large and size * length_of(_room(ids, config)) >= self._too_large:
            return "there was no memory for a cache of fixed size"
        return ""

    def _prepare(
        self, model: Any, ids: torch.Tensor, processors: Sequence[Any], criteria: Sequence[Any], config: Any
    ) -> _Run:
        """Memory for these prompts, and the graphs of their first step."""
        (rows, prompt), room = ids.shape, length_of(_room(ids, config))
        size = size_of(rows)
        assert size is not None
        try:
            kept = self._reserve(model, size, room)
        except torch.OutOfMemoryError:
            self._kept, self._too_large = None, size * room
            why = f"there is no memory for a cache of {room} tokens for {size} sequences"
            logger.warning("%s: their steps are not replayed", why)
            raise UnsuitedError(why) from None
        except Exception as error:  # a model's code may raise anything
            self._kept = None
            self._refuse(error)
            raise UnsuitedError(self.why_not) from error
        ends: list[int] = next((c.eos_token_id.tolist() for c in criteria if type(c) is EosTokenCriteria), [])
        key = rows, bool(config.do_sample), tuple(ends), _pad(config), sampler_key(processors)
        if key not in kept.samplers:
            while len(kept.samplers) >= _SAMPLERS:
                oldest = next(iter(kept.samplers))
                del kept.samplers[oldest]
                kept.graph.forget_tail(oldest)
            how = {"sampled": config.do_sample, "ends": ends, "pad": _pad(config) or 0}
            sampler = Sampler(processors, kept.forward.logits.shape[1], kept.forward.valid[:rows], **how)
            kept.samplers[key] = sampler, TokenRing(self.experts.device, rows)
        run = _Run(self, kept, key, prompt, config.max_length - prompt, size)
        with kept.graph.between():
            kept.forward.start(rows)  # what is captured runs once, wherever the last call has ended
        run.lengthen(prompt + 1)
        if self.why_not:
            raise UnsuitedError(self.why_not)
        return run

    def _reserve(self, model: Any, size: int, length: int) -> _Kept:
        """With room for so many rows and tokens."""
        placed, kept = _placed(model), self._kept
        if kept is None or kept.forward.rows < size or placed != kept.placed:
            self._kept = kept = None  # before there is another
            forward = FixedForward(model, size, length)
            kept = _Kept(forward, DecodeGraph(self.experts, forward), placed)
            with kept.graph.unmoved(), self.experts.not_counting():
                forward.run(size, length)  # its memory is allocated now
            self._kept = kept
        elif length > kept.forward.length:
            self.grow(kept, length)
        return kept

    def grow(self, kept: _Kept, length: int) -> None:
        """More room for tokens; what is kept is dropped if that fails, since half of it may have moved."""
        try:
            kept.graph.forget()
            with kept.graph.between():
                kept.forward.grow(length)
        except BaseException:
            self._kept = None
            raise

    def capture(self, run: _Run) -> tuple[StepGraph, Graph] | None:
        """The graphs of a run's steps at the length that they have now; None where such are not to be had."""
        size = run.size, run.length
        if size in self._eager or self.why_not:
            return None
        try:
            step = run.kept.graph.step(*size)
            moved = (*run.sampler.moved, *run.ring.moved)
            return step, run.kept.graph.tail(run.key, run.choose, run.ring.send, moved)
        except torch.OutOfMemoryError:
            self._eager.add(size)
            logger.warning("no memory to capture steps of %d sequences with %d tokens: they run without", *size)
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything
            self._refuse(error)
            logger.warning("steps are not replayed: %s", self.why_not)
        return None

    def _refuse(self, error: Exception) -> None:
        """A step cannot be captured; raises an error that is about something else."""
        of_device = isinstance(error, DeviceError) and (error.facts["lost"] or error.facts["operation"] != "capture")
        if isinstance(error, StepError | ClosedError | ConfigError) or of_device:
            raise error
        self.why_not = f"a step cannot be captured: {type(error).__name__}: {error}"


class _Run:
    """One call: its texts from their prompts to their ends.

    prompt: tokens before; most: new ones. size: rows of a step; length: columns that steps see now.
    """

    def __init__(self, decoder: Decoder, kept: _Kept, key: Hashable, prompt: int, most: int, size: int) -> None:
        self.kept, self.key, self.size, self.length = kept, key, size, 0
        self.sampler, self.ring = kept.samplers[key]
        self._decoder, self._experts = decoder, decoder.experts
        self._prompt, self._most = prompt, most
        self._graphs: tuple[StepGraph, Graph] | None = None
        self._shown = 0

    def begin(
        self, ids: torch.Tensor, logits: torch.Tensor, processors: Sequence[Any], given: dict[str, Any], cache: str
    ) -> None:
        """Take over prompts that were read, and choose their first tokens. cache: its name in what was given."""
        forward, rows = self.kept.forward, len(ids)
        self._numbers = _Numbers(logits.device)
        with self.kept.graph.between():
            positions = given["position_ids"][:, -1:].expand(rows, 1)
            forward.begin(given[cache], given.get("attention_mask"), positions, self._prompt)
            forward.logits[:rows].copy_(logits)
            self.sampler.begin(ids.to(logits.device), processors)
            self.ring.count.zero_()
            self.choose()

    def go(self, text: Generated, streamer: Streamer | None) -> None:
        """To the end."""
        with self._experts.stepping():
            try:
                self._loop(text, streamer)
            except BaseException as error:
                self._experts.host.steps.cancel()
                if isinstance(error, Exception):  # else somebody waits for the prompt, and work may take its time
                    with contextlib.suppress(FreeTokenError):
                        self._experts.host.steps.drain()
                self._rewind()
                raise
        self._rewind()
        if streamer is not None:
            streamer.end()

    def _rewind(self) -> None:
        """Random numbers are those after the tokens that were looked at."""
        if self.sampler.sampled and self._shown < self._most:
            self._numbers.rewind(self.sampler.draw, self._shown)

    def _loop(self, text: Generated, streamer: Streamer | None) -> None:
        step, ahead = 0, self._launch(1)
        for n in range(self._most):
            if n:
                step, ahead = ahead, self._launch(n + 1)
            tokens = self._read(n, step)
            self._shown = n + 1
            tokens = text.add(tokens)
            if streamer is not None:
                streamer.put(tokens)
            if text.has_ended:
                break
        if ahead:
            self._experts.wait(ahead)  # a step too many

    def _launch(self, n: int) -> int:
        """Let the device come to the n-th tokens, from 0; the number of the step, 0 where none was launched."""
        if n >= self._most:
            return 0
        if self._prompt + n > self.length:
            self.lengthen(self._prompt + n)
        if self._graphs is not None:
            return self._experts.launch(*self._graphs)
        with self.kept.graph.between():
            self.kept.forward.run(self.size, self.length)
            self.choose()
        return 0

    def _read(self, n: int, step: int) -> torch.Tensor:
        """The n-th tokens, which came of a step, or were chosen without one."""
        if not step:
            return self.ring.fetch(n)
        self._experts.wait(step)
        return self.ring.read(n)

    def lengthen(self, tokens: int) -> None:
        """From now on steps see so many tokens, or more."""
        self.length = length_of(tokens)
        if self.length > self.kept.forward.length:
            self._decoder.grow(self.kept, self.length)
        self._graphs = self._decoder.capture(self)

    def choose(self) -> None:
        """The next tokens, of the logits that are there; they are what comes next."""
        tokens = self.sampler(self.kept.forward.logits[: self.sampler.rows])
        self.kept.forward.feed(tokens.clamp(min=0))  # -1: none can be sampled, which the host raises when it sees it
        self.ring.write(tokens)


def _room(ids: torch.Tensor, config: Any) -> int:
    """Tokens that a cache has room for at first."""
    return max(1, min(int(config.max_length) - 1, ids.shape[1] + _AHEAD))


def _placed(model: Any) -> object:
    """What graphs of a model depend on: where its tensors lie, how it attends, and what its modules are switched to."""
    tensors = tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers()))
    chosen = settings.ATTENTION.read(), settings.COMPILE.read()
    return implementation(model.config.get_text_config()), tensors, chosen, list(_switches(model))


def _switches(model: Any) -> Iterator[object]:
    """Plain attributes of modules, by which adapters, for one, are switched off; functions put in place of forward."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str) or name == "forward":
                yield value
            elif isinstance(value, list | tuple | set) and all(isinstance(one, str) for one in value):
                yield tuple(value)


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
