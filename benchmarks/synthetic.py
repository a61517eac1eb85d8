"""Models with the shapes of public ones, built in memory, for measuring without a checkpoint on disk.

The dense part is transformers' own with random weights, the experts are in host banks as `freetoken.load` leaves them.
A few random experts are quantized; every other record is one of these with its tiles rotated, which is an expert just
as valid with bytes of its own, made at the speed of a copy. Which experts a token takes is drawn beforehand and lies
on the device, so that skew and locality are what was asked for, and nothing waits for the host.
"""

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from layers import make_expert
from numpy.typing import NDArray
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM
from transformers.integrations.moe import ExpertsInterface
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from freetoken import topology
from freetoken.banks import LayerBank, make_bank
from freetoken.checkpoint.inspect import experts_per_token
from freetoken.checkpoint.jobs import run_jobs
from freetoken.errors import ConfigError
from freetoken.executor import Activation, BoundLayer, Executor
from freetoken.formats.base import TILE_ROWS, Format
from freetoken.formats.record import RecordLayout
from freetoken.integration.activation import find_activation
from freetoken.integration.operator import IMPLEMENTATION, attach_layer
from freetoken.integration.plan import drop_parameters, find_experts, shape_of_module
from freetoken.integration.quantizer import FreetokenConfig
from freetoken.integration.transformers import finish
from freetoken.memory import budget, guard
from freetoken.memory.placement import Placer, choose

STUB = "freetoken_stub"
"""Name under which experts that do nothing are registered with transformers."""


@dataclass(frozen=True)
class ModelShape:
    """A public model's config. family: transformers' model type. source: where the fields come from.

    format: in which its experts are published, or usually quantized. fields: of the config; what is not named has the
    config class's own default.
    """

    family: str
    source: str
    format: str
    fields: Mapping[str, Any]

    def config(self, layers: int | None = None) -> Any:
        """transformers' config, cut to the first `layers` layers; raises `ConfigError` when there are not so many."""
        whole = self.fields["num_hidden_layers"]
        if layers is not None and not 1 <= layers <= whole:
            raise ConfigError(
                f"{self.source}: it has {whole} layers and cannot be cut to {layers}",
                name="layers",
                value=layers,
                expected=f"1 to {whole}",
            )
        return CONFIG_MAPPING[self.family](**self.fields | {"num_hidden_layers": layers or whole})


