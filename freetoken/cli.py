"""The `ft` command: parse, call one library function, print. One function per subcommand.

Exit status: 0 done, 2 bad input (one line on standard error), 130 interrupted; --debug shows the trace instead.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from freetoken.errors import ConfigError, FreeTokenError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    args = build_parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO if args.verbose else logging.WARNING, format="ft: %(message)s", stream=sys.stderr
    )
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\nft: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except FreeTokenError as error:
        if args.debug:
            raise
        return _complain(str(error))
    except Exception as error:  # whatever a model, a tokenizer or a terminal comes up with is one line, too
        if args.debug:
            raise
        return _complain(f"{type(error).__name__}: {error} (--debug shows where)")
    return status


def _complain(text: str) -> int:
    print(f"ft: error: {' '.join(text.split())}", file=sys.stderr)
    return 2


def generate(args: argparse.Namespace) -> int:
    """Stream text from a prompt, then one line of rates."""
    from freetoken import demo, load, report
    from freetoken.integration.generate import generate_text

    _check_generate(args)
    _quiet_transformers()
    model, tokenizer = load(
        demo.path() if args.model is None else args.model,
        expert_format=args.expert_format,
        shared=args.shared,
        threads=args.threads,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        **_placement(args),
    )
    facts = report(model)

    def show(text: str) -> None:
        if not args.json:
            print(text, end="", flush=True)

    with contextlib.nullcontext() if args.json else _log_after_text():
        result = generate_text(
            model,
            tokenizer,
            args.prompt,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.seed,
            expert_bytes_per_token=facts.expert_bytes_per_token,
            on_text=show,
        )
    if args.json:
        print(json.dumps({"prompt": args.prompt, **result.to_dict(), "report": facts.to_dict()}))
        return 0
    print(
        f"\n[{result.prompt_tokens} tokens of prompt at {result.prefill_tokens_per_s:.0f}/s, "
        f"{result.new_tokens} new at {result.decode_tokens_per_s:.1f}/s; {', '.join(facts.formats)} experts, "
        f"{result.expert_bytes_per_token / 1e6:.2f} MB a token, {result.expert_gb_per_s:.2f} GB/s]"
    )
    return 0


@contextlib.contextmanager
def _log_after_text() -> Iterator[None]:
    """Hold lines of the log back until the text is over, in whose middle they would stand."""
    handlers = logging.getLogger().handlers
    before = handlers[:]
    held = [logging.handlers.MemoryHandler(1 << 16, logging.CRITICAL + 1, target=handler) for handler in before]
    handlers[:] = held
    try:
        yield
    finally:
        handlers[:] = before
        if any(handler.buffer for handler in held):
            print(file=sys.stderr)  # ends the text's line on a terminal
        for handler in held:
            handler.close()


def info(args: argparse.Namespace) -> int:
    """Print what this machine and process look like."""
    from freetoken.info import collect

    _print(collect(), args.json)
    return 0


def topology(args: argparse.Namespace) -> int:
    """Print CPUs, nodes and GPUs, which CPUs get a worker, and why the others do not."""
    from pathlib import Path

    from freetoken.topology import read

    if args.root != "/" and not (Path(args.root) / "sys").is_dir():
        raise ConfigError(
            f"--root is {args.root!r}, expected a folder that holds sys/ and proc/ of a machine",
            name="root",
            value=args.root,
            expected="a folder that holds sys/ and proc/",
        )
    _print(read(args.root), args.json)
    return 0


def inspect(args: argparse.Namespace) -> int:
    """Print what a checkpoint is, from its headers."""
    from freetoken import formats
    from freetoken.checkpoint.inspect import inspect as look

    fmt = None if args.expert_format is None else formats.get(args.expert_format)
    gc.disable()  # headers become a million objects, and looking for cycles among them takes a fifth of the time
    try:
        _print(look(args.path, fmt), args.json)
    finally:
        gc.enable()
    return 0


def convert(args: argparse.Namespace) -> int:
    """Write experts as they lie in banks, or with --to as other engines read them."""
    from freetoken import formats, topology
    from freetoken.checkpoint.open import open_any, scan_any
    from freetoken.integration.hub import local_folder

    fmt = None if args.expert_format is None else formats.get(args.expert_format)
    threads = len(topology.read().workers(args.threads))
    # code that comes with a model goes along; nothing here runs it
    folder = local_folder(args.source, args.revision, trust_remote_code=True, progress=sys.stderr.isatty())
    found = scan_any(open_any(folder), fmt)
    write = _export if args.to else _convert
    with _ended_as_by_hand():
        _print(write(found, fmt, args.destination, threads), args.json)
    return 0


@contextlib.contextmanager
def _ended_as_by_hand() -> Iterator[None]:
    """SIGTERM does what Ctrl-C does, so that nothing half-written stays."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _export(found: Any, fmt: Any, destination: str, threads: int) -> Any:
    from freetoken.checkpoint.export import Export

    export = Export(found, fmt)
    with _bar(export.nbytes, "converting", "B") as bar:
        return export.write(destination, threads, bar.update)


