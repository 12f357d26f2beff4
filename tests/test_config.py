"""Configurations: the family's sizes, from config.json and from GGUF metadata, and what is refused."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_directories import real_config
from random_models import random_tensors, small_config
from warpsmith.checkpoint import hf
from warpsmith.checkpoint.canonical import Checkpoint
from warpsmith.errors import BadFile
from warpsmith.model.config import SIZES, Config, config_from_metadata, config_to_metadata, every_fourth_is_attention
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


def real_metadata(config: Config) -> dict[str, Any]:
    """What llama.cpp's converter writes, spelled out here and not taken from our writer."""
    return {
        "general.architecture": "qwen35",
        "general.name": config.name,
        "qwen35.block_count": config.layers + config.mtp_layers,
        "qwen35.context_length": 262144,
        "qwen35.embedding_length": config.hidden,
        "qwen35.feed_forward_length": config.ffn,
        "qwen35.attention.head_count": config.heads,
        "qwen35.attention.head_count_kv": config.kv_heads,
        "qwen35.attention.key_length": 256,
        "qwen35.attention.value_length": 256,
        "qwen35.attention.layer_norm_rms_epsilon": 9.999999974752427e-07,  # 1e-6 as float32 has it
        "qwen35.rope.dimension_sections": [11, 11, 10, 0],
        "qwen35.rope.dimension_count": 64,
        "qwen35.rope.freq_base": 10000000.0,
        "qwen35.ssm.conv_kernel": 4,
        "qwen35.ssm.inner_size": config.value_heads * 128,
        "qwen35.ssm.state_size": 128,
        "qwen35.ssm.time_step_rank": config.value_heads,
        "qwen35.ssm.group_count": 16,
        "qwen35.full_attention_interval": 4,
        **({"qwen35.nextn_predict_layers": config.mtp_layers} if config.mtp_layers else {}),
    }


def from_metadata(metadata: dict[str, Any], config: Config = SIZES["9B"]) -> Config:
    return config_from_metadata(metadata, config.vocab, config.tied, "model.gguf")


def from_config(config_json: dict[str, Any], config: Config = SIZES["9B"]) -> Config:
    return from_metadata(hf.metadata_from_config(config_json, "config.json"), config)


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


# -- what is refused --------------------------------------------------------------------------------------------------

OPTIONAL_METADATA = {
    "general.name",
    "qwen35.rope.dimension_sections",
    "qwen35.full_attention_interval",
    "qwen35.attention.value_length",
}


@pytest.mark.parametrize("key", sorted(real_metadata(SIZES["9B"]).keys() - OPTIONAL_METADATA))
def test_missing_metadata_is_named(key: str) -> None:
    metadata = real_metadata(SIZES["9B"])
    del metadata[key]
    with pytest.raises(BadFile) as error:
        from_metadata(metadata)
    assert error.value.problem.startswith(f"model.gguf: {key} is ")


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "rope_parameters.rope_theta",
    ],
)
def test_missing_fields_are_named(key: str) -> None:
    config = real_config(SIZES["9B"])
    *path, last = key.split(".")
    where = config["text_config"]
    for part in path:
        where = where[part]
    for value in (None, ...):
        if value is ...:
            del where[last]
        else:
            where[last] = value
        with pytest.raises(BadFile) as error:
            from_config(config)
        assert error.value.problem == f"config.json: {last} is missing."


COUNTS = [key for key, value in real_config(SIZES["9B"])["text_config"].items() if type(value) is int]


@pytest.mark.parametrize("key", sorted({*COUNTS} - {"eos_token_id", "mtp_num_hidden_layers", "vocab_size"}))
@pytest.mark.parametrize("value", [0, -1, 1 << 62, 10**400, True, "16", 16.0, [16], {"n": 16}, float("nan")])
def test_absurd_counts_are_named(key: str, value: Any) -> None:
    config = real_config(SIZES["9B"])
    config["text_config"][key] = value
    with pytest.raises(BadFile, match=rf"^config\.json: {key} is .*, expected a whole number"):
        from_config(config)


@pytest.mark.parametrize("key", ["rope_theta", "partial_rotary_factor", "rms_norm_eps"])
@pytest.mark.parametrize("value", [0, -0.25, 1e300, 10**400, True, "0.25", [0.25], float("nan"), float("inf")])
def test_absurd_numbers_are_named(key: str, value: Any) -> None:
    config = real_config(SIZES["9B"])
    text = config["text_config"]
    (text if key == "rms_norm_eps" else text["rope_parameters"])[key] = value
    with pytest.raises(BadFile, match=rf"^config\.json: {key} is .*, expected a number"):
        from_config(config)


def test_values_too_deep_to_print_are_refused_all_the_same() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    config, metadata = real_config(SIZES["9B"]), real_metadata(SIZES["9B"])
    for key in ("hidden_size", "rope_parameters", "model_type", "hidden_act", "layer_types"):
        changed = config | {"text_config": config["text_config"] | {key: deep}}
        with pytest.raises(BadFile, match=rf"^config\.json: {key} "):
            from_config(changed)
    for key in ("general.architecture", "qwen35.block_count", "qwen35.attention.recurrent_layers"):
        with pytest.raises(BadFile, match=f"^model.gguf: {key} "):
            from_metadata(metadata | {key: deep})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"text_config": []}, "text_config"),
        ({"text_config": "qwen"}, "text_config"),
        ({"rope_parameters": 7}, "rope_parameters"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling"),
        ({"layer_types": "linear_attention"}, "layer_types"),
        ({"layer_types": ["linear_attention"] * 31}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "layer_types"),
        ({"layer_types": [["linear_attention"]] * 32}, "layer_types"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"num_key_value_heads": 3}, "head_count_kv"),
        ({"head_dim": 4}, "rope.dimension_count"),
    ],
)
def test_settings_that_make_no_sense_are_named(changes: dict[str, Any], field: str) -> None:
    config = real_config(SIZES["9B"])
    (config if "text_config" in changes else config["text_config"]).update(changes)
    with pytest.raises(BadFile, match=field):
        from_config(config)


