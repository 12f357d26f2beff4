"""Safetensors directories: every layout in the wild gives the same canonical tensors, and what we write reads back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_directories import (
    as_mlx,
    canonical_values,
    encode,
    hf_values,
    prefixed,
    real_config,
    write_file,
    write_model,
)
from random_models import random_tensors, small_config
from warpsmith.checkpoint import safetensors_writer
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Checkpoint, Tensor, open_checkpoint
from warpsmith.checkpoint.quantize import quantize
from warpsmith.checkpoint.safetensors import INDEX, read_file
from warpsmith.checkpoint.safetensors_writer import write_directory
from warpsmith.errors import BadFile, BadRequest, ModelNotFound
from warpsmith.model.config import Config, config_to_metadata
from warpsmith.model.weights import read_config

CONFIG = small_config(ratio=2, name="", tied=False, mtp_layers=1)
VALUES = hf_values(CONFIG)


def same_values(checkpoint: Checkpoint, expected: dict[str, np.ndarray]) -> None:
    assert checkpoint.tensors.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(checkpoint.tensors[name].float32(), values, err_msg=name)


def same_tensors(a: Checkpoint, tensors: dict[str, Tensor]) -> None:
    assert a.tensors.keys() == tensors.keys()
    for name, tensor in a.tensors.items():
        assert (tensor.type, tensor.shape) == (tensors[name].type, tensors[name].shape), name
        assert tensor.raw().shape == tensors[name].raw().shape, name
        np.testing.assert_array_equal(tensor.raw(), tensors[name].raw(), err_msg=name)


# -- layouts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_those_the_definitions_give(tmp_path: Path, ratio: int, tied: bool) -> None:
    config = replace(CONFIG, value_heads=CONFIG.key_heads * ratio, tied=tied)
    values = hf_values(config, seed=ratio)
    checkpoint = open_checkpoint(write_model(tmp_path, real_config(config), prefixed(values)))
    same_values(checkpoint, canonical_values(values, config))
    assert read_config(checkpoint) == config


@pytest.mark.parametrize("prefix", ["model.language_model.", "model.", "language_model.model.", "language_model.", ""])
@pytest.mark.parametrize("nested", [True, False])
def test_any_prefix(tmp_path: Path, prefix: str, nested: bool) -> None:
    config = real_config(CONFIG)
    path = write_model(tmp_path, config if nested else config["text_config"], prefixed(VALUES, prefix))
    same_values(open_checkpoint(path), canonical_values(VALUES, CONFIG))


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp."])
def test_mtp_is_kept(tmp_path: Path, prefix: str) -> None:
    values = {name.replace("mtp.", prefix): x for name, x in prefixed(VALUES).items()}
    checkpoint = open_checkpoint(write_model(tmp_path, real_config(CONFIG), values))
    same_values(checkpoint, canonical_values(VALUES, CONFIG))
    assert checkpoint.metadata["qwen35.block_count"] == CONFIG.layers + 1
    assert checkpoint.metadata["qwen35.attention.recurrent_layers"] == [*CONFIG.recurrent, False]
    assert read_config(checkpoint) == CONFIG


def test_a_model_without_mtp(tmp_path: Path) -> None:
    values = {name: x for name, x in VALUES.items() if not name.startswith("mtp.")}
    checkpoint = open_checkpoint(write_model(tmp_path, real_config(CONFIG), prefixed(values)))
    assert read_config(checkpoint) == replace(CONFIG, mtp_layers=0)


@pytest.mark.parametrize("kept", ["mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"])
def test_half_an_mtp_block_is_refused(tmp_path: Path, kept: str) -> None:
    values = {name: x for name, x in VALUES.items() if not name.startswith("mtp.") or name == kept}
    checkpoint = open_checkpoint(write_model(tmp_path, real_config(CONFIG), prefixed(values)))
    with pytest.raises(BadFile, match=rf"tensor blk\.{CONFIG.layers}\..* is missing"):
        read_config(checkpoint)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_mlx_conversions(tmp_path: Path, ratio: int) -> None:
    config = replace(CONFIG, value_heads=CONFIG.key_heads * ratio, mtp_layers=0)
    values = hf_values(config)
    path = write_model(tmp_path, real_config(config), as_mlx(values))
    same_values(open_checkpoint(path), canonical_values(values, config))


def test_a_convolution_of_each_kind_is_refused(tmp_path: Path) -> None:
    """Half converted: whether the norms have their +1 cannot be told."""
    values = prefixed(VALUES)
    name = "model.language_model.layers.2.linear_attn.conv1d.weight"
    values[name] = values[name].transpose(0, 2, 1)
    with pytest.raises(BadFile, match=r"conv1d\.weight has shape .* expected \[channels, taps, 1\]"):
        open_checkpoint(write_model(tmp_path, real_config(CONFIG), values))


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_matrices_keep_their_type_and_vectors_become_f32(tmp_path: Path, dtype: str) -> None:
    """All vectors in `dtype`: A_log and dt_bias come as F32 in some checkpoints and as BF16 in others."""
    checkpoint = open_checkpoint(write_model(tmp_path, real_config(CONFIG), prefixed(VALUES), dtype))
    same_values(checkpoint, canonical_values(VALUES, CONFIG))
    for name, tensor in checkpoint.tensors.items():
        vector = len(tensor.shape) == 1 or name.endswith("conv1d.weight")
        assert tensor.type.name == ("F32" if vector else dtype), name
        assert tensor.raw().shape == (tensor.nbytes // tensor.raw().shape[1], tensor.raw().shape[1])


def test_types_may_be_mixed(tmp_path: Path) -> None:
    dtypes = ["BF16", "F32", "F16"]
    mixed = {name: encode(x, dtypes[i % 3]) for i, (name, x) in enumerate(prefixed(VALUES).items())}
    same_values(open_checkpoint(write_model(tmp_path, real_config(CONFIG), mixed)), canonical_values(VALUES, CONFIG))


def test_data_may_start_at_any_byte(tmp_path: Path) -> None:
    """Headers padded to eight bytes are a habit, not a rule."""
    path = write_model(tmp_path, real_config(CONFIG), prefixed(VALUES), "BF16")
    file = path / "model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    for padding in range(1, 4):
        file.write_bytes(
            (length + padding).to_bytes(8, "little") + data[8 : 8 + length] + b" " * padding + data[8 + length :]
        )
        same_values(open_checkpoint(path), canonical_values(VALUES, CONFIG))


# -- files ------------------------------------------------------------------------------------------------------------


def write_shards(path: Path, index: bool = True) -> Path:
    tensors = {name: encode(x, "F32") for name, x in prefixed(VALUES).items()}
    write_model(path, real_config(CONFIG), {})
    (path / "model.safetensors").unlink()
    names = [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    weight_map = {tensor: names[i % 3] for i, tensor in enumerate(tensors)}
    for name in names:
        write_file(path / name, {t: stored for t, stored in tensors.items() if weight_map[t] == name})
    if index:
        (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


@pytest.mark.parametrize("index", [True, False])
def test_shards(tmp_path: Path, index: bool) -> None:
    same_values(open_checkpoint(write_shards(tmp_path, index)), canonical_values(VALUES, CONFIG))


def test_files_that_the_index_does_not_name_are_left_alone(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "adapter.safetensors").write_bytes(b"anything")
    same_values(open_checkpoint(tmp_path), canonical_values(VALUES, CONFIG))


def test_a_tensor_in_two_files_is_refused_without_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, index=False)
    write_file(
        tmp_path / "other.safetensors", {"model.language_model.norm.weight": encode(VALUES["norm.weight"], "F32")}
    )
    with pytest.raises(
        BadFile, match=r"other\.safetensors: tensor 'model\.language_model\.norm\.weight' is in model-0"
    ):
        open_checkpoint(tmp_path)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    values = prefixed(VALUES) | {"model.norm.weight": VALUES["norm.weight"]}
    with pytest.raises(BadFile, match=r"tensor 'model\.norm\.weight' is there under another name too"):
        open_checkpoint(write_model(tmp_path, real_config(CONFIG), values))


@pytest.mark.parametrize("name", ["model.visual.blocks.0.attn.qkv.weight", "vision_tower.patch_embed.proj.weight"])
def test_the_vision_tower_is_skipped_whatever_its_type(tmp_path: Path, name: str) -> None:
    tensors: dict[str, Any] = dict(prefixed(VALUES))
    tensors |= {name: encode(np.ones((4, 4), np.float32), "BF16"), name + "_8": ("F8_E4M3", (4,), bytes(4))}
    same_values(open_checkpoint(write_model(tmp_path, real_config(CONFIG), tensors)), canonical_values(VALUES, CONFIG))


@pytest.mark.parametrize(
    "name",
    [
        "model.language_model.layers.1.self_attn.q_proj.bias",
        "model.language_model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.4.mlp.up_proj.weight",
        "model.language_model.layers.999.input_layernorm.weight",
    ],
    ids=["a bias", "an adapter", "one layer too many", "many layers too many"],
)
def test_what_would_change_a_layer_is_not_left_out(tmp_path: Path, name: str) -> None:
    values = prefixed(VALUES) | {name: VALUES["layers.0.mlp.up_proj.weight"]}
    with pytest.raises(
        BadFile, match=rf"model\.safetensors: tensor '{name[:40]}.* has no place in a Qwen3.5 of 4 layers"
    ):
        open_checkpoint(write_model(tmp_path, real_config(CONFIG), values))


def test_frequencies_that_old_files_hold_are_skipped(tmp_path: Path) -> None:
    values = prefixed(VALUES) | {"model.layers.1.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    same_values(open_checkpoint(write_model(tmp_path, real_config(CONFIG), values)), canonical_values(VALUES, CONFIG))


@pytest.mark.parametrize(
    "name", [name for name in VALUES if name.startswith("layers.0.linear_attn.") and "norm" not in name]
)
def test_shapes_that_the_heads_do_not_fit_are_refused_before_they_are_read(tmp_path: Path, name: str) -> None:
    axis = 1 if name.endswith("out_proj.weight") else 0
    values = VALUES | {name: np.delete(VALUES[name], 0, axis)}
    with pytest.raises(BadFile, match=rf"tensor model\.language_model\.{name} has shape .*, and the configured heads"):
        open_checkpoint(write_model(tmp_path, real_config(CONFIG), prefixed(values)))


# -- tied embeddings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["root", "text", "both", "text only file"])
def test_a_tied_head_stored_twice_is_read_once(tmp_path: Path, where: str) -> None:
    config = real_config(CONFIG)
    del config["tie_word_embeddings"], config["text_config"]["tie_word_embeddings"]
    if where in ("root", "both"):
        config["tie_word_embeddings"] = True
    if where != "root":
        config["text_config"]["tie_word_embeddings"] = True
    values = VALUES | {"lm_head.weight": VALUES["embed_tokens.weight"]}
    path = write_model(tmp_path, config["text_config"] if where == "text only file" else config, prefixed(values))
    assert read_config(open_checkpoint(path)).tied


def test_a_head_of_its_own_is_kept_whatever_the_flag_says(tmp_path: Path) -> None:
    config = real_config(replace(CONFIG, tied=True))
    checkpoint = open_checkpoint(write_model(tmp_path, config, prefixed(VALUES)))
    assert not read_config(checkpoint).tied
    same_values(checkpoint, canonical_values(VALUES, CONFIG))


def test_a_head_that_is_not_there_is_the_embedding(tmp_path: Path) -> None:
    values = {name: x for name, x in prefixed(VALUES).items() if name != "lm_head.weight"}
    assert read_config(open_checkpoint(write_model(tmp_path, real_config(CONFIG), values))).tied


# -- quantised weights ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings_", "method"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "awq"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization": "mxfp4"}, "mxfp4"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_quantised_repositories_are_refused_by_name(
    tmp_path: Path, settings_: dict[str, Any], method: str, nested: bool
) -> None:
    config = real_config(CONFIG)
    (config["text_config"] if nested else config).update(settings_)
    with pytest.raises(BadFile, match=rf"config\.json: {next(iter(settings_))} says .*{method}") as error:
        open_checkpoint(write_model(tmp_path, config, prefixed(VALUES)))
    assert "GGUF" in error.value.fix


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("language_model.model.layers.0.mlp.up_proj.scales", "BF16"),
        ("language_model.model.layers.0.mlp.up_proj.biases", "BF16"),
        ("model.language_model.layers.0.mlp.up_proj.weight_scale_inv", "F32"),
        ("model.language_model.layers.0.mlp.up_proj.weight_scale", "F32"),
        ("model.language_model.layers.0.mlp.up_proj.qweight", "I32"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "F8_E4M3"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "U32"),
    ],
)
def test_quantised_tensors_are_refused_by_name(tmp_path: Path, name: str, dtype: str) -> None:
    tensors: dict[str, Any] = dict(prefixed(VALUES))
    tensors[name] = (dtype, (2, 2), bytes(4 * {"BF16": 2, "F8_E4M3": 1}.get(dtype, 4)))
    with pytest.raises(BadFile, match=r"model\.safetensors: tensor .*mlp\.up_proj") as error:
        open_checkpoint(write_model(tmp_path, real_config(CONFIG), tensors))
    assert "GGUF" in error.value.fix


# -- what stands beside the weights -----------------------------------------------------------------------------------


def test_a_directory_without_a_tokenizer_loads(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path, real_config(CONFIG), prefixed(VALUES)))
    assert checkpoint.tokenizer_dir is None
    assert checkpoint.chat_template is None
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.tokenizer_dir == tmp_path
    assert checkpoint.chat_template == "old"
    (tmp_path / "chat_template.jinja").write_text("{{ 'größer' }}", encoding="utf-8")
    assert open_checkpoint(tmp_path).chat_template == "{{ 'größer' }}"


def test_paths_that_hold_no_model_say_so(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no model at"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(BadFile, match=r"no config\.json and no GGUF"):
        open_checkpoint(tmp_path)
    with pytest.raises(BadFile, match="cannot be read"):
        open_checkpoint(tmp_path / ("long" * 1000))
    write_model(tmp_path, real_config(CONFIG), prefixed(VALUES))
    with pytest.raises(BadFile, match="is one file of a model directory"):
        open_checkpoint(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BadFile, match="no safetensors files"):
        open_checkpoint(tmp_path)


# -- writing ----------------------------------------------------------------------------------------------------------


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


# -- the safetensors package ------------------------------------------------------------------------------------------


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


def test_we_read_what_the_package_writes(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors")
    numpy_package = pytest.importorskip("safetensors.numpy")
    config = real_config(CONFIG)
    write_model(tmp_path, config, {})
    file = tmp_path / "model.safetensors"
    for dtype, numpy_dtype in (("F32", np.float32), ("F16", np.float16)):
        tensors = {name: x.astype(numpy_dtype) for name, x in prefixed(VALUES).items()}
        numpy_package.save_file(tensors, file, metadata={"format": "pt"})
        same_values(open_checkpoint(tmp_path), canonical_values(VALUES, CONFIG))
        assert open_checkpoint(tmp_path).tensors["token_embd.weight"].type.name == dtype
    with package.safe_open(file, framework="numpy") as opened:
        assert set(opened.keys()) == set(read_file(file))
