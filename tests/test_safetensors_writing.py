"""Directories of safetensors that we write: they read back exactly, here and by the safetensors package."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_directories import (
    canonical_values,
    hf_values,
    prefixed,
    real_config,
    same_values,
    write_model,
)
from random_models import random_tensors, small_config
from warpsmith.checkpoint import safetensors_writer
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Checkpoint, Tensor, open_checkpoint
from warpsmith.checkpoint.quantize import quantize
from warpsmith.checkpoint.safetensors import INDEX, read_file
from warpsmith.checkpoint.safetensors_writer import write_directory
from warpsmith.errors import BadFile, BadRequest
from warpsmith.model.config import Config, config_to_metadata
from warpsmith.model.weights import read_config

CONFIG = small_config(ratio=2, name="", tied=False, mtp_layers=1)


def same_tensors(a: Checkpoint, tensors: dict[str, Tensor]) -> None:
    assert a.tensors.keys() == tensors.keys()
    for name, tensor in a.tensors.items():
        assert (tensor.type, tensor.shape) == (tensors[name].type, tensors[name].shape), name
        assert tensor.raw().shape == tensors[name].raw().shape, name
        np.testing.assert_array_equal(tensor.raw(), tensors[name].raw(), err_msg=name)


def typed(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Matrices in another float type, as a file of that type would give them."""
    result = {}
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and not name.endswith("conv1d.weight"):
            raw = quantize(TYPES[dtype], tensor.float32())
            tensor = Tensor(name, TYPES[dtype], tensor.shape, lambda raw=raw: raw)
        result[name] = tensor
    return result


@st.composite
def shapes(draw: st.DrawFn) -> Config:
    """Any shape of model, small."""
    small = st.integers(1, 3)
    layers = draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([2, 8, 10, 88]))
    kv_heads, key_heads = draw(small), draw(small)
    return Config(
        layers=layers,
        hidden=draw(st.integers(1, 12)),
        ffn=draw(st.integers(1, 12)),
        vocab=draw(st.integers(1, 20)),
        heads=kv_heads * draw(small),
        kv_heads=kv_heads,
        key_heads=key_heads,
        value_heads=key_heads * draw(st.sampled_from([1, 2, 3])),
        recurrent=tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))),
        head_dim=head_dim,
        rotary_dim=2 * draw(st.integers(1, head_dim // 2)),
        rope_theta=draw(st.sampled_from([1e4, 5e6, 1e7])),
        key_head_dim=draw(st.integers(1, 5)),
        value_head_dim=draw(st.integers(1, 5)),
        conv_kernel=draw(st.integers(2, 5)),
        eps=draw(st.sampled_from([1e-5, 1e-6])),
        context=draw(st.integers(1, 1 << 20)),
        tied=draw(st.booleans()),
        mtp_layers=draw(st.integers(0, 1)),
    )


@settings(max_examples=60, deadline=None)
@given(config=shapes(), dtype=st.sampled_from(["BF16", "F16", "F32"]), seed=st.integers(0, 1000))
def test_what_is_written_reads_back_exactly(
    tmp_path_factory: pytest.TempPathFactory, config: Config, dtype: str, seed: int
) -> None:
    """From canonical to Hugging Face's form and back, twice: the first pass makes numbers that this form can hold."""
    path = tmp_path_factory.mktemp("model")
    tensors = typed(random_tensors(config, seed), dtype)
    write_directory(path / "once", config_to_metadata(config), tensors, dtype)
    once = open_checkpoint(path / "once")
    assert read_config(once) == config
    for name, tensor in tensors.items():
        matrix = len(tensor.shape) == 2 and not name.endswith("conv1d.weight")
        rtol, atol = (0, 0) if matrix else (1e-6, 1e-7)
        np.testing.assert_allclose(once.tensors[name].float32(), tensor.float32(), rtol, atol, err_msg=name)
    write_directory(path / "twice", once.metadata, once.tensors, dtype)
    twice = open_checkpoint(path / "twice")
    assert read_config(twice) == config
    same_tensors(twice, once.tensors)
    for name in ("model.safetensors", "config.json"):
        assert (path / "once" / name).read_bytes() == (path / "twice" / name).read_bytes()


def test_decays_and_norms_of_checkpoints_survive(tmp_path: Path) -> None:
    """+1 and -1, exp and log: whatever float32 a checkpoint holds, the canonical number does not change."""
    config = replace(CONFIG, key_heads=512, value_heads=512, key_head_dim=1, value_head_dim=1, hidden=500)
    rng = np.random.default_rng(0)
    values = hf_values(config)
    for name, x in values.items():
        if name.endswith("A_log"):
            values[name] = rng.uniform(-12, 6, x.shape).astype(np.float32)
        elif name.endswith("norm.weight"):
            values[name] = rng.normal(0, 1, x.shape).astype(np.float32)
    source = open_checkpoint(write_model(tmp_path / "a", real_config(config), prefixed(values)))
    same_values(source, canonical_values(values, config))
    write_directory(tmp_path / "b", source.metadata, source.tensors, "F32")
    same_tensors(open_checkpoint(tmp_path / "b"), source.tensors)


def test_several_shards_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_tensors(CONFIG)
    write_directory(tmp_path / "one", config_to_metadata(CONFIG), tensors, "F32")
    assert {file.name for file in (tmp_path / "one").iterdir()} == {"config.json", "model.safetensors"}
    monkeypatch.setattr(safetensors_writer, "MAX_SHARD", 50_000)
    write_directory(tmp_path / "many", config_to_metadata(CONFIG), tensors, "F32")
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 3
    assert [file.name for file in files] == [
        f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))
    ]
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.elements * 4 for t in tensors.values())
    for file in files:
        assert set(read_file(file)) == {name for name, place in index["weight_map"].items() if place == file.name}
        assert sum(len(t.bytes) for t in read_file(file).values()) <= 50_000 or len(read_file(file)) == 1
    same_tensors(open_checkpoint(tmp_path / "many"), open_checkpoint(tmp_path / "one").tensors)


