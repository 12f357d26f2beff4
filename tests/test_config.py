"""Configurations: the family's sizes, from config.json and from GGUF metadata."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config_cases import from_config, from_metadata, real_metadata
from hf_directories import real_config
from random_models import random_tensors, small_config
from warpsmith.checkpoint import hf
from warpsmith.checkpoint.canonical import Checkpoint
from warpsmith.errors import BadFile
from warpsmith.model.config import SIZES, Config, config_to_metadata, every_fourth_is_attention
from warpsmith.model.weights import expected_shapes, read_config

# text parameters, MTP parameters, tensors without MTP: published for each size
PUBLISHED = {
    "0.8B": (752_393_024, 20_452_864, 320),
    "2B": (1_881_825_088, 60_828_160, 320),
    "4B": (4_205_751_296, 120_599_552, 426),
    "9B": (8_953_803_264, 243_290_624, 427),
    "27B": (26_895_998_464, 424_699_392, 851),
}
SIZE_NAMES = list(PUBLISHED)


def count_parameters(config: Config) -> int:
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZE_NAMES)
def test_parameters_and_tensors_are_those_published(size: str) -> None:
    text, mtp, tensors = PUBLISHED[size]
    config = SIZES[size]
    with_mtp = replace(config, mtp_layers=1)
    assert count_parameters(config) == text
    assert count_parameters(with_mtp) == text + mtp
    assert len(expected_shapes(config)) == tensors
    assert len(expected_shapes(with_mtp)) == tensors + 15


@pytest.mark.parametrize("size", SIZE_NAMES)
def test_both_formats_read_to_the_same_configuration(size: str) -> None:
    config = SIZES[size]
    assert replace(from_config(real_config(config), config), name=size) == config
    text_only = real_config(config)["text_config"]
    assert replace(from_config(text_only, config), name=size) == config
    assert from_metadata(real_metadata(config), config) == config


@pytest.mark.parametrize("size", [*SIZE_NAMES, "tiny"])
@pytest.mark.parametrize("mtp", [0, 1])
def test_metadata_round_trips(size: str, mtp: int) -> None:
    config = replace(SIZES[size], mtp_layers=mtp)
    metadata = config_to_metadata(config)
    assert from_metadata(metadata, config) == config
    written = hf.config_from_metadata(metadata, config.vocab, config.tied)
    assert replace(from_config(written, config), name=size, mtp_layers=mtp) == config
    if size != "tiny":
        expected = real_metadata(config) | {"qwen35.attention.layer_norm_rms_epsilon": 1e-6}
        assert metadata == expected


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(88, 30), (104, 60), (256, 64), (2, 2), (6, 2)])
def test_the_rotary_share_survives_rounding(head_dim: int, rotary_dim: int) -> None:
    """88 * (30 / 88) is less than 30, and what reads a configuration rounds down."""
    config = small_config(head_dim=head_dim, rotary_dim=rotary_dim)
    written = hf.config_from_metadata(config_to_metadata(config), config.vocab, config.tied)
    assert from_config(written, config).rotary_dim == rotary_dim


def test_mtp_blocks_are_not_layers() -> None:
    config = replace(SIZES["27B"], mtp_layers=1)
    read = from_metadata(real_metadata(config), config)
    assert (read.layers, read.mtp_layers, len(read.recurrent)) == (64, 1, 64)
    metadata = real_metadata(config) | {"qwen35.block_count": 1}
    with pytest.raises(BadFile, match=r"model\.gguf: qwen35\.block_count leaves no layers"):
        from_metadata(metadata)


# -- which layers are attention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 64])
def test_intervals_are_honoured(interval: int) -> None:
    expected = tuple(i % interval != interval - 1 for i in range(32))
    assert (
        from_metadata(real_metadata(SIZES["9B"]) | {"qwen35.full_attention_interval": interval}).recurrent == expected
    )
    config = real_config(SIZES["9B"])
    del config["text_config"]["layer_types"]
    config["text_config"]["full_attention_interval"] = interval
    assert from_config(config).recurrent == expected


def test_the_interval_is_four_unless_told() -> None:
    metadata = real_metadata(SIZES["9B"])
    del metadata["qwen35.full_attention_interval"]
    assert from_metadata(metadata).recurrent == every_fourth_is_attention(32)


def test_layer_types_win_over_the_interval() -> None:
    config = real_config(SIZES["9B"])
    types = ["full_attention"] * 3 + ["linear_attention"] * 29
    config["text_config"]["layer_types"] = types
    assert from_config(config).attention_layers == (0, 1, 2)


def test_recurrent_flags_win_over_the_interval_and_may_cover_mtp_blocks() -> None:
    flags = [True, False] * 16
    for given_flags in (flags, [int(f) for f in flags], [*flags, False]):
        metadata = real_metadata(replace(SIZES["9B"], mtp_layers=1))
        metadata["qwen35.attention.recurrent_layers"] = given_flags
        assert from_metadata(metadata).recurrent == tuple(flags)


def test_odd_patterns_round_trip_and_name_every_block() -> None:
    """llama.cpp wants a flag for each block, MTP blocks among them."""
    config = small_config(mtp_layers=1)
    metadata = config_to_metadata(config)
    assert metadata["qwen35.attention.recurrent_layers"] == [True, False, True, True, False]
    assert from_metadata(metadata, config) == config


def test_counts_may_be_given_for_each_layer() -> None:
    """Ollama's files have 0 key/value heads where a layer has no attention."""
    config = SIZES["9B"]
    metadata = real_metadata(config) | {
        "qwen35.attention.head_count_kv": [0, 0, 0, 4] * 8,
        "qwen35.attention.head_count": [16] * 32,
        "qwen35.feed_forward_length": [12288] * 32,
    }
    assert from_metadata(metadata, config) == config
    written = hf.config_from_metadata(metadata, config.vocab, config.tied)
    assert replace(from_config(written, config), name="9B") == config


