"""Small valid checkpoints of every kind, and seeded mutations of their files.

A checkpoint here is file name -> bytes, few enough that thousands are written in seconds, with data so small that a
header that makes a reader allocate shows. Each mutation is a function of a generator and a base; the same seed makes
the same bytes. JSON is written by hand, because what must be tried are the things that `json.dumps` would not write.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.checkpoints import DIALECTS, HIDDEN, WIDTH, Tensors, bf16, experts, qwen3_config

Files = dict[str, bytes]
COUNT = 2
"""Experts of every base."""


@dataclass(frozen=True)
class Raw:
    """Text that stands in JSON as it is."""

    text: str


class Pairs(list[tuple[Any, Any]]):
    """An object whose keys may repeat, or be no strings."""


def dump(value: Any) -> str:
    """JSON of plain data, `Raw` and `Pairs`."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        value = Pairs(value.items())
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{dump(k)}:{dump(v)}" for k, v in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


# --- what is valid ---------------------------------------------------------------------------------------------------


def st_file(tensors: Tensors) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, array) in tensors.items():
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def st_bytes(header: Any, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file; header: text or what `dump` takes; length: what its first 8 bytes claim."""
    raw = header if isinstance(header, bytes) else dump(header).encode("utf-8", "surrogatepass")
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


@dataclass
class Folder:
    """A folder of safetensors before it is written: JSON files, and shards as (header, data)."""

    jsons: dict[str, Any]
    shards: dict[str, tuple[Any, bytes]]

    def files(self) -> Files:
        """Its bytes."""
        return {
            **{name: dump(value).encode("utf-8", "surrogatepass") for name, value in self.jsons.items()},
            **{name: st_bytes(*shard) for name, shard in self.shards.items()},
        }


def folders() -> list[Folder]:
    """Every dialect of separate experts, fused ones, a folder of two shards, a sidecar and a config in a config."""
    rng = np.random.default_rng(0)
    out = []
    prefix = "model.layers.0.mlp.experts"
    router: Tensors = {"model.layers.0.mlp.gate.weight": bf16(rng.standard_normal((COUNT, HIDDEN)))}
    for dialect, (section, _) in DIALECTS.items():
        config = small_config() | ({} if section is None else {"quantization_config": section})
        tensors = router | experts(rng, dialect, prefix, COUNT)
        out.append(Folder({"config.json": config}, {"model.safetensors": st_file(tensors)}))
    plain = router | experts(rng, "bf16", prefix, COUNT)
    names = sorted(plain)
    halves = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
    index = {"metadata": {"total_size": 1}, "weight_map": {n: f for f, part in halves.items() for n in part}}
    out.append(
        Folder(
            {"config.json": {"model_type": "x", "text_config": small_config()}, "model.safetensors.index.json": index},
            {file: st_file({name: plain[name] for name in part}) for file, part in halves.items()},
        )
    )
    sidecar = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*mlp.gate"]}}
    packed = router | experts(rng, "modelopt", prefix, COUNT)
    out.append(
        Folder(
            {"config.json": small_config(), "hf_quant_config.json": sidecar},
            {"model.safetensors": st_file(packed)},
        )
    )
    fused: Tensors = {
        f"{prefix}.gate_up_proj": bf16(rng.standard_normal((COUNT, 2 * WIDTH, HIDDEN))),
        f"{prefix}.down_proj": bf16(rng.standard_normal((COUNT, HIDDEN, WIDTH))),
    }
    silent = {"model_type": "mixtral"}  # no number of experts or width that would refuse what the headers say
    out.append(Folder({"config.json": silent}, {"model.safetensors": st_file(router | fused)}))

    def codes(*shape: int) -> Any:
        return "U8", rng.integers(100, 130, shape, np.uint8)

    blocks: Tensors = {
        f"{prefix}.gate_up_proj_blocks": codes(COUNT, 2 * WIDTH, HIDDEN // 32, 16),
        f"{prefix}.gate_up_proj_scales": codes(COUNT, 2 * WIDTH, HIDDEN // 32),
        f"{prefix}.gate_up_proj_bias": bf16(rng.standard_normal((COUNT, 2 * WIDTH))),
        f"{prefix}.down_proj_blocks": codes(COUNT, HIDDEN, WIDTH // 32, 16),
        f"{prefix}.down_proj_scales": codes(COUNT, HIDDEN, WIDTH // 32),
        f"{prefix}.down_proj_bias": bf16(rng.standard_normal((COUNT, HIDDEN))),
    }
    native = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head", "model.layers.*.self_attn"]}
    config = small_config(model_type="gpt_oss", quantization_config=native, num_local_experts=COUNT)
    out.append(Folder({"config.json": config}, {"model.safetensors": st_file(router | blocks)}))
    return out


def small_config(**changes: Any) -> dict[str, Any]:
    """A config of the bases here."""
    return qwen3_config(num_experts=COUNT, num_experts_per_tok=1, num_hidden_layers=1, **changes)


U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class Gguf:
    """A GGUF file before it is written: metadata as (key, type, bytes), tensors as [name, dims, type, offset]."""

    values: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    tensors: list[list[Any]] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int | None, int | None] = None, None
    alignment: int = 32

    def add(self, name: str, dims: tuple[int, ...], kind: int, raw: bytes) -> None:
        """One more tensor and its aligned data."""
        self.tensors.append([name.encode(), list(dims), kind, len(self.data)])
        self.data += raw + bytes(-len(raw) % self.alignment)

    def encode(self) -> tuple[bytes, bytes]:
        """The header and the file."""
        there = len(self.tensors), len(self.values)
        counts = [t if c is None else c for c, t in zip(self.counts, there, strict=True)]
        head = self.magic + struct.pack("<IQQ", self.version, *counts)
        for key, kind, raw in self.values:
            head += text(key) + struct.pack("<I", kind) + raw
        for name, dims, kind, offset in self.tensors:
            head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
        return head, head + bytes(-len(head) % self.alignment) + self.data


def ggufs() -> list[list[Gguf]]:
    """Models as lists of parts: qwen3moe in q8_0, in bf16 with merged gate and up, and split; gpt-oss with biases."""
    q8, f32, bf, mx = 8, 0, 30, 39
    rng = random.Random(0)

    def blocks(kind: int, weights: int) -> bytes:
        if kind == q8:
            return b"".join(struct.pack("<e", 0.01) + rng.randbytes(32) for _ in range(weights // 32))
        if kind == mx:
            return b"".join(bytes([120]) + rng.randbytes(16) for _ in range(weights // 32))
        return struct.pack("<f", 0.5) * weights if kind == f32 else struct.pack("<H", 0x3F00) * weights

    def model(architecture: str, kind: int, merged: bool, bias: bool) -> Gguf:
        file = Gguf()
        numbers = {
            "block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32,
            "attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 16, "expert_count": COUNT,
            "expert_used_count": 1, "expert_feed_forward_length": 32, "attention.sliding_window": 8,
        }  # fmt: skip
        file.values = [(b"general.architecture", STRING, text(architecture))]
        file.values += [(f"{architecture}.{k}".encode(), U32, struct.pack("<I", v)) for k, v in numbers.items()]
        reals = {"attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e4}
        file.values += [(f"{architecture}.{k}".encode(), F32, struct.pack("<f", v)) for k, v in reals.items()]
        words = b"".join(text(f"w{n}") for n in range(8))
        file.values += [
            (b"tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 8) + words),
            (b"tokenizer.ggml.scores", ARRAY, struct.pack("<IQ", F32, 8) + bytes(32)),
            (b"tokenizer.ggml.eos_token_id", U32, struct.pack("<I", 2)),
            (b"tokenizer.ggml.add_bos_token", BOOL, b"\0"),
        ]
        file.add("token_embd.weight", (32, 8), bf, blocks(bf, 256))
        file.add("blk.0.attn_q.weight", (32, 32), bf, blocks(bf, 1024))
        file.add("blk.0.attn_k.weight", (32, 16), bf, blocks(bf, 512))
        rows = {"gate_up": 64, "down": 32} if merged else {"gate": 32, "up": 32, "down": 32}
        for name, n in rows.items():
            file.add(f"blk.0.ffn_{name}_exps.weight", (32, n, COUNT), kind, blocks(kind, 32 * n * COUNT))
            if bias:
                file.add(f"blk.0.ffn_{name}_exps.bias", (n, COUNT), f32, blocks(f32, n * COUNT))
        return file

    whole = model("qwen3moe", q8, merged=False, bias=False)
    first, second = copy.deepcopy(whole), Gguf()
    first.tensors, second.tensors = whole.tensors[:3], [[*t[:3], t[3] - whole.tensors[3][3]] for t in whole.tensors[3:]]
    first.data, second.data = whole.data[: whole.tensors[3][3]], whole.data[whole.tensors[3][3] :]
    for number, part in enumerate((first, second)):
        part.values += [
            (b"split.no", 2, struct.pack("<H", number)),
            (b"split.count", 2, struct.pack("<H", 2)),
            (b"split.tensors.count", 5, struct.pack("<i", len(whole.tensors))),
        ]
    return [
        [whole],
        [model("qwen3moe", bf, merged=True, bias=False)],
        [model("gpt-oss", mx, merged=False, bias=True)],
        [first, second],
    ]


def files_of(base: Folder | list[Gguf]) -> Files:
    """A base as it is, undamaged."""
    if isinstance(base, Folder):
        return base.files()
    return {n: part.encode()[1] for n, part in zip(gguf_names(len(base)), base, strict=True)}


def gguf_names(parts: int) -> list[str]:
    """File names of a model of that many parts."""
    return ["m.gguf"] if parts == 1 else [f"m-{n + 1:05}-of-{parts:05}.gguf" for n in range(parts)]


# --- what is not -----------------------------------------------------------------------------------------------------

SIZES = (0, 1, 2, 3, 7, 8, 31, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1,
         2**63, 2**64 - 32, 2**64 - 1)  # fmt: skip
WORDS = ("", " ", "0", "2", "-1", "true", "weight", "a\nb", "\x1b[2J\r", "\u2028", "\x00", "é" * 9, "x" * 3000, "..",
         "../../etc/passwd", "/etc/passwd", "/dev/zero", "config.json", "model.safetensors", "~", "%s{0}", "U8", "bf16",
         "BF16", "F64", "C64", "F8_E5M2", "NVFP4", "mxfp4", "modelopt", "compressed-tensors", "dense", "gpt_oss",
         "experts.0.gate_proj.weight", "model.layers.99999999999.mlp.experts.0.up_proj.weight",
         "model.layers.0.mlp.experts.999999999.up_proj.weight",
         "model.layers.٣.mlp.experts.٣.up_proj.weight")  # fmt: skip
BOMBS = (
    *("re:(a+)+$", "re:(.*)*$", "re:(.*.*)*x", "re:" + ".*" * 30 + "x", "re:" + "(.|..)" * 30 + "$", "re:(?>(.*)*)!"),
    *("re:(m|mo|o)*$", "re:((((((.*)*)*)*)*)*)*!", "re:" + "[a-z.]?" * 40 + "!", "re:(?=(.*)*$)x", "re:(.*+)*!"),
    *(r"re:(\w+\.?)+\d*!", "re:.{0,99}.{0,99}.{0,99}.{0,99}!", "re:" + "(" * 3000, "re:" + "(" * 60 + "a" + ")+" * 60),
    *(
        "re:a{99999999999}",
        "re:(?a)(?u)x",
        "re:(?:){4294967294}",
        "re:(?P<a",
        "re:[z-a]",
        "re:[[a]",
        "re:(?i)[\x01-\U0010ffff]*",
    ),
    *("re:\\", "re:(?<=.*)a", "re:(.)\\1", "re:", "*" * 300, "*a" * 60 + "!", "[" * 60, "[!]" * 60),
    *("re:(?:(?:.{1,30}){1,30}){1,30}!", "re:(a)?(?(1).*|.*.*.*.*.*!)", "re:.*self_attn.*", "re:.*experts.*"),
)
"""Patterns of modules, the first of which take for ever."""


def odd(rng: random.Random) -> Any:
    """A value for any place in JSON."""
    depth = rng.choice((1, 3, 30, 300, rng.randrange(900, 1100), 100_000))
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: rng.choice((None, True, False)),
        lambda: rng.choice((1, -1)) * rng.choice(SIZES),
        lambda: rng.randrange(64),
        lambda: rng.choice((0.0, 1.0, -0.5, 1e300, Raw("1e999"), Raw("NaN"), Raw("-Infinity"), Raw("-0"))),
        lambda: Raw("9" * rng.choice((20, 300, 4000, 5000))),
        lambda: rng.choice(WORDS),
        lambda: rng.choice(BOMBS),
        lambda: Raw(rng.choice(('"\\ud800"', '"\ud800"', '"\\u0000"', '"a', "'a'", "", "nul", "01", "0x10", "[1,]"))),
        lambda: rng.choice(([], {}, [[]], [None], [{}], {"": {}}, [[1]], [0.5], ["1"])),
        lambda: Raw("[" * depth + "]" * depth),
        lambda: Raw('{"a":' * depth + "1" + "}" * depth),
        lambda: Raw("[" * depth),
        lambda: [rng.choice(SIZES)] * rng.choice((1, 2, 3, 4, 5, 33, 65, 3000)),
        lambda: [rng.choice(SIZES) for _ in range(rng.randrange(6))],
    )
    return rng.choice(kinds)()


def nodes(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside, without `value` itself; `Pairs` stay as they are."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list) and not isinstance(value, Pairs):
        items = enumerate(value)
    for key, inner in items:
        yield (*at, key)
        yield from nodes(inner, (*at, key))


def edit_json(rng: random.Random, root: Any) -> Any:
    """Change one node: another value, gone, wrapped, twice, exchanged with another, under another name; in place."""
    paths = list(nodes(root))
    if not paths:
        return odd(rng)
    *above, key = rng.choice(paths)
    holder = root
    for step in above:
        holder = holder[step]
    action = rng.randrange(8)
    if action <= 2:
        holder[key] = odd(rng)
    elif action == 3:
        del holder[key]
    elif action == 4:
        holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, [holder[key]] * 3, str(holder[key])))
    elif action == 5:
        *other_above, other = rng.choice(paths)
        elsewhere = root
        for step in other_above:
            elsewhere = elsewhere[step]
        holder[key] = copy.deepcopy(elsewhere[other])
    elif isinstance(holder, dict) and action == 6:
        holder[rng.choice((*WORDS, *holder))] = holder.pop(key)
    elif isinstance(holder, dict):
        return replace_node(root, holder, Pairs([*holder.items(), (key, odd(rng))]))
    else:
        holder.insert(key, odd(rng))
    return root


def replace_node(root: Any, old: Any, new: Any) -> Any:
    """The tree with one node exchanged, found by identity."""
    if root is old:
        return new
    if isinstance(root, dict):
        return {key: replace_node(value, old, new) for key, value in root.items()}
    if isinstance(root, list) and not isinstance(root, Pairs):
        return [replace_node(value, old, new) for value in root]
    return root


def edit_bytes(rng: random.Random, raw: bytes, upto: int) -> bytes:
    """Damage in the first `upto` bytes: flips, numbers of 4 and 8 bytes, cuts, inserts, repeats; or the end missing."""
    out, at = bytearray(raw), rng.randrange(max(1, min(upto, len(raw))))
    action = rng.randrange(8)
    if action <= 1:
        for _ in range(rng.choice((1, 1, 2, 8))):
            out[rng.randrange(max(1, min(upto, len(raw))))] ^= 1 << rng.randrange(8)
    elif action == 2:
        out[at : at + 8] = struct.pack("<Q", rng.choice(SIZES))
    elif action == 3:
        out[at : at + 4] = struct.pack("<I", rng.choice(SIZES) % 2**32)
    elif action == 4:
        del out[at : at + rng.choice((1, 4, 8, 100))]
    elif action == 5:
        out[at:at] = rng.choice(
            (b"\0", b"\xff", b"\xed\xa0\x80", rng.randbytes(rng.randrange(1, 40)), b'"', b"{", b"}")
        )
    elif action == 6:
        out[at:at] = out[at : at + rng.randrange(1, 200)]
    else:
        del out[rng.choice((at, rng.randrange(len(out)), max(0, len(out) - rng.randrange(64)))) :]
    return bytes(out)


def edit_entry(rng: random.Random, header: dict[str, Any]) -> None:
    """A lie in one tensor's description that the format could express; in place."""
    names = [name for name in header if name != "__metadata__"]
    one, two = header[rng.choice(names)], header[rng.choice(names)]
    action = rng.randrange(9)
    if action == 8:  # experts of no width, and of any number
        first, gone = rng.choice((COUNT, *SIZES)), rng.choice((HIDDEN, WIDTH))
        for name in names:
            shape = [0 if n and not gone % n and n > COUNT else n for n in header[name]["shape"]]
            header[name] |= {"shape": [first if n == COUNT else n for n in shape], "data_offsets": [0, 0]}
    elif action == 0:
        one["data_offsets"] = list(two["data_offsets"])
    elif action == 1:
        one["data_offsets"], two["data_offsets"] = two["data_offsets"], one["data_offsets"]
    elif action == 2:
        one["data_offsets"] = [o + rng.choice((-8, -1, 1, 8, 2**40)) for o in one["data_offsets"]]
    elif action == 3:
        one["shape"], two["shape"] = two["shape"], one["shape"]
    elif action == 4:
        sizes = rng.choice(((*SIZES, -1), SIZES[1:-3], SIZES[-8:-3]))
        one["shape"] = [rng.choice(sizes) for _ in range(rng.choice((1, 2, 3, 4, 5, 70, 3000)))]
    elif action == 5:  # no bytes, and dimensions that only then are possible
        one["shape"] = [rng.choice((0, *SIZES[-8:-3])) for _ in range(max(1, len(one["shape"])))]
        one["shape"][rng.randrange(len(one["shape"]))] = 0
        one["data_offsets"] = [one["data_offsets"][0]] * 2
    elif action == 6:
        one["dtype"] = rng.choice(("BF16", "F16", "F32", "F64", "U8", "I8", "F8_E4M3", "F8_E8M0", "BOOL", "u8", "F4"))
        one["shape"] = list(rng.choice((one["shape"], [*one["shape"][:-1], one["data_offsets"][1]])))
    else:
        some = [0, *one["shape"]]
        rng.shuffle(some)
        one["shape"] = some[: rng.randrange(len(some) + 1)]
        one["data_offsets"] = [one["data_offsets"][0]] * 2 if 0 in one["shape"] else one["data_offsets"]


def mutate_safetensors(rng: random.Random, base: Folder) -> Files:
    """A folder whose shards, or whose index, are damaged once to three times."""
    new = copy.deepcopy(base)
    files: Files = {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(list(new.shards))
        header, data = new.shards[name]
        action = rng.randrange(10)
        if action <= 2:
            edit_entry(rng, header)
        elif action <= 4:
            new.shards[name] = edit_json(rng, header), data
            break
        elif action <= 6 and "model.safetensors.index.json" in new.jsons:
            new.jsons["model.safetensors.index.json"] = edit_json(rng, new.jsons["model.safetensors.index.json"])
            break
        elif action == 7:
            files[name] = st_bytes(header, data, rng.choice((*SIZES, rng.randrange(4000))))
        elif action == 8:
            files[name] = st_bytes((dump(odd(rng))).encode("utf-8", "surrogatepass"), data)
        else:
            raw = st_bytes(header, data)
            files[name] = edit_bytes(rng, raw, rng.choice((8, len(raw) - len(data), len(raw))))
    return new.files() | files


def mutate_config(rng: random.Random, base: Folder) -> Files:
    """A folder whose config.json or hf_quant_config.json is damaged once to three times, most often structurally."""
    new = copy.deepcopy(base)
    name = rng.choice([n for n in new.jsons if n != "model.safetensors.index.json"])
    if rng.randrange(10) == 0:
        raw = dump(new.jsons[name]).encode()
        return new.files() | {name: edit_bytes(rng, raw, len(raw))}
    for _ in range(rng.choice((1, 1, 2, 3))):
        root = new.jsons[name]
        if not isinstance(root, dict):
            break
        inner = root.get("text_config", root)
        action = rng.randrange(6)
        if action == 0 and isinstance(inner, dict):
            inner[rng.choice(("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size", "top_k",
                              "num_experts_per_tok", "hidden_size", "moe_hidden_size", "model_type", "text_config",
                              "architectures", "quantization_config"))] = odd(rng)  # fmt: skip
        elif action == 1:
            section = root.get("quantization_config") or root.get("quantization")
            if isinstance(section, dict):
                key = rng.choice(("ignore", "modules_to_not_convert", "exclude_modules"))
                section[key] = [rng.choice(BOMBS) for _ in range(rng.choice((1, 2, 9)))]
        elif action == 2 and isinstance(root.get("quantization_config"), dict):
            section = root["quantization_config"]
            new.jsons[name] = {**root, "quantization_config": edit_json(rng, section)}
        else:
            new.jsons[name] = edit_json(rng, root)
    return new.files()


def mutate_gguf(rng: random.Random, base: list[Gguf]) -> Files:
    """A model in GGUF of which one part is damaged once to three times."""
    parts = copy.deepcopy(base)
    part = rng.choice(parts)
    raw: bytes | None = None
    for _ in range(rng.choice((1, 1, 2, 3))):
        action = rng.randrange(10)
        if action <= 2:
            edit_value(rng, part)
        elif action <= 5:
            edit_tensor(rng, part)
        elif action == 6:
            part.counts = rng.choice(((rng.choice(SIZES), None), (None, rng.choice(SIZES))))
        elif action == 7:
            part.values += [(b"general.alignment", U32, struct.pack("<I", rng.choice(SIZES) % 2**32))]
        else:
            head, whole = part.encode()
            raw = edit_bytes(rng, whole, rng.choice((24, len(head), len(head), len(whole))))
            break
    names = gguf_names(len(parts))
    return {n: raw if p is part and raw is not None else p.encode()[1] for n, p in zip(names, parts, strict=True)}


def edit_value(rng: random.Random, part: Gguf) -> None:
    """One metadatum: another type, number or length, gone, twice, its key another's; in place."""
    at = rng.randrange(len(part.values))
    key, kind, raw = part.values[at]
    action = rng.randrange(7)
    if action <= 2:
        part.values[at] = key, *typed(rng)
    elif action == 3:
        del part.values[at]
    elif action == 4:
        part.values.append(rng.choice(((key, kind, raw), (key, *typed(rng)))))
    elif action == 5:
        part.values[at] = rng.choice((*(k for k, _, _ in part.values), b"\xff", b"", b"k" * 2000)), kind, raw
    else:
        part.values[at] = key, rng.choice((*range(14), 255, 2**32 - 1)), raw


def typed(rng: random.Random) -> tuple[int, bytes]:
    """A value of any type, or what claims to be one."""
    kind = rng.choice((*NUMBERS, STRING, ARRAY))
    if kind == STRING:
        raw = rng.choice(
            (rng.choice(WORDS).encode(), b"\xff\xfe", b"none", b"linear", b"yarn", b"qwen3moe", b"gpt-oss")
        )
        return kind, rng.choice((text(raw), text(raw), struct.pack("<Q", rng.choice(SIZES)) + raw))
    if kind == ARRAY:
        inner, count = rng.choice((*range(14), 2**31)), rng.choice((0, 1, 2, *SIZES))
        return kind, struct.pack("<IQ", inner, count) + rng.choice((b"", bytes(16), text("a") * 4))
    if kind in (6, 12):
        number = rng.choice((0.0, -1.0, 1e-30, float("nan"), float("inf"), 3.4e38, 1e308 if kind == 12 else 1.0))
        return kind, struct.pack("<" + NUMBERS[kind], number)
    width = struct.calcsize(NUMBERS[kind])
    return kind, struct.pack("<Q", rng.choice(SIZES))[:width]


def edit_tensor(rng: random.Random, part: Gguf) -> None:
    """One tensor's name, dimensions, type or offset; or gone, or twice; in place."""
    if not part.tensors:
        return
    at = rng.randrange(len(part.tensors))
    one, two = part.tensors[at], rng.choice(part.tensors)
    action = rng.randrange(9)
    if action == 0:
        one[0] = rng.choice((two[0], one[0].replace(b"blk.0", b"blk.7"), b"blk.999999999.x", b"", b"\xff", b"a\nb",
                             b"n" * 2000, one[0].replace(b"weight", b"bias"), one[0] + b"_exps"))  # fmt: skip
    elif action == 1 and one[1]:
        one[1][rng.randrange(len(one[1]))] = rng.choice(SIZES)
    elif action == 2:
        one[1] = [rng.choice((1, 2, 32, *SIZES)) for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 300)))]
    elif action == 3:
        one[2] = rng.choice((*range(45), 255, 2**31, 2**32 - 1))
    elif action == 4:
        one[3] = rng.choice((*SIZES, two[3], one[3] + 1, one[3] + 32, max(0, one[3] - 32)))
    elif action == 5:
        one[1], two[1] = two[1], one[1]
    elif action == 6:
        del part.tensors[at]
    elif action == 7:
        part.tensors.append([*two[:1], list(one[1]), *one[2:]])
    else:
        one[1] = [0 if rng.randrange(2) else rng.choice(SIZES) for _ in one[1]]