SHAPES = {
    "qwen3-30b-a3b": ModelShape(
        "qwen3_moe",
        "config.json of Qwen/Qwen3-30B-A3B",
        "nvfp4",
        {
            "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
            "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "gpt-oss-120b": ModelShape(
        "gpt_oss",
        "config.json of openai/gpt-oss-120b",
        "mxfp4",
        {
            "vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 128,
            "num_experts_per_tok": 4, "sliding_window": 128,
        },
    ),
    "deepseek-v4-flash": ModelShape(
        "deepseek_v4",
        "transformers' DeepseekV4Config, whose defaults are those of deepseek-ai/DeepSeek-V4-Flash-Base",
        "ds_fp4",
        {
            "vocab_size": 129280, "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43,
            "n_routed_experts": 256, "num_experts_per_tok": 6,
        },
    ),
    "tiny": ModelShape(
        "qwen3_moe",
        "made for tests",
        "nvfp4",
        {
            "vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 32,
            "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "max_position_embeddings": 512,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """What a shape in a format comes to, before any of it exists. dense_bytes: of all but the experts."""

    config: Any
    layers: int
    n_experts: int
    top_k: int
    layout: RecordLayout
    activation: Activation
    dense_bytes: int

    def need(self, threads: int) -> budget.Need:
        """Host memory for all of it. A dense part that is built on a device is counted all the same."""
        return budget.Need(
            banks=self.layers * self.n_experts * self.layout.nbytes,
            dense=self.dense_bytes,
            transient=4 * self.layout.nbytes + 16 * self.layout.hidden * self.layout.intermediate,
            threads=threads,
            spare=guard.min_available_bytes(),
        )


def make_plan(shape: ModelShape, fmt: Format, layers: int | None, dtype: torch.dtype) -> Plan:
    """From a skeleton that transformers builds without memory."""
    config = shape.config(layers)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=dtype)
    experts = list(find_experts(skeleton).values())
    n_experts, hidden, width = shape_of_module(experts[0])
    everything = sum(p.nbytes for p in skeleton.parameters())
    return Plan(
        config,
        len(experts),
        n_experts,
        experts_per_token(config.to_dict()),
        RecordLayout(fmt, hidden, width, bool(experts[0].has_bias)),
        find_activation(experts[0]),
        everything - sum(p.nbytes for module in experts for p in module.parameters()),
    )


class Synthetic:
    """The banks of a shape's layers, and models over them.

    fmt: of the experts. layers: how many of the shape's, None for all. dtype: of the dense part. threads: CPU workers
    as for `freetoken.load`. seed: of everything random. check_memory: raise `CapacityError` before anything large is
    allocated if banks and dense part do not fit. A machine that is given memory as it uses it says too little: switch
    the check off there.
    """

    def __init__(
        self,
        shape: ModelShape,
        fmt: Format,
        layers: int | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        threads: Any = "auto",
        seed: int = 0,
        check_memory: bool = True,
    ) -> None:
        self.plan, self.dtype, self.seed = make_plan(shape, fmt, layers, dtype), dtype, seed
        plan, machine = self.plan, topology.read()
        workers = machine.workers(threads)
        where = choose(machine, workers)
        if check_memory:
            what = f"building {plan.layers} layers of {plan.n_experts} {fmt.name} experts"
            budget.require(plan.need(len(workers)), what=what)
        start = time.perf_counter()
        executor, placer = Executor(workers, dtype, machine.why(threads), where), Placer(where)
        banks = [make_bank(plan.layout, plan.n_experts, placer, executor.shard_step) for _ in range(plan.layers)]
        fill(banks, seed, len(workers))
        self.bound: list[BoundLayer] = [executor.bind(bank, plan.activation) for bank in banks]
        self.seconds = time.perf_counter() - start

    @property
    def bank_bytes(self) -> int:
        """Bytes of all records."""
        return sum(layer.bank.nbytes for layer in self.bound)

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's record or records."""
        return self.bound[0].bank.nbytes // self.plan.n_experts

    @property
    def memory(self) -> list[NDArray[np.uint8]]:
        """All records."""
        return [shard.records.reshape(-1) for layer in self.bound for shard in layer.bank.shards]

    def model(self, device: str | torch.device = "cpu") -> Any:
        """A model of its own over these banks; its dense part has the same weights each time on the same device."""
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(self.plan.config)]
        on = {} if torch.device(device).type == "cpu" else {"device_map": {"": device}}
        with _quiet(), torch.random.fork_rng():
            torch.manual_seed(self.seed)
            model = kind.from_pretrained(
                None,
                config=self.plan.config,
                state_dict={},  # all is missing, so transformers initializes all
                dtype=self.dtype,
                quantization_config=FreetokenConfig((), _drop_experts),
                experts_implementation=IMPLEMENTATION,
                **on,
            )
        for module, layer in zip(find_experts(model).values(), self.bound, strict=True):
            attach_layer(module, layer)
        finish(model.eval())
        return model


def _drop_experts(model: torch.nn.Module) -> None:
    for module in find_experts(model).values():
        drop_parameters(module)
        module._is_hf_initialized = True  # type: ignore[assignment]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers would list every tensor as missing, and draw a bar."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def fill(banks: Sequence[LayerBank], seed: int, threads: int) -> None:
    """Every record of every bank, no two of them alike."""
    layouts = [shard.layout for shard in banks[0].shards]
    n_experts = banks[0].n_experts
    turns = min(math.prod(_whole_tiles(layout)) for layout in layouts)
    sources = max(2, math.ceil(len(banks) * n_experts / turns))
    records = [np.empty((sources, layout.nbytes), np.uint8) for layout in layouts]

    def quantize(number: int) -> None:
        expert = make_expert(banks[0].layout, np.random.default_rng([seed, number]))
        for layout, part, out in zip(layouts, banks[0].cut(expert), records, strict=True):
            layout.pack(part, out[number])

    def rotate(job: tuple[int, int]) -> None:
        turn, source = divmod(job[0] * n_experts + job[1], sources)
        for shard, made in zip(banks[job[0]].shards, records, strict=True):
            rotate_record(shard.layout, made[source], turn, shard.records[job[1]])

    run_jobs(quantize, range(sources), threads)
    run_jobs(rotate, [(layer, e) for layer in range(len(banks)) for e in range(n_experts)], threads)
    for bank in banks:
        for shard in bank.shards:
            shard.mark(range(n_experts))


def _whole_tiles(layout: RecordLayout) -> tuple[int, int]:
    """Tiles of gate and of down that hold no padding."""
    return layout.intermediate // TILE_ROWS, layout.hidden // TILE_ROWS


def rotate_record(layout: RecordLayout, record: NDArray[np.uint8], turn: int, out: NDArray[np.uint8]) -> None:
    """Write to `out` the record with the pairs of gate and up tiles, and those of down, moved round.

    turn: 0 to one less than the product of both counts of whole tiles gives records that all differ. A last tile that
    holds padding stays where it is, as do global scales and biases.
    """
    by, at = divmod(turn, layout.hidden // TILE_ROWS), 0
    counts = layout.gate_tiles, layout.down_tiles
    for section, tiles, whole, first in zip(("gate_up", "down"), counts, _whole_tiles(layout), by, strict=True):
        start, size = layout.sections[section]
        out[at:start] = record[at:start]
        at = start + size
        old, new = (memory[start:at].reshape(tiles, -1) for memory in (record, out))
        split = first % whole
        new[: whole - split] = old[split:whole]
        new[whole - split : whole] = old[:split]
        new[whole:] = old[whole:]
    out[at:] = record[at:]


def draw_routes(
    layers: int,
    steps: int,
    batch: int,
    experts: int,
    top_k: int,
    *,
    skew: float = 0.0,
    locality: float = 0.0,
    seed: int = 0,
) -> torch.Tensor:
    """(layers, steps, batch, top_k) int64 on the CPU: the experts of each token, which differ from each other.

    skew: the exponent of Zipf's law by which experts are drawn, one after the other, 0 for all alike; each layer has
    favourites of its own. locality: the share of a token's experts that stay from the token before in its sequence, on
    average over tokens; the others are drawn anew from all that did not stay, and may hit one of the token before.
    """
    random = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(experts, generator=random) for _ in range(layers)]) + 1
    log_share = (-skew * ranks.float().log()).repeat_interleave(batch, 0)
    chains = layers * batch
    out = torch.empty(steps, chains, top_k, dtype=torch.int64)
    for step in range(steps):
        uniform = torch.rand(chains, experts, generator=random).clamp_min(1e-30)
        score = log_share - (-uniform.log()).log()  # the largest k of these are k drawn one after the other (Gumbel)
        if step and locality > 0:
            order = torch.rand(chains, top_k, generator=random).argsort(1)
            stay = order < (top_k * locality + torch.rand(chains, 1, generator=random)).floor()
            kept = torch.zeros(chains, experts, dtype=torch.bool).scatter_(1, out[step - 1], stay)
            score.masked_fill_(kept, math.inf)
        out[step] = score.topk(top_k, dim=1).indices
    return out.view(steps, layers, batch, top_k).transpose(0, 1).contiguous()


class Routing:
    """Puts drawn experts in the place of those that a model's routers chose; the routers run all the same.

    The routers' weights stay, normalized as the family does it. ids: from `draw_routes`. All is on the device: the
    table, and the step at which it is read, which the last layer moves on by the tokens of the call, so that a captured
    graph goes on with each replay. Calls are of `batch` sequences of equal length, at most as long as the table, which
    is read round and round.
    """

    def __init__(self, model: Any, ids: torch.Tensor, device: str | torch.device) -> None:
        self.ids = ids.to(device)
        self.layers, self.steps, self.batch, self.top_k = ids.shape
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._ahead = torch.arange(self.steps, device=device)
        modules = find_experts(model).values()
        self._hooks = [
            module.register_forward_pre_hook(self._choose(number))
            for number, module in zip(range(self.layers), modules, strict=True)
        ]

    def _choose(self, layer: int) -> Any:
        table, last = self.ids[layer], layer == self.layers - 1

        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x, _, weights = args
            tokens = len(x) // self.batch
            at = self.step if tokens == 1 else (self.step + self._ahead[:tokens]) % self.steps
            ids = table.index_select(0, at).transpose(0, 1).reshape(len(x), self.top_k)
            if last:
                self.step.add_(tokens).remainder_(self.steps)
            return x, ids, weights

        return hook

    def restart(self) -> None:
        """Back to the first step."""
        self.step.zero_()

    def remove(self) -> None:
        """The routers decide again."""
        for hook in self._hooks:
            hook.remove()


@torch.library.custom_op("freetoken_benchmarks::no_experts", mutates_args=())
def no_experts(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Zeros, but a compiler does not know it: what they are given is computed."""
    return torch.zeros_like(x)


@no_experts.register_fake
def _(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _no_experts(module: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    zeros: torch.Tensor = torch.ops.freetoken_benchmarks.no_experts(x, ids, weights)
    return zeros


ExpertsInterface.register(STUB, _no_experts)


@contextlib.contextmanager
def stubbed(model: Any) -> Iterator[None]:
    """Meanwhile the model's experts give zeros of the right shape, at once."""
    configs = list({id(m.config): m.config for m in find_experts(model).values()}.values())
    before = [config._experts_implementation for config in configs]
    for config in configs:
        config._experts_implementation = STUB
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation = name
