"""A checkpoint written in another format is the same checkpoint."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cuda_draft_cases import draft_of_the_27b
from random_drafts import FORMATS, FULL, SLIDING, draft_config, random_weights, write_draft
from warpsmith.checkpoint import dflash_writer
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Checkpoint, open_checkpoint
from warpsmith.checkpoint.convert import FILE_TYPES, to_gguf, to_safetensors
from warpsmith.checkpoint.dflash import HEAD, DFlashConfig, open_draft
from warpsmith.checkpoint.quantize import RECIPES, quantize
from warpsmith.errors import BadRequest
from warpsmith.model.config import SIZES, Config
from warpsmith.model.synthetic import random_checkpoint, synthesize
from warpsmith.model.synthetic_draft import draft_of, planned_draft_bytes, synthesize_draft
from warpsmith.model.tokenizer import Tokenizer, byte_tokenizer
from warpsmith.model.weights import read_config

# value heads differ from key heads, so that the order of heads shows
SMALL = replace(SIZES["tiny"], name="small", layers=2, recurrent=(True, False), ffn=256, vocab=272, mtp_layers=1)
END = byte_tokenizer(SMALL.vocab).token_id("<|im_end|>")


def config_of(checkpoint: Checkpoint) -> Config:
    """As read, but for a name that safetensors do not keep and an epsilon that GGUF rounds to float32."""
    return replace(read_config(checkpoint), name="small", eps=1e-6)


def same_bytes(a: Checkpoint, b: Checkpoint) -> None:
    assert set(a.tensors) == set(b.tensors)
    for name, tensor in a.tensors.items():
        assert tensor.type == b.tensors[name].type, name
        assert np.array_equal(tensor.raw().ravel(), b.tensors[name].raw().ravel()), name


@pytest.mark.parametrize("recipe", ["f32", "bf16", "q8_0", "q4_k_m"])
def test_gguf_keeps_every_byte_and_all_metadata(tmp_path: Path, recipe: str) -> None:
    source = random_checkpoint(SMALL, recipe=recipe)
    to_gguf(source, source.metadata, tmp_path / "model.gguf")
    read = open_checkpoint(tmp_path / "model.gguf")
    same_bytes(source, read)
    assert config_of(read) == SMALL
    for key, value in source.metadata.items():
        assert read.metadata[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    assert Tokenizer.from_gguf(read.metadata).encode("héllo<|im_end|>") == [*"héllo".encode(), END]


@pytest.mark.parametrize("recipe", [None, "f32", "q8_0"])
def test_progress_ends_where_it_said_it_would(tmp_path: Path, recipe: str | None) -> None:
    source, heard = random_checkpoint(SMALL, recipe="bf16"), list[int]()
    to_gguf(source, source.metadata, tmp_path / "model.gguf", recipe, heard.append)
    assert sum(heard) == source.nbytes


def test_a_recipe_converts_as_if_made_that_way(tmp_path: Path) -> None:
    exact = random_checkpoint(SMALL, seed=2)
    for recipe in RECIPES:
        to_gguf(exact, exact.metadata, tmp_path / "model.gguf", recipe)
        read = open_checkpoint(tmp_path / "model.gguf")
        same_bytes(random_checkpoint(SMALL, seed=2, recipe=recipe), read)
        assert read.metadata["general.file_type"] == FILE_TYPES[recipe]


def test_safetensors_and_back(tmp_path: Path) -> None:
    source = random_checkpoint(SMALL, recipe="bf16")
    to_safetensors(source, tmp_path / "model", "BF16")
    read = open_checkpoint(tmp_path / "model")
    assert config_of(read) == SMALL
    for name, tensor in source.tensors.items():
        # matrices to the bit; vectors change form (norms lose their +1, decays their exponential) and come back rounded
        exact = tensor.type.name == "BF16"
        a, b = tensor.float32(), read.tensors[name].float32()
        np.testing.assert_allclose(b, a, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7, err_msg=name)


def test_quantised_weights_are_not_quantised_again(tmp_path: Path) -> None:
    source = random_checkpoint(SMALL, recipe="q4_0")
    with pytest.raises(BadRequest, match="again"):
        to_gguf(source, source.metadata, tmp_path / "model.gguf", "q8_0")
    assert not list(tmp_path.iterdir())
    to_gguf(source, source.metadata, tmp_path / "wide.gguf", "f32")
    wide = open_checkpoint(tmp_path / "wide.gguf")
    for name, tensor in source.tensors.items():
        assert np.array_equal(tensor.float32(), wide.tensors[name].float32()), name


def test_unknown_types_are_refused(tmp_path: Path) -> None:
    source = random_checkpoint(SMALL)
    with pytest.raises(BadRequest, match="q9_z"):
        to_gguf(source, source.metadata, tmp_path / "model.gguf", "q9_z")
    with pytest.raises(BadRequest, match="Q4_K"):
        to_safetensors(source, tmp_path / "model", "Q4_K")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("recipe", ["f32", "bf16"])
def test_synthesized_files_hold_the_random_checkpoint(tmp_path: Path, recipe: str) -> None:
    memory = random_checkpoint(SMALL, seed=9, recipe=recipe)
    synthesize(SMALL, tmp_path / "model.gguf", recipe, seed=9)
    same_bytes(memory, open_checkpoint(tmp_path / "model.gguf"))
    synthesize(SMALL, tmp_path / "model", recipe, seed=9, format="safetensors")
    directory = open_checkpoint(tmp_path / "model")
    assert directory.tokenizer_dir is not None
    tokenizer = Tokenizer.from_tokenizer_json(directory.tokenizer_dir)
    assert tokenizer.encode("a<|im_end|>") == [97, END]
    for name, tensor in memory.tensors.items():
        np.testing.assert_allclose(directory.tensors[name].float32(), tensor.float32(), rtol=1e-6, atol=1e-7)


def test_synthesized_blocks_are_complete_and_repeatable(tmp_path: Path) -> None:
    for name in ("one", "two"):
        synthesize(SMALL, tmp_path / f"{name}.gguf", "q4_k_m", seed=4)
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "two.gguf").read_bytes()
    read = open_checkpoint(tmp_path / "one.gguf")
    assert config_of(read) == SMALL
    with pytest.raises(BadRequest, match="Q4_K_M"):
        synthesize(SMALL, tmp_path / "dir", "q4_k_m", format="safetensors")
    with pytest.raises(BadRequest, match="onnx"):
        synthesize(SMALL, tmp_path / "x", format="onnx")


def test_synthesized_drafts_have_the_released_shape(tmp_path: Path) -> None:
    assert replace(draft_of(SIZES["27B"]), vocab=None) == draft_of_the_27b()
    target = replace(SMALL, layers=9)
    made: list[int] = []
    synthesize_draft(target, tmp_path / "draft.gguf", "q8_0", seed=3, progress=made.append)
    assert sum(made) == planned_draft_bytes(target, "q8_0")
    file = open_draft(tmp_path / "draft.gguf")
    assert replace(file.config, source="random", eps=1e-6) == draft_of(target)
    assert file.config.target_layers == (1, 2, 3, 4, 6)
    assert {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) == 2} == {"Q8_0"}
    assert 0.5 < np.std(file.tensors["fc.weight"].float32()) * np.sqrt(5 * target.hidden) < 2


def convert(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warpsmith.cli", "convert", *map(str, args)], capture_output=True, text=True
    )


def test_a_directory_does_not_round_quantised_weights_unasked(tmp_path: Path) -> None:
    source = random_checkpoint(SMALL, recipe="q8_0")
    to_gguf(source, source.metadata, tmp_path / "q8.gguf")
    refused = convert(tmp_path / "q8.gguf", tmp_path / "model")
    assert refused.returncode == 2
    assert "holds Q8_0 weights" in refused.stderr
    assert "--type f32" in refused.stderr
    assert not (tmp_path / "model").exists()
    exact = convert(tmp_path / "q8.gguf", tmp_path / "f32", "--type", "f32")
    assert exact.returncode == 0, exact.stderr
    assert "rounded" not in exact.stderr
    for name, tensor in open_checkpoint(tmp_path / "f32").tensors.items():
        if len(tensor.shape) == 2 and "conv1d" not in name:
            assert np.array_equal(tensor.float32(), source.tensors[name].float32()), name
    for target in ("bf16", "bf16.gguf"):
        said = convert(tmp_path / "q8.gguf", tmp_path / target, "--type", "bf16")
        assert said.returncode == 0, said.stderr
        assert "Q8_0 weights were rounded to bf16; --type f32 holds them exactly" in said.stderr


@pytest.mark.parametrize("recipe", ["f32", "f16", "bf16"])
def test_a_directory_keeps_the_float_type_of_its_source(tmp_path: Path, recipe: str) -> None:
    source = random_checkpoint(SMALL, recipe=recipe)
    wide = source.tensors["blk.0.ssm_alpha.weight"]
    in_f32 = partial(np.asarray, wide.float32().view(np.uint8))  # as converters leave some tensors of bf16 files
    source.tensors[wide.name] = replace(wide, type=TYPES["F32"], read=in_f32)
    to_gguf(source, source.metadata, tmp_path / "model.gguf")
    result = convert(tmp_path / "model.gguf", tmp_path / "model")
    assert result.returncode == 0, result.stderr
    read = open_checkpoint(tmp_path / "model")
    for name, tensor in source.tensors.items():
        if len(tensor.shape) == 2 and "conv1d" not in name:
            assert read.tensors[name].type.name == recipe.upper()
            assert np.array_equal(read.tensors[name].float32(), tensor.float32()), name


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("said", [None, False, True])
@pytest.mark.parametrize("shape", [FULL, SLIDING], ids=["full", "sliding"])
def test_a_draft_keeps_its_shape_and_its_bits(
    tmp_path: Path, format: str, said: bool | None, shape: DFlashConfig
) -> None:
    config = shape if said is None else replace(shape, causal=(said,) * shape.layers)
    source = write_draft(tmp_path / "draft", format, config, random_weights(config), said_causal=said)
    before = open_draft(source)
    dflash_writer.write_draft(before, tmp_path / "copy.gguf")
    after = open_draft(tmp_path / "copy.gguf")
    assert before.config.causal == config.causal
    assert after.config == replace(before.config, source=after.config.source, target_depth=None)
    assert after.tensors.keys() == before.tensors.keys()
    for name, tensor in before.tensors.items():
        assert after.tensors[name].type == tensor.type
        assert np.array_equal(after.tensors[name].raw(), tensor.raw()), name


def test_a_draft_is_quantised_once(tmp_path: Path) -> None:
    """As a recipe says, and not a second time."""
    config = draft_config(SMALL, hidden=256, ffn=512, head_dim=64)
    weights = random_weights(config)
    source = write_draft(tmp_path / "draft", "safetensors", config, weights)
    result = convert(source, tmp_path / "small.gguf", "--type", "q4_k_m")
    assert result.returncode == 0, result.stderr
    found = open_draft(tmp_path / "small.gguf").tensors
    assert {tensor.type.name for tensor in found.values() if len(tensor.shape) == 2} == {"Q4_K", "Q6_K"}
    for name, tensor in found.items():
        rows = weights[name].reshape(-1, weights[name].shape[-1])
        assert np.array_equal(tensor.raw(), quantize(tensor.type, rows)), name
    again = convert(tmp_path / "small.gguf", tmp_path / "smaller.gguf", "--type", "q4_0")
    assert again.returncode == 2
    assert "would lose twice" in again.stderr
    assert not (tmp_path / "smaller.gguf").exists()


def test_a_draft_may_speak_the_first_tokens_only(tmp_path: Path) -> None:
    config = draft_config(SMALL)
    source = write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    assert open_draft(source).config.speaks is None
    result = convert(source, tmp_path / "few.gguf", "--speaks", "128")
    assert result.returncode == 0, result.stderr
    few = open_draft(tmp_path / "few.gguf").config
    assert few == replace(config, source=few.source, target_depth=None, speaks=128)
    shown = subprocess.run(
        [sys.executable, "-m", "warpsmith.cli", "show", str(tmp_path / "few.gguf")], capture_output=True, text=True
    )
    assert "speaks      the first 128 tokens of its target's vocabulary" in shown.stdout
    assert convert(tmp_path / "few.gguf", tmp_path / "copy.gguf").returncode == 0
    assert open_draft(tmp_path / "copy.gguf").config.speaks == 128
    for tokens, words in (("100", "multiple of 64"), (str(SMALL.vocab // 64 * 64 + 64), f"at most {SMALL.vocab}")):
        refused = convert(source, tmp_path / "none.gguf", "--speaks", tokens)
        assert refused.returncode == 2
        assert words in refused.stderr
    model = random_checkpoint(SMALL)
    to_gguf(model, model.metadata, tmp_path / "model.gguf")
    refused = convert(tmp_path / "model.gguf", tmp_path / "none.gguf", "--speaks", "128")
    assert refused.returncode == 2
    assert "models speak all of their vocabulary" in refused.stderr
    assert not (tmp_path / "none.gguf").exists()


def test_a_draft_may_have_an_lm_head_of_its_own(tmp_path: Path) -> None:
    """A copy of its model's in fewer bits, which may be cut like one it borrows."""
    shape = replace(SMALL, hidden=256)
    config = draft_config(shape, ffn=512, head_dim=64, target_layers=(0, 1))
    source = write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    model = random_checkpoint(shape)
    to_gguf(model, model.metadata, tmp_path / "model.gguf", "q6_k")
    given = ("--type", "q4_k_m", "--head", tmp_path / "model.gguf")
    result = convert(source, tmp_path / "own.gguf", *given, "--speaks", "128")
    assert result.returncode == 0, result.stderr
    own = open_draft(tmp_path / "own.gguf")
    assert own.config == replace(config, source=own.config.source, target_depth=None, speaks=128, own_head=True)
    found, lent = own.tensors[HEAD], open_checkpoint(tmp_path / "model.gguf").tensors
    of_the_model = lent["token_embd.weight" if shape.tied else "output.weight"]
    assert (found.type.name, found.shape) == ("Q4_K", (128, 256))
    assert np.array_equal(found.raw(), quantize(found.type, of_the_model.float32()[:128]))
    shown = subprocess.run(
        [sys.executable, "-m", "warpsmith.cli", "show", str(tmp_path / "own.gguf")], capture_output=True, text=True
    )
    assert "the first 128 tokens of its target's vocabulary, by an LM head of its own, Q4_K" in shown.stdout

    assert convert(tmp_path / "own.gguf", tmp_path / "fewer.gguf", "--speaks", "64").returncode == 0
    assert np.array_equal(open_draft(tmp_path / "fewer.gguf").tensors[HEAD].raw(), found.raw()[:64])
    refused = convert(tmp_path / "own.gguf", tmp_path / "none.gguf", "--speaks", "192")
    assert refused.returncode == 2
    assert "at most 128" in refused.stderr
    other = write_draft(tmp_path / "other", "lucebox", FULL, random_weights(FULL))
    for wrong, words in ((other, "hidden size of 64"), (tmp_path / "model.gguf", "has its LM head")):
        refused = convert(wrong, tmp_path / "none.gguf", *given)
        assert refused.returncode == 2
        assert words in refused.stderr
    assert not (tmp_path / "none.gguf").exists()


def test_a_draft_is_not_written_as_a_directory(tmp_path: Path) -> None:
    source = write_draft(tmp_path / "draft", "lucebox", FULL, random_weights(FULL))
    refused = convert(source, tmp_path / "directory")
    assert refused.returncode == 2
    assert "written as a GGUF file" in refused.stderr
    assert not (tmp_path / "directory").exists()