def test_an_index_left_by_another_model_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer, "MAX_SHARD", 50_000)
        write_directory(tmp_path, config_to_metadata(CONFIG), random_tensors(CONFIG, seed=1), "F32")
    write_directory(tmp_path, config_to_metadata(CONFIG), random_tensors(CONFIG, seed=2), "F32")
    with pytest.raises(BadFile, match=r"model\.safetensors: tensor .* is in model-000.* too"):
        open_checkpoint(tmp_path)
    for file in tmp_path.glob("model-*.safetensors"):
        file.unlink()
    expected = random_tensors(CONFIG, seed=2)["token_embd.weight"].float32()
    np.testing.assert_array_equal(open_checkpoint(tmp_path).tensors["token_embd.weight"].float32(), expected)


def test_tensors_without_a_name_there_are_not_written(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    for name in ("v.blk.0.attn_q.weight", "blk.5.attn_q.weight", "blk.0.nextn.eh_proj.weight", "rope_freqs.weight"):
        with pytest.raises(BadRequest, match=name):
            write_directory(
                tmp_path / "model", config_to_metadata(CONFIG), tensors | {name: tensors["output_norm.weight"]}, "F32"
            )
    assert not (tmp_path / "model").exists()


def test_the_package_reads_what_we_write(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors")
    for dtype in ("F32", "F16", "BF16"):
        write_directory(tmp_path / dtype, config_to_metadata(CONFIG), random_tensors(CONFIG), dtype)
        file = tmp_path / dtype / "model.safetensors"
        entries = dict(package.deserialize(file.read_bytes()))
        ours = read_file(file)
        assert entries.keys() == ours.keys()
        for name, entry in entries.items():
            assert (entry["dtype"], tuple(entry["shape"])) == (ours[name].dtype, ours[name].shape)
            assert bytes(entry["data"]) == ours[name].bytes.tobytes()
        assert entries["model.layers.0.linear_attn.conv1d.weight"]["shape"] == [CONFIG.conv_channels, 1, 4]
