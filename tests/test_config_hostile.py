"""Configurations that are refused: each by the name of its field, in one sentence."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from config_cases import from_config, from_metadata, real_metadata
from hf_directories import real_config
from warpsmith.errors import BadFile
from warpsmith.model.config import SIZES, Config
from warpsmith.model.weights import expected_shapes

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
