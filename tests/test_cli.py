"""The `ft` command as people use it: in a process of its own where exit and output count, else by calling main."""

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from freetoken import cli, demo, formats, topology
from freetoken.cli import main
from tests.support.sysfs import FakeSystem, paired_cores

pytest.importorskip("transformers")

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1"}


def ft(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `ft` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "freetoken", *args],
        capture_output=True,
        text=True,
        env={**ENVIRONMENT, **environment},
        timeout=300,
        check=False,
    )


def run_json(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def check_refused(status: int, stdout: str, stderr: str, words: Iterable[str]) -> None:
    """One line on standard error with these words, status 2, nothing on standard output."""
    assert status == 2, stderr
    lines = stderr.strip().splitlines()
    assert len(lines) == 1, stderr
    assert lines[0].startswith("ft: error: ")
    for word in words:
        assert word in lines[0]
    assert stdout == ""


def test_generate_streams_text_and_ends_with_rates() -> None:
    result = ft("generate", "--prompt", "Once upon a time", "--max-new-tokens", "12", "--seed", "3")
    assert result.returncode == 0
    assert result.stderr == ""
    text, _, rates = result.stdout.rstrip().rpartition("\n")
    assert text.startswith("Once upon a time")
    assert len(text) > len("Once upon a time")
    assert "12 new at" in rates
    assert "nvfp4 experts" in rates
    assert "GB/s" in rates


def test_lines_of_the_log_come_after_the_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it ends early, and only if there are any."""
    handler = logging.StreamHandler(sys.stderr)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    with contextlib.suppress(KeyboardInterrupt), cli._log_after_text():
        print("half a ", end="")
        logging.getLogger("freetoken").warning("crowded")
        print("word", end="")
        raise KeyboardInterrupt
    with cli._log_after_text():
        print("text", end="")
    assert tuple(capsys.readouterr()) == ("half a wordtext", "\ncrowded\n")
    assert logging.getLogger().handlers == [handler]


def test_generate_json_is_whole_and_repeatable(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("generate", "--max-new-tokens", "8", "--seed", "5", "--threads", "1")
    first, second = run_json(capsys, *args), run_json(capsys, *args)
    assert first["text"] == second["text"]
    assert first["new_tokens"] == 8
    assert first["finish_reason"] == "length"
    report = first["report"]
    assert report["threads"] == 1
    assert first["expert_bytes_per_token"] == report["layers"] * report["experts_per_token"] * report["expert_bytes"]
    assert first["expert_gb_per_s"] == pytest.approx(
        first["expert_bytes_per_token"] * first["decode_tokens_per_s"] / 1e9
    )


def test_greedy_text_does_not_depend_on_threads(capsys: pytest.CaptureFixture[str]) -> None:
    texts = {
        run_json(capsys, "generate", "--temperature", "0", "--max-new-tokens", "16", "--threads", n)["text"]
        for n in ("1", "2")[: os.cpu_count()]
    }
    assert len(texts) == 1


def test_sampling_options_reach_the_sampler(capsys: pytest.CaptureFixture[str]) -> None:
    """A nucleus of one token is greedy at any temperature; a wide one at a high temperature is not."""
    args = ("generate", "--max-new-tokens", "12", "--seed", "1")
    greedy = run_json(capsys, *args, "--temperature", "0")["text"]
    assert run_json(capsys, *args, "--temperature", "5", "--top-p", "0.000001")["text"] == greedy
    wild = run_json(capsys, *args, "--temperature", "5", "--top-p", "1")["text"]
    assert wild != greedy
    assert run_json(capsys, *args, "--temperature", "0.5", "--top-p", "1")["text"] != wild


@pytest.mark.parametrize("name", formats.names())
def test_generate_requantizes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = run_json(capsys, "generate", "--max-new-tokens", "2", "--expert-format", name)
    assert found["report"]["formats"] == [name]


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT, which only POSIX systems have")
def test_interrupt_ends_cleanly() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "freetoken", "generate", "--max-new-tokens", "400", "--prompt", "The"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job would ignore it
    )
    assert process.stdout is not None
    process.stdout.read(12)  # text is coming
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, f"after {time.monotonic() - start:.1f} s: {stderr}"
    assert stderr.strip() == "ft: interrupted"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["generate", "--prompt", ""], ["--prompt"]),
        (["generate", "--prompt", "word " * 600], ["context is 512", "shorten"]),
        (["generate", "--max-new-tokens", "0"], ["--max-new-tokens"]),
        (["generate", "--temperature", "-1"], ["--temperature"]),
        (["generate", "--top-p", "0"], ["--top-p"]),
        (["generate", "--temperature", "inf"], ["--temperature"]),
        (["generate", "--seed", "99999999999999999999999"], ["--seed"]),
        (["generate", "--model", ""], ["does not exist"]),
        (["generate", "--model", "x" * 5000], ["cannot be looked at"]),
        (["generate", "--model", "~nobody-of-that-name/x"], ["nobody-of-that-name"]),
        (["inspect", ""], ["does not exist"]),
        (["inspect", "x" * 5000], ["does not exist"]),
        (["generate", "--threads", "100000"], ["threads"]),
        (["generate", "--threads", "0"], ["threads"]),
        (["generate", "--expert-format", "int3"], ["int3", "mxfp4", "nvfp4", "q8_0"]),
        (["generate", "--model", "./no/such/folder"], ["no/such/folder", "does not exist"]),
        (["generate", "--model", "nobody/nothing"], ["nobody/nothing", "hub"]),
        (["topology", "--root", "no-such-folder"], ["--root", "no-such-folder", "sys/"]),
        (["inspect", "no-such-folder"], ["no-such-folder", "does not exist"]),
        (["inspect", str(Path(__file__))], ["is a file"]),
        (["bench", "fidelity", "--model", str(demo.path()), "--text", "no-such-text"], ["no-such-text"]),
        (["convert", str(demo.path()), ""], ["the destination is an empty name"]),
        (["convert", "no-such-folder", "x", "--to", "compressed-tensors"], ["no-such-folder", "does not exist"]),
        (["convert", str(demo.path()), str(Path(__file__).parent), "--to", "compressed-tensors"], ["exists already"]),
        (
            ["convert", str(demo.path()), "x", "--to", "compressed-tensors", "--expert-format", "q8_0"],
            ["q8_0", "nvfp4"],
        ),
        (["bench", "fidelity", "--model", str(demo.path()), "--text", "x", "--formats", "q8_0,q9"], ["q9"]),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    status = main(args)
    out, err = capsys.readouterr()
    check_refused(status, out, err, words)


def test_threads_that_are_no_number() -> None:
    result = ft("convert", "a", "b", "--threads", "x")
    assert result.returncode == 2
    assert "argument --threads: is 'x', expected auto or a number" in result.stderr


@pytest.mark.parametrize(
    ("command", "name", "bad", "good"),
    [
        ("generate", "FREETOKEN_CPU_ACT", "fp64", "int8"),
        ("info", "FREETOKEN_CPU_ISA", "sse9", "avx2"),
        ("topology", "FREETOKEN_CPU_CORES", "fast", "performance"),
    ],
)
def test_bad_settings_are_one_line(command: str, name: str, bad: str, good: str) -> None:
    result = ft(command, **{name: bad})
    check_refused(result.returncode, result.stdout, result.stderr, (name, good))


def test_debug_shows_the_trace() -> None:
    result = ft("generate", "--prompt", "", "--debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_output_may_be_cut_off() -> None:
    """`ft ... | head` ends without a complaint."""
    command = f"{sys.executable} -m freetoken info | head -1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, env=ENVIRONMENT, check=False)  # noqa: S602
    assert result.stdout.startswith("freetoken ")
    assert result.stderr == ""


def test_info_names_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(ft("info", "--json").stdout)  # what others import into this process does not count
    assert found["tier"] in found["tiers"]
    assert found["packages"]["torch"]
    assert found["cores"]
    assert found["cores_why"]
    assert found["nodes"].keys() == {str(node) for node in topology.describe()["numa_nodes"]}
    assert found["memory_bytes"] > 0
    if sys.platform == "linux":
        assert len([name for name in found["openmp"] if "gomp" in name]) == 1, "more than one OpenMP runtime"
    assert main(["info"]) == 0
    assert "CPU tiers" in capsys.readouterr().out


def test_topology_of_another_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    system = FakeSystem(tmp_path)
    system.add_cpus(paired_cores(2))
    system.add_node(0, "0-3", gib=8)
    system.add_pci("0000:17:00.0", node=0, kind="0x030200", vendor="0x10de")

    found = run_json(capsys, "topology", "--root", str(tmp_path))
    assert found["workers"] == [0, 2]
    assert found["gpus"] == {"0000:17:00.0": {"name": "NVIDIA", "node": 0}}
    assert main(["topology", "--root", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "node 0     8.00 GiB, CPUs 0-3 on 2 cores, 2 workers, banks" in text
    assert "second threads of cores" in text


def test_topology_of_this_machine_needs_no_torch() -> None:
    script = "import sys; from freetoken.cli import main; main(['topology']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("CPUs ")
    assert done.stdout.endswith("\nFalse\n")


def test_inspect_the_demo_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "inspect", str(demo.path()))
    assert found["loads"]
    assert (found["layers"], found["experts"], found["experts_per_token"]) == (4, 16, 4)
    assert (found["hidden"], found["intermediate"]) == (256, 64)
    assert found["bank_bytes"] == 4 * 16 * found["expert_bytes"]
    assert found["expert_bytes_per_token"] == 4 * 4 * found["expert_bytes"]
    assert main(["inspect", str(demo.path())]) == 0
    assert "loads here yes" in capsys.readouterr().out


def test_inspect_and_load_agree_on_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    seen = run_json(capsys, "inspect", str(demo.path()), "--expert-format", "q8_0")
    loaded = run_json(capsys, "generate", "--max-new-tokens", "1", "--expert-format", "q8_0")["report"]
    for name in ("bank_bytes", "expert_bytes", "expert_bytes_per_token"):
        assert seen[name] == loaded[name]


def test_convert_for_other_engines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "m"
    args = ("convert", str(demo.path()), str(folder), "--to", "compressed-tensors", "--expert-format", "mxfp4")
    found = run_json(capsys, *args)
    assert (found["format"], found["layers"], found["experts"]) == ("mxfp4", 4, 64)
    assert found["file_bytes"] < sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    seen = run_json(capsys, "inspect", str(folder))
    assert seen["loads"]
    assert seen["formats"] == ["mxfp4 (compressed-tensors, one by one)"]
    assert seen["file_bytes"] == found["file_bytes"]
    assert (folder / "tokenizer.json").read_bytes() == (demo.path() / "tokenizer.json").read_bytes()
    text = run_json(capsys, "generate", "--model", str(folder), "--max-new-tokens", "8", "--temperature", "0")
    assert text["report"]["formats"] == ["mxfp4"]
    assert main([*args]) == 2
    assert "exists already" in capsys.readouterr().err


def test_bench_fidelity_compares_formats(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It was a dark night, and the old man sat by the fire with his pipe and his dog. " * 12)
    args = ("bench", "fidelity", "--model", str(demo.path()), "--text", str(text), "--window", "64")
    rows = run_json(capsys, *args, "--formats", "nvfp4,q8_0")["rows"]
    assert [row["format"] for row in rows] == ["nvfp4", "q8_0"]
    assert rows[0]["perplexity"] > 1
    # q8_0 of nvfp4 weights is nearly the same model, and not the very same
    assert 0 < abs(rows[1]["change"]) < 0.01
    assert rows[0]["tokens"] == rows[1]["tokens"]
    assert main([*args]) == 0
    assert "perplexity" in capsys.readouterr().out