def _convert(found: Any, fmt: Any, destination: str, threads: int) -> Any:
    from freetoken.checkpoint.convert import Conversion
    from freetoken.checkpoint.gguf import GgufCheckpoint

    beside = None
    if isinstance(found.checkpoint, GgufCheckpoint):
        from freetoken.integration.gguf import beside_experts

        beside = beside_experts(found)
    conversion = Conversion(found, destination, fmt, beside)
    try:
        with _bar(conversion.nbytes, "converting", "B") as bar:
            return conversion.run(threads, bar.update)
    except KeyboardInterrupt:
        if conversion.partial.exists():
            print(
                f"\nft: what is finished stays in {conversion.partial}; the same command goes on from there",
                file=sys.stderr,
            )
        raise


def bench_fidelity(args: argparse.Namespace) -> int:
    """Print the perplexity of a text for each format of the experts."""
    from freetoken import formats, load, report
    from freetoken.fidelity import perplexity, read_tokens
    from freetoken.integration.generate import context_length

    _quiet_transformers()
    names = args.formats.split(",") if args.formats else [None]
    for name in names:
        if name is not None:
            formats.get(name)
    rows: list[dict[str, Any]] = []
    for name in names:
        model, tokenizer = load(args.model, expert_format=name, threads=args.threads, **_placement(args))
        tokens = read_tokens(args.text, tokenizer, model.config.get_text_config().vocab_size)
        window = min(context_length(model) or 512, 2048) if args.window is None else args.window
        with _bar(len(tokens), f"perplexity {name or ''}".strip()) as bar:
            result = perplexity(model, tokens, window, bar.update)
        facts = report(model)
        rows.append(
            {
                "format": ", ".join(facts.formats),
                "perplexity": result.perplexity,
                "change": result.perplexity / rows[0]["perplexity"] - 1 if rows else 0.0,
                "tokens": result.tokens,
                "window": window,
                "bank_bytes": facts.bank_bytes,
                "activations": ", ".join(facts.activations),
                "strategy": None if facts.device is None else facts.device.strategy,
            }
        )
        del model
        if not args.json:
            _print_fidelity_row(rows)
    if args.json:
        print(json.dumps({"model": str(args.model), "text": str(args.text), "rows": rows}))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """All commands and options."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the trace of an error")
    common.add_argument("--verbose", action="store_true", help="log what was decided and why")
    common.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser = argparse.ArgumentParser(prog="ft", description="Mixture-of-experts models from quantized host memory.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    one = commands.add_parser("generate", parents=[common], help="generate text from a prompt")
    one.add_argument("--model", help="folder, GGUF file or hub id (default: the demo model that comes along)")
    one.add_argument("--prompt", default="Once upon a time", help="text to continue (default: %(default)r)")
    one.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="stop after N (default: %(default)s)")
    one.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: %(default)s)")
    one.add_argument("--top-p", type=float, default=0.95, help="nucleus of sampling (default: %(default)s)")
    one.add_argument("--seed", type=int, help="make sampling repeatable")
    one.add_argument("--revision", help="branch, tag or commit of a hub id")
    one.add_argument("--shared", action="store_true", help="map the experts of a converted folder, for all processes")
    one.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    _add_expert_options(one)
    _add_device_options(one)
    one.set_defaults(run=generate)

    two = commands.add_parser("info", parents=[common], help="what this machine looks like: begin bug reports with it")
    two.set_defaults(run=info)

    three = commands.add_parser("inspect", parents=[common], help="what a checkpoint is and whether it loads here")
    three.add_argument("path", help="folder of safetensors, or a GGUF file")
    three.add_argument("--expert-format", metavar="F", help="as if its experts were re-quantized to F")
    three.set_defaults(run=inspect)

    five = commands.add_parser("convert", parents=[common], help="write experts as they lie in banks: loads fast")
    five.add_argument("source", metavar="SRC", help="folder, GGUF file or hub id")
    five.add_argument("destination", metavar="DST", help="folder to make; SRC stays as it is")
    five.add_argument("--to", choices=["compressed-tensors"], help="write for other engines instead")
    five.add_argument("--revision", help="branch, tag or commit of a hub id")
    _add_expert_options(five)
    five.set_defaults(run=convert)

    six = commands.add_parser("topology", parents=[common], help="which CPUs, nodes and GPUs there are and are used")
    six.add_argument("--root", default="/", metavar="DIR", help="folder with sys/ and proc/ of another machine")
    six.set_defaults(run=topology)

    bench = commands.add_parser("bench", help="measure").add_subparsers(required=True, metavar="WHAT")
    four = bench.add_parser("fidelity", parents=[common], help="perplexity of a text, by format of the experts")
    four.add_argument("--model", required=True, help="folder, GGUF file or hub id")
    four.add_argument("--text", required=True, help="text file, or .npz of token ids in an array `tokens`")
    four.add_argument("--formats", help="comma-separated formats (default: what the checkpoint holds)")
    four.add_argument("--window", type=int, help="tokens in a window (default: the context, at most 2048)")
    four.add_argument("--threads", type=_threads, default="auto", metavar="N", help="workers for experts")
    _add_device_options(four)
    four.set_defaults(run=bench_fidelity)
    return parser


def _add_expert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--expert-format", metavar="F", help="re-quantize experts to F (default: as in the checkpoint)")
    parser.add_argument(
        "--threads", type=_threads, default="auto", metavar="N", help="workers for experts (default: auto)"
    )


def _add_device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--strategy", metavar="S", help="cpu, offload, hybrid or resident (default: by what fits)")
    parser.add_argument(
        "--cache", default="auto", metavar="C", help="of a device, for experts: auto, 4GiB, 0.25, slots (default: auto)"
    )
    parser.add_argument(
        "--max-fetch",
        default="auto",
        metavar="F",
        help="of hybrid, what is fetched of missing experts: auto, a share such as 0.5, or a number (default: auto)",
    )


def _placement(args: argparse.Namespace) -> dict[str, Any]:
    return {"device": args.device, "strategy": args.strategy, "cache": args.cache, "max_fetch": args.max_fetch}


def _threads(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is {text!r}, expected auto or a number") from error


def _check_generate(args: argparse.Namespace) -> None:
    for name, good, expected in (
        ("prompt", bool(args.prompt), "some text"),
        ("max_new_tokens", args.max_new_tokens >= 1, "at least 1"),
        ("temperature", 0 <= args.temperature < 1e6, "0 or more, and finite"),
        ("seed", args.seed is None or 0 <= args.seed < 2**63, "0 or more, below 2**63"),
        ("top_p", 0 < args.top_p <= 1, "above 0 and at most 1"),
    ):
        if not good:
            value = getattr(args, name)
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option} is {value!r}, expected {expected}", name=name, value=value, expected=expected)


def _quiet_transformers() -> None:
    """Its advice is for authors of models; ours is in errors."""
    import transformers

    transformers.utils.logging.set_verbosity_error()


def _bar(total: int, what: str, unit: str = "token") -> Any:
    from tqdm import tqdm

    binary: dict[str, Any] = {"unit_scale": True, "unit_divisor": 1024} if unit == "B" else {}
    return tqdm(total=total, unit=unit, desc=what, disable=not sys.stderr.isatty(), delay=1, leave=False, **binary)


def _print(value: Any, as_json: bool) -> None:
    print(json.dumps(value.to_dict()) if as_json else value)


def _print_fidelity_row(rows: list[dict[str, Any]]) -> None:
    if len(rows) == 1:
        print(f"{rows[0]['tokens']} tokens in windows of {rows[0]['window']}")
        print(f"{'experts':<10}{'perplexity':>12}{'change':>10}{'banks MB':>10}  activations")
    row = rows[-1]
    print(
        f"{row['format']:<10}{row['perplexity']:>12.3f}{row['change']:>+10.2%}{row['bank_bytes'] / 1e6:>10.2f}"
        f"  {row['activations'] if row['strategy'] in (None, 'cpu') else 'on the device'}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
