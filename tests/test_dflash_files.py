"""Files of DFlash drafts: every format gives the same draft, and what cannot be one is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from random_drafts import (
    FORMATS,
    FULL,
    SLIDING,
    draft_config,
    draft_in_memory,
    gguf_metadata,
    gguf_name,
    random_weights,
    write_draft,
    write_holes,
)
from random_models import SMALL, random_tensors
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.checkpoint.dflash import DFlashConfig, is_draft, open_draft
from warpsmith.checkpoint.gguf_writer import write_gguf
from warpsmith.draft.dflash import DFlash
from warpsmith.errors import BadFile, BadRequest
from warpsmith.model.config import SIZES
from warpsmith.model.dflash import check_fits

BACKEND = ReferenceBackend(SMALL, random_tensors(SMALL))


@pytest.mark.parametrize("config", [FULL, SLIDING], ids=["full", "sliding"])
@pytest.mark.parametrize("format", FORMATS)
def test_all_formats_hold_the_same_draft(format: str, config: DFlashConfig, tmp_path: Path) -> None:
    weights = random_weights(config)
    path = write_draft(tmp_path / "draft", format, config, weights)
    assert is_draft(path)
    opened = open_draft(path)
    known = {} if format == "safetensors" else {"vocab": None, "target_depth": None}
    expected = dataclasses.replace(config, source=opened.config.source, **known)
    assert opened.config == expected
    assert opened.config.source.startswith(str(path))
    assert opened.tensors.keys() == weights.keys()
    for name, values in weights.items():
        assert np.array_equal(opened.tensors[name].float32(), values), name


def test_a_draft_is_found_by_its_directory_or_its_file(tmp_path: Path) -> None:
    weights = random_weights(FULL)
    directory = write_draft(tmp_path / "a", "safetensors", FULL, weights)
    assert open_draft(directory / "model.safetensors").config.layers == 2
    (tmp_path / "b").mkdir()
    write_draft(tmp_path / "b" / "draft", "lucebox", FULL, weights)
    assert open_draft(tmp_path / "b").config.layers == 2
    with pytest.raises(BadFile, match="no config"):
        open_draft(tmp_path)
    assert not is_draft(tmp_path)


def test_names_that_older_converters_gave_are_understood(tmp_path: Path) -> None:
    weights = random_weights(FULL)
    names = {
        "fc": "dflash_fc",
        "hidden_norm": "dflash_hidden_norm",
        "norm": "output_norm",
        "post_attention_layernorm": "post_attention_norm",
    }
    tensors: dict[str, Any] = {}
    for name, values in weights.items():
        stem = name.removesuffix(".weight")
        stored = (
            names[stem] + ".weight"
            if stem in names
            else gguf_name(name, "lucebox").replace("ffn_norm", "post_attention_norm")
        )
        tensors[stored] = ("F32", values)
    write_gguf(tmp_path / "old.gguf", gguf_metadata(FULL, "lucebox"), tensors)
    assert np.array_equal(open_draft(tmp_path / "old.gguf").tensors["fc.weight"].float32(), weights["fc.weight"])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("said", [None, True, False])
def test_causal_is_what_the_file_says_or_sliding_layers_only(format: str, said: bool | None, tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", format, SLIDING, random_weights(SLIDING), said_causal=said)
    assert open_draft(path).config.causal == ((True, False, True) if said is None else (said,) * 3)


def test_causal_may_stand_in_the_inner_configuration(tmp_path: Path) -> None:
    inner = {"mask_token_id": 1, "target_layer_ids": [0, 2, 3], "causal": False}
    path = write_draft(
        tmp_path / "d", "safetensors", SLIDING, random_weights(SLIDING), metadata={"dflash_config": inner}
    )
    assert open_draft(path).config.causal == (False,) * 3


@pytest.mark.parametrize(("pattern", "slides"), [(0, "111"), (1, "000"), (2, "101"), (3, "110"), (None, "111")])
def test_patterns_of_sliding_layers_may_be_numbers(pattern: int | None, slides: str, tmp_path: Path) -> None:
    changes = {"dflash.attention.sliding_window_pattern": pattern}
    path = write_draft(tmp_path / "d", "llama.cpp", SLIDING, random_weights(SLIDING), metadata=changes)
    assert "".join("01"[w is not None] for w in open_draft(path).config.windows) == slides


def test_rope_base_is_found_where_new_configurations_keep_it(tmp_path: Path) -> None:
    changes = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    path = write_draft(tmp_path / "d", "safetensors", FULL, random_weights(FULL), metadata=changes)
    assert open_draft(path).config.rope_theta == 5e6


@pytest.mark.parametrize(
    ("format", "changes", "words"),
    [
        ("safetensors", {"rope_theta": None}, "rope_theta is missing"),
        ("lucebox", {"qwen35-dflash-draft.rope.freq_base": None}, "rope.freq_base is missing"),
        ("llama.cpp", {"dflash.rope.freq_base": None}, "rope.freq_base is missing"),
        ("llama.cpp", {"dflash.rope.freq_base": 0.0}, "freq_base is 0.0"),
        ("safetensors", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("safetensors", {"block_size": 1}, "block_size is 1"),
        ("safetensors", {"block_size": True}, "block_size"),
        ("safetensors", {"layer_types": ["full_attention"]}, "layer_types"),
        ("safetensors", {"layer_types": ["full_attention", "mamba"]}, "mamba"),
        ("safetensors", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        ("safetensors", {"dflash_config": None}, "dflash_config is missing"),
        ("safetensors", {"dflash_config": {"mask_token_id": 1}}, "target_layer_ids is missing"),
        ("safetensors", {"dflash_config": {"target_layer_ids": [0, 2, 3]}}, "dflash_config.mask_token_id is missing"),
        ("safetensors", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, -2, 3]}}, "target_layer_ids"),
        ("safetensors", {"num_hidden_layers": 3, "layer_types": None}, "lacks the tensor layers.2"),
        ("safetensors", {"hidden_size": 128}, "shape"),
        ("safetensors", {"num_attention_heads": 3}, "do not divide"),
        ("lucebox", {"qwen35-dflash-draft.block_count": 3}, "lacks the tensor"),
        ("lucebox", {"qwen35-dflash-draft.dflash.mask_token_id": None}, "mask_token_id is missing"),
        ("lucebox", {"qwen35-dflash-draft.dflash.target_layer_ids": [0, 1]}, "shape"),
        ("llama.cpp", {"dflash.target_layers": [0, 2, 3]}, "layers from 1"),
        ("llama.cpp", {"tokenizer.ggml.mask_token_id": None}, "mask_token_id is missing"),
        ("llama.cpp", {"general.architecture": "llama"}, "no DFlash draft"),
    ],
)
def test_a_file_that_cannot_be_a_draft_is_refused(
    format: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_draft(tmp_path / "draft", format, FULL, random_weights(FULL), metadata=changes)
    with pytest.raises(BadFile, match=words) as caught:
        open_draft(path)
    assert caught.value.fix
    assert caught.value.problem.count(". ") == 0, "one sentence"


def test_a_head_that_does_not_say_of_how_many_tokens_is_refused(tmp_path: Path) -> None:
    config = draft_config(SMALL, own_head=True)
    written = write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    assert open_draft(written).config.own_head
    nothing_said = write_draft(tmp_path / "draft", "llama.cpp", config, random_weights(config))
    with pytest.raises(BadFile, match="does not say of how many tokens"):
        open_draft(nothing_said)


@pytest.mark.parametrize("extra", ["layers.0.attention_conv.base_kernel", "d2t", "dspark.markov.w1.weight"])
def test_other_networks_are_not_mistaken_for_plain_dflash(extra: str, tmp_path: Path) -> None:
    weights = random_weights(FULL) | {extra: np.ones((2, 2), np.float32)}
    path = write_draft(tmp_path / "draft", "safetensors", FULL, weights)
    with pytest.raises(BadFile, match="plain DFlash"):
        open_draft(path)
    copy = random_weights(FULL) | {"embed_tokens.weight": np.ones((SMALL.vocab, SMALL.hidden), np.float32)}
    assert open_draft(write_draft(tmp_path / "own", "safetensors", FULL, copy)).config.layers == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 128}, "hidden size of 128, and the model of 64"),
        ({"vocab": 999}, "vocabulary of 999"),
        ({"vocab": None, "mask_token": SMALL.vocab}, "outside the model's vocabulary"),
        ({"target_depth": 8}, "8 layers"),
        ({"vocab": None, "speaks": SMALL.vocab + 1}, f"speaks {SMALL.vocab + 1} tokens, and the model {SMALL.vocab}"),
        ({"target_depth": None, "target_layers": (0, 2, 4)}, "reads layer 4, and the model's last is 3"),
    ],
)
def test_a_draft_of_another_model_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    config = draft_config(SMALL, **changes)
    with pytest.raises(BadRequest, match=words) as caught:
        check_fits(config, SMALL)
    assert caught.value.problem.count(".") == 1
    with pytest.raises(BadRequest, match=words):
        DFlash(draft_in_memory(config), BACKEND)
    check_fits(FULL, SMALL)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 128}, "hidden size of 128, and the model of 64"),
        ({"vocab": 999}, "vocabulary of 999 tokens, and the model of"),
        ({"target_layers": (0, 2, 7), "target_depth": None}, "reads layer 7, and the model's last is 3"),
    ],
)
def test_so_are_files_of_every_format(format: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = draft_config(SMALL, **changes)
    architecture = {"lucebox": "qwen35-dflash-draft", "llama.cpp": "dflash"}.get(format)
    said = {f"{architecture}.vocab_size": config.vocab} if architecture else None
    path = write_draft(tmp_path / "draft", format, config, random_weights(config), metadata=said)
    with pytest.raises(BadRequest, match=words) as caught:
        DFlash(open_draft(path), BACKEND)
    sentence = caught.value.problem.replace(str(path), "file")
    assert sentence.count(". ") == 0, "one sentence"
    assert sentence.endswith(".")


@pytest.mark.parametrize("tokens", [0, 63, 1 << 40, "many"])
def test_an_absurd_number_of_spoken_tokens_is_named(tokens: int | str, tmp_path: Path) -> None:
    said = {"dflash.draft_vocab_size": tokens}
    path = write_draft(tmp_path / "draft", "llama.cpp", FULL, random_weights(FULL), metadata=said)
    with pytest.raises(BadFile, match="draft_vocab_size"):
        open_draft(path)


@pytest.mark.parametrize("format", FORMATS)
def test_drafts_of_the_27b_shape_open_in_every_format(format: str, tmp_path: Path) -> None:
    """The released drafts' shape, every layer of it, in a file of holes: opening reads no weights."""
    target, layers = SIZES["27B"], 5
    config = draft_config(
        target, layers=layers, ffn=17408, heads=32, kv_heads=8, head_dim=128, rope_theta=1e7, block=16,
        mask_token=248_070, target_layers=(1, 16, 31, 46, 61), windows=(2048,) * 4 + (None,),
        causal=(True,) * 4 + (False,),
    )  # fmt: skip
    path = write_holes(tmp_path / "draft", format, config)
    opened = open_draft(path)
    check_fits(opened.config, target)
    assert opened.config.target_layers == (1, 16, 31, 46, 61)
    assert opened.config.windows == config.windows
    assert opened.tensors["layers.4.self_attn.k_norm.weight"].float32().shape == (128,)
    with pytest.raises(BadRequest, match="hidden size of 5120, and the model of 64"):
        check_fits(opened.config, SMALL)