@pytest.mark.parametrize("where", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", 4, ["yarn"]])
def test_scaled_rope_is_refused(where: str, key: str, kind: Any) -> None:
    config = real_config(SIZES["9B"])
    config["text_config"].setdefault(where, {})[key] = kind
    with pytest.raises(BadFile, match=f"{key} asks for .* RoPE"):
        from_config(config)


def test_scaled_rope_is_refused_in_metadata() -> None:
    metadata = real_metadata(SIZES["9B"])
    assert from_metadata(metadata | {"qwen35.rope.scaling.type": "none"}) == SIZES["9B"]
    with pytest.raises(BadFile, match=r"qwen35\.rope\.scaling\.type"):
        from_metadata(metadata | {"qwen35.rope.scaling.type": "yarn"})


def test_older_ways_to_spell_rope() -> None:
    config = real_config(SIZES["9B"])
    text = config["text_config"]
    del text["rope_parameters"]
    text |= {"rope_theta": 5e6, "rope_scaling": {"type": "mrope", "mrope_section": [11, 11, 10]}}
    assert from_config(config).rope_theta == 5e6
    assert from_config(config).rotary_dim == 64
    text |= {"rope_scaling": None, "partial_rotary_factor": 0.5}
    assert from_config(config).rotary_dim == 128


@pytest.mark.parametrize(
    "model_type", ["qwen3_5_moe", "qwen3_5_moe_text", "llama", "qwen3_next", None, 35, ["qwen3_5"]]
)
def test_other_model_types_are_refused(model_type: Any) -> None:
    config = real_config(SIZES["9B"])
    config["model_type"] = config["text_config"]["model_type"] = model_type
    with pytest.raises(BadFile, match=r"^config\.json: model_type is .* only dense Qwen3\.5") as error:
        from_config(config)
    one_sentence(error.value)


@pytest.mark.parametrize("architecture", ["qwen35moe", "llama", "qwen3next", "x" * 10_000, None, 3, ["qwen35"]])
def test_other_architectures_are_refused(architecture: Any) -> None:
    with pytest.raises(BadFile, match=r"^model\.gguf: general\.architecture is .* only dense Qwen3\.5") as error:
        from_metadata(real_metadata(SIZES["9B"]) | {"general.architecture": architecture})
    one_sentence(error.value)


def one_sentence(error: BadFile, *either: str) -> None:
    assert "\n" not in error.problem
    assert error.problem.endswith(".")
    assert len(error.problem) < 300
    assert any(text in error.problem for text in either or [""])


# -- anything at all --------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS | st.sampled_from([2**31, 2**63, 10**300, "linear_attention", "default", 1e-320]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
TEXT_FIELDS = sorted(real_config(SIZES["9B"])["text_config"])
ROPE_FIELDS = sorted(real_config(SIZES["9B"])["text_config"]["rope_parameters"])


def check_valid(config: Config) -> None:
    assert config.layers == len(config.recurrent) >= 1
    assert config.heads % config.kv_heads == 0
    assert config.value_heads % config.key_heads == 0
    assert config.rotary_dim % 2 == 0
    assert 0 < config.rotary_dim <= config.head_dim
    assert 0 < config.eps < math.inf
    assert 0 < config.rope_theta < math.inf
    assert min(shape for shapes in expected_shapes(replace(config, vocab=8)).values() for shape in shapes) >= 1


@settings(max_examples=400, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(TEXT_FIELDS), JSON, min_size=1, max_size=3))
def test_any_json_in_a_field_gives_an_error_or_a_configuration(changes: dict[str, Any]) -> None:
    config = real_config(SIZES["0.8B"])
    config["text_config"] |= changes
    try:
        check_valid(from_config(config))
    except BadFile as error:
        one_sentence(error, "config.json: ", "model.gguf: qwen35.")


@settings(max_examples=150, deadline=None)
@given(key=st.sampled_from([*ROPE_FIELDS, "type", "factor"]), value=JSON, old=st.booleans())
def test_any_json_in_a_rope_field_gives_an_error_or_a_configuration(key: str, value: Any, old: bool) -> None:
    config = real_config(SIZES["0.8B"])
    config["text_config"].setdefault("rope_scaling" if old else "rope_parameters", {})[key] = value
    try:
        check_valid(from_config(config))
    except BadFile as error:
        one_sentence(error, key, "qwen35.rope")


LISTS = st.lists(SCALARS, max_size=40)  # GGUF arrays hold scalars of one type; here of any


@settings(max_examples=400, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(
            [
                *real_metadata(replace(SIZES["9B"], mtp_layers=1)),
                "qwen35.attention.recurrent_layers",
                "qwen35.rope.scaling.type",
            ]
        ),
        SCALARS | LISTS,
        min_size=1,
        max_size=3,
    )
)
def test_any_value_in_metadata_gives_an_error_or_a_configuration(changes: dict[str, Any]) -> None:
    try:
        check_valid(from_metadata(real_metadata(SIZES["0.8B"]) | changes))
    except BadFile as error:
        one_sentence(error, "model.gguf: qwen35.", "general.architecture")


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
