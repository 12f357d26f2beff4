"""The model that comes with the package: what its files are, and that `warpsmith run` finds it and says so."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.dflash import open_draft
from warpsmith.model.dflash import check_fits
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP, WISP_DRAFT

ROOT = Path(__file__).parent.parent


def test_the_files_are_small_enough_to_ship() -> None:
    assert WISP.stat().st_size <= 30e6
    assert WISP_DRAFT.stat().st_size <= 12e6


def test_wisp_has_the_familys_shapes_and_an_mtp_layer() -> None:
    config = read_config(open_checkpoint(WISP))
    assert (config.head_dim, config.rotary_dim) == (256, 64)
    assert (config.key_head_dim, config.value_head_dim) == (128, 128)
    assert config.value_heads == 2 * config.key_heads
    assert config.mtp_layers == 1
    assert 15e6 < open_checkpoint(WISP).parameters < 30e6


def test_wisp_is_named_as_the_familys_files_are() -> None:
    """By the names that the `gguf` package has for this architecture, and for any model's MTP layer."""
    gguf = pytest.importorskip("gguf")
    arch = gguf.MODEL_ARCH.QWEN35
    reader = gguf.GGUFReader(WISP)
    assert reader.get_field("general.architecture").contents() == gguf.MODEL_ARCH_NAMES[arch]
    assert reader.get_field("tokenizer.ggml.pre").contents() == "qwen35"
    stems = {gguf.TENSOR_NAMES[kind] for kind in gguf.MODEL_TENSORS[arch]}
    stems |= {name for name in gguf.TENSOR_NAMES.values() if ".nextn." in name}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight").removesuffix(".bias")
        parts = name.split(".")
        stem = ".".join(["blk", "{bid}", *parts[2:]]) if parts[0] == "blk" else name
        assert stem in stems, tensor.name


def test_the_draft_fits_wisp() -> None:
    check_fits(open_draft(WISP_DRAFT).config, read_config(open_checkpoint(WISP)))


def test_run_without_a_model_says_in_one_dim_line_that_wisp_runs() -> None:
    terminal, stderr = pty.openpty()
    command = [sys.executable, "-m", "warpsmith.cli", "run", "-p", "import os\nimport ", "-n", "1", "--temp", "0"]
    environment = {**os.environ, "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, env=environment, check=True)
    os.close(stderr)
    lines = os.read(terminal, 10_000).decode().splitlines()
    os.close(terminal)
    about = [line for line in lines if "wisp" in line]
    assert len(about) == 1
    assert about[0].startswith("\x1b[2m")
    assert about[0].endswith("\x1b[0m")
    assert result.stdout


@pytest.mark.oracle
def test_llama_cpp_computes_what_the_reference_computes() -> None:
    pytest.importorskip("llama_cpp")
    options = ["--prompts", "train/heldout_prompts.jsonl", "--samples", "2", "-n", "6"]
    command = [sys.executable, "bench/wisp_llamacpp.py", *options]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert "2 of them have the same tokens" in result.stdout
    assert "| llama.cpp, weights in fp32 | 2 of 2 | 12 of 12 |" in result.stdout
