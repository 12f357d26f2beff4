"""The same weights in any container are the same model: equal tensors to the bit, and equal logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hf_directories import hf_values, prefixed, real_config, write_model
from random_models import small_config
from warpsmith.backend.base import Want
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.checkpoint.canonical import Checkpoint, open_checkpoint
from warpsmith.checkpoint.convert import to_gguf, to_safetensors
from warpsmith.checkpoint.gguf_writer import write_gguf
from warpsmith.errors import BadFile
from warpsmith.model.config import Config, config_to_metadata
from warpsmith.model.weights import read_config

IDS = np.random.default_rng(0).integers(0, 160, 24)


def config_of(ratio: int) -> Config:
    return replace(small_config(ratio, tied=ratio == 3, mtp_layers=1), name="")


def source(path: Path, ratio: int, dtype: str) -> Checkpoint:
    """A directory as Hugging Face has it, of sane weights that BF16 holds exactly."""
    config = config_of(ratio)
    values = hf_values(config, seed=ratio)
    for name, x in values.items():
        if x.ndim > 1 and not name.endswith("conv1d.weight"):
            values[name] = x / 8  # the range of hf_values is right for vectors, and would drown the logits here
    return open_checkpoint(write_model(path, real_config(config), prefixed(values), dtype))


def logits(checkpoint: Checkpoint) -> tuple[np.ndarray, np.ndarray]:
    backend = ReferenceBackend(read_config(checkpoint), checkpoint.tensors)
    state = backend.new_state(100)
    output = backend.prefill(state, IDS, Want("logits", every_row=True, hidden=True))
    assert output.hidden is not None
    drafts = backend.mtp(state, IDS[1:], output.hidden.numpy()[:-1], 0, Want("logits", every_row=True))
    assert output.logits is not None
    assert drafts.logits is not None
    assert np.isfinite(output.logits.numpy()).all()
    assert output.logits.numpy().std() > 0.1
    return output.logits.numpy(), drafts.logits.numpy()


def same(a: Checkpoint, b: Checkpoint, types: bool = True) -> None:
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        other = b.tensors[name]
        assert tensor.shape == other.shape, name
        if types:
            assert tensor.type == other.type, name
            np.testing.assert_array_equal(tensor.raw(), other.raw(), err_msg=name)
        np.testing.assert_array_equal(tensor.float32(), other.float32(), err_msg=name)
    assert read_config(a) == read_config(b)
    for x, y in zip(logits(a), logits(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_float_types_agree(tmp_path: Path, ratio: int) -> None:
    f32, bf16 = source(tmp_path / "f32", ratio, "F32"), source(tmp_path / "bf16", ratio, "BF16")
    assert f32.tensors["token_embd.weight"].type.name == "F32"
    assert bf16.tensors["token_embd.weight"].type.name == "BF16"
    same(f32, bf16, types=False)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_gguf_agrees(tmp_path: Path, ratio: int, dtype: str) -> None:
    directory = source(tmp_path / "source", ratio, dtype)
    to_gguf(directory, directory.metadata, tmp_path / "kept.gguf")
    same(open_checkpoint(tmp_path / "kept.gguf"), directory)
    to_gguf(directory, directory.metadata, tmp_path / "recipe.gguf", dtype.lower())
    same(open_checkpoint(tmp_path / "recipe.gguf"), directory, types=False)


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_directories_written_by_us_agree(tmp_path: Path, ratio: int, dtype: str) -> None:
    directory = source(tmp_path / "source", ratio, dtype)
    to_safetensors(directory, tmp_path / "copy", dtype)
    same(open_checkpoint(tmp_path / "copy"), directory)
    to_gguf(directory, directory.metadata, tmp_path / "model.gguf")
    to_safetensors(open_checkpoint(tmp_path / "model.gguf"), tmp_path / "back", dtype)
    same(open_checkpoint(tmp_path / "back"), directory)


def test_gguf_written_tensor_by_tensor_agrees(tmp_path: Path) -> None:
    """Not through a checkpoint: canonical float32 values and our metadata, as any other program would write them."""
    directory = source(tmp_path / "source", 2, "BF16")
    tensors = {name: (tensor.type.name, tensor.float32()) for name, tensor in directory.tensors.items()}
    write_gguf(tmp_path / "model.gguf", config_to_metadata(config_of(2)), tensors)
    same(open_checkpoint(tmp_path / "model.gguf"), directory)


def test_the_bias_that_ollama_names_without_its_suffix(tmp_path: Path) -> None:
    directory = source(tmp_path / "source", 2, "F32")
    config = config_of(2)
    tensors = {
        name.removesuffix(".bias"): (tensor.type.name, tensor.float32()) for name, tensor in directory.tensors.items()
    }
    metadata = config_to_metadata(config)
    metadata["qwen35.attention.head_count_kv"] = [0 if r else config.kv_heads for r in config.recurrent]
    write_gguf(tmp_path / "model.gguf", metadata, tensors)
    ollama = open_checkpoint(tmp_path / "model.gguf")
    same(ollama, directory)
    to_safetensors(ollama, tmp_path / "copy", "F32")
    same(open_checkpoint(tmp_path / "copy"), directory)


def test_a_directory_with_one_gguf_model_is_that_model(tmp_path: Path) -> None:
    directory = source(tmp_path / "source", 1, "F32")
    models = tmp_path / "models"
    models.mkdir()
    to_gguf(directory, directory.metadata, models / "a.gguf")
    same(open_checkpoint(models), directory)
    to_gguf(directory, directory.metadata, models / "b.gguf")
    with pytest.raises(BadFile, match=r"models holds 2 GGUF models\. Name the file"):
        open_checkpoint(models)


@pytest.mark.oracle
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_transformers_reads_what_we_write(tmp_path: Path, ratio: int) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = source(tmp_path / "source", ratio, "F32")
    to_safetensors(directory, tmp_path / "copy", "F32")
    model, report = transformers.Qwen3_5ForCausalLM.from_pretrained(
        tmp_path / "copy", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    got = logits(directory)[0]
    assert np.abs(got - expected).max() < 1e-4 * np.abs(expected).max()
