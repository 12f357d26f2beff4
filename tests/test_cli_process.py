"""Commands in odd surroundings: closed streams, little address space, a model file that changes while it is used."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import warpsmith
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.gguf import open_gguf
from warpsmith.errors import BadFile
from warpsmith.model.tokenizer import Tokenizer
from warpsmith.wisp import WISP

COMMAND = [sys.executable, "-m", "warpsmith.cli"]
RUN = ["run", "-p", "x", "-n", "2"]


def closed(streams: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A command with some of its streams closed, as a shell's `2>&-` does it."""
    script = f'exec "$@" {streams}'
    return subprocess.run(["sh", "-c", script, "sh", *COMMAND, *args], capture_output=True, text=True, timeout=120)


def test_a_closed_stderr_only_loses_what_belongs_there() -> None:
    open_run, closed_run = closed("", *RUN), closed("2>&-", *RUN)
    assert (closed_run.returncode, closed_run.stdout) == (0, open_run.stdout)
    assert closed("2>&-", "show", "missing.gguf").returncode == 3


@pytest.mark.parametrize("args", [RUN, ["show"], ["doctor"], ["chat"]])
def test_a_closed_stdout_is_an_error(args: list[str]) -> None:
    result = closed(">&- </dev/null", *args)
    assert result.returncode == 1
    assert result.stderr.startswith("error: Standard output is closed.")


def test_files_need_no_stdout(tmp_path: Path) -> None:
    assert closed(">&- 2>&- <&-", "synth", "tiny", str(tmp_path / "model.gguf"), "--layers", "2").returncode == 0
    assert open_checkpoint(tmp_path / "model.gguf").tensors


@pytest.mark.parametrize(("args", "says"), [(["chat"], "Standard input is closed."), (["run"], "There is no prompt.")])
def test_a_closed_stdin_is_a_usage_error(args: list[str], says: str) -> None:
    result = closed("<&-", *args)
    assert result.returncode == 2
    assert says in result.stderr
    assert closed("<&-", *RUN).returncode == 0


@pytest.mark.parametrize("args", [["synth", "tiny", "x.gguf"], RUN])
def test_a_negative_seed_is_a_usage_error(args: list[str], tmp_path: Path) -> None:
    result = subprocess.run([*COMMAND, *args, "--seed", "-1"], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 2
    assert "error:" in result.stderr
    assert "inside warpsmith" not in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("megabytes", [64, 150, 280, 400, 511])
def test_too_little_address_space_exits_5(megabytes: int) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    result = subprocess.run([*COMMAND, *RUN], capture_output=True, text=True, preexec_fn=limit)
    assert result.returncode == 5, result.stderr
    assert result.stderr.startswith(f"error: The address space of this process is limited to {megabytes} MiB.")


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_a_file_that_was_cut_since_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ("model.gguf" if kind == "gguf" else "model")
    command = [*COMMAND, "synth", "tiny", str(path), "--layers", "2"]
    subprocess.run(command, check=True, capture_output=True)
    checkpoint = open_checkpoint(path)
    file = path if kind == "gguf" else path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(BadFile, match="has become shorter since it was opened"):
        [tensor.raw() for tensor in checkpoint.tensors.values()]


def test_a_loaded_model_does_not_need_its_file(tmp_path: Path) -> None:
    path = tmp_path / "wisp.gguf"
    path.write_bytes(WISP.read_bytes())
    with warpsmith.load(path, device="cpu") as llm, warpsmith.load(WISP, device="cpu") as untouched:
        os.truncate(path, 0)
        options = {"max_tokens": 8}
        assert llm.generate("def f(", **options).text == untouched.generate("def f(", **options).text  # type: ignore[arg-type]


def test_metadata_outlives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "wisp.gguf"
    path.write_bytes(WISP.read_bytes())
    metadata = open_gguf(path).metadata
    os.truncate(path, 0)
    assert Tokenizer.from_gguf(metadata).encode("def f(") == Tokenizer.from_gguf(open_gguf(WISP).metadata).encode(
        "def f("
    )
