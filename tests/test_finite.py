"""Numbers that are not finite: refused where weights are read, and where a token is chosen, on every device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warpsmith
from emulator.gpu import emulated_gpu
from warpsmith.backend.base import LOGITS, Backend, Want, wanted_for
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.finite import NOT_FINITE
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Checkpoint, Tensor, open_checkpoint
from warpsmith.checkpoint.convert import to_gguf, to_safetensors
from warpsmith.checkpoint.finite import is_finite
from warpsmith.draft.select import make_proposer
from warpsmith.errors import BadFile
from warpsmith.llm import LLM, backend_for
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import random_checkpoint
from warpsmith.model.weights import read_config

SMALL = replace(SIZES["tiny"], layers=4, hidden=256, ffn=256, vocab=272)
DEVICES = ("reference", "cpu")
SAMPLINGS = ({}, {"temperature": 1.0, "seed": 1}, {"logit_bias": {3: 1.0}}, {"repeat_penalty": 1.1})


def changed(checkpoint: Checkpoint, name: str, index: int, value: float) -> Checkpoint:
    """The same model but for one weight, in float32, or for all of them where the index is -1."""
    tensor = checkpoint.tensors[name]
    values = tensor.float32().copy()
    values.reshape(-1)[slice(None) if index < 0 else index] = value
    raw = values.reshape(-1, tensor.shape[-1]).view(np.uint8)
    new = Tensor(name, TYPES["F32"], tensor.shape, partial(np.asarray, raw))
    return replace(checkpoint, tensors={**checkpoint.tensors, name: new})


# Weights


@settings(max_examples=50, deadline=None)
@given(st.data(), st.sampled_from(sorted(TYPES)))
def test_bytes_are_judged_as_the_weights_they_hold(data: st.DataObject, kind: str) -> None:
    block_type = TYPES[kind]
    raw = np.frombuffer(data.draw(st.binary(min_size=4 * block_type.bytes, max_size=4 * block_type.bytes)), np.uint8)
    assert is_finite(block_type, raw) == bool(np.isfinite(dequantize(block_type, raw)).all())


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_one_weight_among_millions_is_found(kind: str, value: float) -> None:
    dtype = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[kind]
    values = np.full(5_000_001, 0xBFC0 if kind == "BF16" else -1.5, dtype)
    assert is_finite(TYPES[kind], values.view(np.uint8))
    one = np.array([value], np.float32)
    values[4_321_000] = one.view("<u2")[1] if kind == "BF16" else one.astype(dtype)[0]
    assert not is_finite(TYPES[kind], values.view(np.uint8))


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "blk.3.attn_q_norm.weight", "token_embd.weight"])
@pytest.mark.parametrize("format", ["gguf", "directory"])
def test_every_device_names_the_tensor(tmp_path: Path, format: str, name: str) -> None:
    checkpoint, path = changed(random_checkpoint(SMALL), name, 77, np.nan), tmp_path / "model.gguf"
    if format == "gguf":
        to_gguf(checkpoint, checkpoint.metadata, path)
    else:
        path = tmp_path / "model"
        to_safetensors(checkpoint, path, "F32")
    for device in DEVICES:
        with pytest.raises(BadFile, match=rf"{path}.*tensor {name} holds an infinity or a NaN"):
            warpsmith.load(path, device=device, context=64).generate([1, 2, 3], max_tokens=2)
        command = [sys.executable, "-m", "warpsmith.cli", "bench", "-m", str(path), "--device", device, "-p", "4"]
        result = subprocess.run([*command, "-n", "2", "-r", "1"], capture_output=True, text=True)
        assert result.returncode == 1, result.stderr
        assert name in result.stderr
        assert "Traceback" not in result.stderr


# Logits


def overflowing() -> Checkpoint:
    """Finite weights, and a last norm so large that products overflow."""
    return changed(random_checkpoint(SMALL), "output_norm.weight", -1, 3e38)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_decoded_after_it(device: str) -> None:
    checkpoint = overflowing()
    backend = backend_for(device, checkpoint, read_config(checkpoint))
    states = [backend.new_state(64) for _ in range(2)]
    assert backend.decode_together([(state, 1) for state in states], 4).tolist() == [[NOT_FINITE, NOT_FINITE]]
    assert [state.length for state in states] == [1, 1]


@pytest.mark.parametrize("options", SAMPLINGS)
@pytest.mark.parametrize("device", DEVICES)
def test_the_position_is_named(device: str, options: dict) -> None:  # type: ignore[type-arg]
    checkpoint = overflowing()
    backend = backend_for(device, checkpoint, read_config(checkpoint))
    for draft in (None, make_proposer("ngram", 4, backend, checkpoint.path)):
        llm = LLM(backend, checkpoint, 64, draft)
        with pytest.raises(BadFile, match="position 5 are not finite"):
            llm.generate([1, 2, 3, 2, 3], max_tokens=4, **options)
    with pytest.raises(BadFile, match="position 1 are not finite"):
        llm.score([1, 2, 3])
    state = backend.new_state(64)
    backend.prefill(state, [1, 2, 3], Want(tokens="none"))
    with pytest.raises(BadFile, match="position 4 are not finite"):
        list(backend.decode(state, 5, 4, sampling=Sampling(**options), history=[1, 2, 3, 5]))


def check_verify(backend: Backend) -> None:
    tree = Tree.chain([1, 2, 3])
    for options in (*SAMPLINGS, {"temperature": 1.0, "top_k": 4}):
        state, sampling = backend.new_state(8), Sampling(**options)
        backend.forward([(state, tree)], wanted_for(sampling))
        with pytest.raises(BadFile, match="position 1 are not finite"):
            backend.verify(state, tree, sampling, [1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_of_a_tree_does_not_hide_what_it_is(device: str) -> None:
    checkpoint = overflowing()
    backend = backend_for(device, checkpoint, read_config(checkpoint))
    output = backend.forward([(backend.new_state(8), Tree.chain([1, 2, 3]))], LOGITS)
    assert output.argmax is not None
    assert output.argmax.tolist() == [-1, -1, -1]
    check_verify(backend)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_cuda_kernels_say_the_same() -> None:
    checkpoint = overflowing()
    config = read_config(checkpoint)
    profile = replace(load_profiles()["h200"], largest_tree=8)
    with emulated_gpu(3, (1, 8)):
        cuda = WeightsFirstBackend(config, checkpoint.tensors, profile=profile, context=64)
        output = cuda.forward([(cuda.new_state(8), Tree.chain([1, 2, 3]))])
        assert output.argmax is not None
        assert output.argmax.tolist() == [-1, -1, -1]
        check_verify(cuda)
        for options in SAMPLINGS:
            state = cuda.new_state(64)
            cuda.prefill(state, [1, 2, 3], Want(tokens="none"))
            with pytest.raises(BadFile, match="position 4 are not finite"):
                list(cuda.decode(state, 5, 4, sampling=Sampling(**options), history=[1, 2, 3, 5]))
            assert state.length == 3


def test_a_healthy_file_is_read(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(SMALL, recipe="q4_k_m")
    to_gguf(checkpoint, checkpoint.metadata, tmp_path / "model.gguf")
    for name, tensor in open_checkpoint(tmp_path / "model.gguf").tensors.items():
        assert np.array_equal(tensor.raw(), checkpoint.tensors[name].raw()), name
