"""Files appear whole or not at all, whoever else writes to the same path and however the writer ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from warpsmith.checkpoint.atomic import whole_directory, whole_file
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.gguf import open_gguf
from warpsmith.checkpoint.gguf_writer import GGUFWriter
from warpsmith.errors import BadRequest

COMMAND = [sys.executable, "-m", "warpsmith.cli"]
SHAPE = ["--layers", "4", "--hidden", "1024", "--ffn", "2048"]


def test_two_writers_of_one_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with GGUFWriter(path, {"writer": "first"}) as first:
        first.declare("x", TYPES["F32"], (1, 8))
        first.write("x", np.full(32, 1, np.uint8))
        with GGUFWriter(path, {"writer": "second, of another length"}) as second:
            second.declare("x", TYPES["F32"], (4, 8))
            second.write("x", np.full(128, 2, np.uint8))
        assert open_gguf(path).tensors["x"].raw().tolist() == [[2] * 32] * 4
    assert open_gguf(path).metadata["writer"] == "first"
    assert open_gguf(path).tensors["x"].raw().tolist() == [[1] * 32]
    assert os.listdir(tmp_path) == ["model.gguf"]


def test_of_two_writers_of_one_directory_the_second_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "model"

    def write_both() -> None:
        with whole_directory(path) as second:
            (second / "weights").write_text("second")
            with whole_directory(path) as first:
                (first / "weights").write_text("first")

    with pytest.raises(BadRequest, match="exists already"):
        write_both()
    assert (path / "weights").read_text() == "first"
    assert os.listdir(path.parent) == ["model"]


def test_a_link_in_the_way_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("untouched")
    path = tmp_path / "model"
    path.symlink_to(tmp_path / "other")
    with whole_file(path) as file:
        file.write(b"new")
    assert (tmp_path / "other").read_text() == "untouched"
    assert not path.is_symlink()
    assert path.read_bytes() == b"new"


@pytest.mark.parametrize("writer", [whole_file, whole_directory])
def test_nothing_is_left_of_what_failed(tmp_path: Path, writer) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ZeroDivisionError), writer(tmp_path / "model"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def hear_of_hangups() -> None:
    """Where the tests run under nohup, their children would not."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def begin_writing(path: Path, *flags: str) -> subprocess.Popen[bytes]:
    """`warpsmith synth` stopped in the middle of its work."""
    command = [*COMMAND, "synth", "tiny", str(path), *SHAPE, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=hear_of_hangups)
    while not any(p.is_file() and p.stat().st_size > 4096 for p in path.parent.rglob("*")):
        assert process.poll() is None, "it ended before it was seen at work"
    process.send_signal(signal.SIGSTOP)
    return process


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_two_commands_to_one_path(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    with begin_writing(path, "--seed", "1") as first:
        result = subprocess.run([*COMMAND, "synth", "tiny", str(path), *SHAPE, "--seed", "2"], capture_output=True)
        assert result.returncode == 0, result.stderr
        first.send_signal(signal.SIGCONT)
        _, err = first.communicate(timeout=300)
    assert first.returncode == (0 if name.endswith(".gguf") else 2), err
    winner = "1" if first.returncode == 0 else "2"
    subprocess.run([*COMMAND, "synth", "tiny", str(other), *SHAPE, "--seed", winner], check=True, capture_output=True)
    expected, found = open_checkpoint(other), open_checkpoint(path)
    for tensor in expected.tensors:
        assert np.array_equal(expected.tensors[tensor].raw(), found.tensors[tensor].raw()), tensor
    assert sorted(os.listdir(tmp_path)) == sorted([path.name, other.name])


@pytest.mark.parametrize("name", ["model.gguf", "model"])
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_writer_that_is_told_to_end_cleans_up(tmp_path: Path, name: str, end: signal.Signals) -> None:
    with begin_writing(tmp_path / name) as process:
        process.send_signal(end)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 128 + end, err
    assert err == b""
    assert os.listdir(tmp_path) == []