@pytest.mark.parametrize(
    "counts",
    [[], [4] * 31, [0] * 32, [0, 0, 0, 4] * 7 + [0, 0, 0, 2], ["4"] * 32, [True] * 32, [4.0] * 32, [-4] * 32],
    ids=["none", "too few", "all zero", "unequal", "text", "flags", "fractions", "negative"],
)
def test_counts_for_each_layer_are_checked(counts: list[Any]) -> None:
    metadata = real_metadata(SIZES["9B"]) | {"qwen35.attention.head_count_kv": counts}
    with pytest.raises(BadFile, match=r"model\.gguf: qwen35\.attention\.head_count_kv is .*, expected"):
        from_metadata(metadata)


# -- tensors against the configuration --------------------------------------------------------------------------------


def checkpoint_of(config: Config) -> Checkpoint:
    return Checkpoint(Path("model.gguf"), config_to_metadata(config), random_tensors(config))


def test_a_whole_model_is_accepted_with_what_others_keep_beside_it() -> None:
    config = small_config(mtp_layers=1)
    checkpoint = checkpoint_of(config)
    some = checkpoint.tensors["output_norm.weight"]
    for name in ("v.patch_embd.weight", "mm.0.weight", "blk.4.nextn.embed_tokens.weight"):
        checkpoint.tensors[name] = some
    assert read_config(checkpoint) == config


@pytest.mark.parametrize("name", list(expected_shapes(small_config(mtp_layers=1, tied=False))))
def test_every_tensor_is_needed_in_its_shape(name: str) -> None:
    checkpoint = checkpoint_of(small_config(mtp_layers=1, tied=False))
    tensor = checkpoint.tensors[name]
    checkpoint.tensors[name] = replace(tensor, shape=(*tensor.shape[:-1], tensor.shape[-1] + 1))
    with pytest.raises(BadFile, match=r"^model\.gguf: tensor .* has shape \[.*\], expected \["):
        read_config(checkpoint)
    del checkpoint.tensors[name]
    if name == "output.weight":
        assert read_config(checkpoint).tied  # a model without a head of its own uses the embedding
    else:
        with pytest.raises(BadFile, match=f"^model.gguf: tensor {name} is missing"):
            read_config(checkpoint)


@pytest.mark.parametrize("name", ["blk.1.attn_q.bias", "blk.0.attn_q.weight", "blk.3.ffn_gate_inp.weight"])
def test_a_layer_with_a_tensor_too_many_is_refused(name: str) -> None:
    checkpoint = checkpoint_of(small_config())
    checkpoint.tensors[name] = checkpoint.tensors["output_norm.weight"]
    with pytest.raises(BadFile, match=name):
        read_config(checkpoint)


def test_reading_changes_nothing() -> None:
    config = real_config(SIZES["4B"])
    before = copy.deepcopy(config)
    from_config(config)
    assert config == before
