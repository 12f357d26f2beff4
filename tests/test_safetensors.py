"""Safetensors directories: every layout in the wild gives the same canonical tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hf_directories import (
    as_mlx,
    canonical_values,
    encode,
    hf_values,
    prefixed,
    real_config,
    same_values,
    write_file,
    write_model,
)
from random_models import small_config
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.safetensors import INDEX, read_file
from warpsmith.errors import BadFile, ModelNotFound
from warpsmith.model.weights import read_config

CONFIG = small_config(ratio=2, name="", tied=False, mtp_layers=1)
VALUES = hf_values(CONFIG)


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


# -- the safetensors package ------------------------------------------------------------------------------------------


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
