"""The CPU device's settings as a user types them, every command a process of its own."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest

from warpsmith.backend.cpu import _cpu
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.convert import write_pieces
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.synthetic import tiny_model

COMMAND = [sys.executable, "-m", "warpsmith.cli"]


def warpsmith(*args: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], input=stdin, capture_output=True, text=True, timeout=300)


def bench(*flags: str) -> dict[str, object]:
    result = warpsmith("bench", "-p", "4", "-n", "0", "-r", "1", "-o", "json", *flags)
    assert result.returncode == 0, result.stderr
    (record,) = json.loads(result.stdout)
    return record


def test_bench_says_what_was_chosen() -> None:
    plain = bench("--device", "cpu")
    assert plain["type_k"] == plain["type_v"] == "f16"
    assert plain["n_threads"] >= 1  # type: ignore[operator]
    chosen = bench("--cpu-features", "portable", "-t", "3", "-ctk", "q8_0", "-ctv", "f32")
    names = ("backends", "cpu_kernels", "n_threads", "type_k", "type_v")
    assert [chosen[name] for name in names] == ["cpu", "portable", 3, "q8_0", "f32"]


@pytest.mark.skipif(not _cpu.features(), reason="this processor has portable kernels only")
def test_features_choose_the_kernels() -> None:
    assert bench("--cpu-features", ",".join(_cpu.features()))["cpu_kernels"] not in ("portable", None)


def test_a_type_without_kernels_is_run_and_the_user_told(tmp_path: Path) -> None:
    model, path = tiny_model(), tmp_path / "q5_1.gguf"
    pieces = []
    for name, tensor in model.tensors.items():
        kind, raw = tensor.type, tensor.raw()
        if name.endswith(("ffn_up.weight", "ffn_down.weight")):
            kind = TYPES["Q5_1"]
            raw = quantize(kind, tensor.float32())
        pieces.append((name, kind, tensor.shape, [raw]))
    write_pieces(path, model.metadata, pieces)
    result = warpsmith("run", "-m", str(path), "-p", "x", "-n", "2", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "8 tensors of type Q5_1 are held as Q8_0" in result.stderr


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_settings_reach_the_other_verbs(verb: str) -> None:
    flags = ["-n", "4", "-t", "1", "--cpu-features", "portable", "--cache-type-k", "f32", "--cache-type-v", "q8_0"]
    result = warpsmith(verb, *flags, stdin="def fibonacci(n):\n")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    for flag, word in (("--cpu-features", "sse9"), ("--cache-type-k", "q2_z"), ("-t", "2000")):
        refused = warpsmith(verb, *flags, flag, word, stdin="x\n")
        assert (refused.returncode, refused.stdout) == (2, "")
        assert word in refused.stderr


@pytest.mark.parametrize("flags", [["-t", "2"], ["--cpu-features", "portable"], ["-ctk", "f16"], ["-ctv", "q8_0"]])
def test_another_device_has_no_such_settings(flags: list[str]) -> None:
    result = warpsmith("run", "-p", "x", "--device", "reference", *flags)
    assert result.returncode == 2
    assert "no setting for" in result.stderr or "cannot keep keys and values as" in result.stderr


def on_a_terminal(*command: str) -> str:
    """What a command writes to stderr where that is a terminal."""
    main, side = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=side, env=environment
    )
    os.close(side)
    written = b""
    while True:
        select.select([main], [], [], 60)
        try:
            piece = os.read(main, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        written += piece
    os.close(main)
    assert process.wait(60) == 0, written
    return written.decode()


def test_loading_a_large_model_shows_a_bar_on_a_terminal() -> None:
    program = (
        "from warpsmith.cli.terminal import loading_bar\n"
        "with loading_bar() as hear:\n"
        "    for done in (1, 2, 3): hear(done << {0}, 3 << {0})\n"
    )
    assert "loading" in on_a_terminal(sys.executable, "-c", program.format(30))
    assert on_a_terminal(sys.executable, "-c", program.format(20)) == ""
    piped = subprocess.run([sys.executable, "-c", program.format(30)], capture_output=True, text=True)
    assert (piped.returncode, piped.stdout, piped.stderr) == (0, "", "")


def test_loading_is_told_to_whoever_asks() -> None:
    import warpsmith as package

    heard: list[tuple[int, int]] = []
    with package.load(device="cpu", threads=1, progress=lambda done, total: heard.append((done, total))) as llm:
        assert heard[-1] == (llm.checkpoint.nbytes,) * 2
