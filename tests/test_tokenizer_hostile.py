"""Tokenizers in hostile files: a tokenizer, or an error that names the field."""

from __future__ import annotations

import copy
import json

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_cases import small_metadata
from warpsmith.errors import BadFile
from warpsmith.model.tokenizer import Tokenizer


def edited(field: str, value) -> dict:
    metadata = small_metadata()
    key = f"tokenizer.ggml.{field}"
    metadata[key] = value(copy.copy(metadata[key])) if callable(value) else value
    return metadata


def at(index: int, value):
    return lambda items: [*items[:index], value, *items[index + 1 :]]


def test_the_small_vocabulary_is_sound():
    tokenizer = Tokenizer.from_gguf(small_metadata())
    assert tokenizer.encode("abcab") == [257, 256]


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model", "llama", "model"),
        ("model", None, "model"),
        ("pre", "gpt-4o", "pre"),
        ("pre", ["qwen35"], "pre"),
        ("tokens", None, "tokens is missing"),
        ("tokens", "abc", "tokens"),
        ("tokens", at(5, b"x"), "tokens"),
        ("tokens", at(5, "a"), "twice"),
        ("tokens", at(65, "zz"), "byte 65"),
        ("tokens", at(256, "a b"), "token 256"),
        ("tokens", at(256, "漢"), "token 256"),
        ("tokens", at(256, ""), "token 256"),
        ("tokens", at(260, "\udc80"), "token 260"),
        ("tokens", lambda items: items[:-1], "token_type has 270 entries for 269"),
        ("tokens", [], "token_type"),
        ("token_type", None, "token_type"),
        ("token_type", at(0, 1.0), "token_type"),
        ("token_type", at(0, 6), "type 6"),
        ("token_type", at(0, -1), "type -1"),
        ("token_type", at(65, 3), "byte 65"),
        ("merges", None, "merges"),
        ("merges", [["a", "b"]], "merges"),
        ("merges", ["a b", "ab"], "merge 1"),
        ("merges", ["a b", "a b c"], "merge 1"),
        ("merges", ["a xyz"], "merge 0"),
        ("merges", ["b a"], "merge 0"),
        ("merges", ["<|im_ end|>"], "merge 0"),
        ("eos_token_id", -1, "eos_token_id"),
        ("eos_token_id", 270, "eos_token_id"),
        ("eos_token_id", "2", "eos_token_id"),
        ("padding_token_id", True, "padding_token_id"),
        ("eot_token_id", 1 << 40, "eot_token_id"),
    ],
)
def test_hostile_gguf_metadata(field, value, named):
    metadata = edited(field, value)
    with pytest.raises(BadFile, match=regex.escape(named)) as caught:
        Tokenizer.from_gguf(metadata, source="model.gguf")
    assert str(caught.value).startswith("model.gguf: ")


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=4)
    | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from(sorted(small_metadata())), value=JUNK, index=st.none() | st.integers(0, 300))
def test_random_metadata_gives_a_tokenizer_or_bad_file(field, value, index):
    metadata = small_metadata()
    if index is not None and isinstance(metadata[field], list):
        metadata[field] = at(min(index, len(metadata[field]) - 1), value)(metadata[field])
    else:
        metadata[field] = value
    try:
        tokenizer = Tokenizer.from_gguf(metadata)
    except BadFile:
        return
    tokenizer.decode(tokenizer.encode("abc <|im_end|>"))


@pytest.fixture
def small_json(tmp_path):
    """A directory and a way to save it with one value of tokenizer.json changed."""
    Tokenizer.from_gguf(small_metadata()).to_json_files(tmp_path)
    file = tmp_path / "tokenizer.json"
    spec = json.loads(file.read_text())

    def save(path: list, value):
        changed = copy.deepcopy(spec)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        file.write_text(json.dumps(changed))
        return tmp_path

    return save


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (["model"], None, "model"),
        (["model", "type"], "Unigram", "model"),
        (["model", "byte_fallback"], True, "model.byte_fallback"),
        (["model", "vocab"], ["a"], "model.vocab"),
        (["model", "vocab", "abc"], 1.5, "model.vocab"),
        (["model", "vocab", "abc"], -1, "-1"),
        (["model", "vocab", "abc"], 1 << 40, "model.vocab"),
        (["model", "vocab", "abc"], 5, "id 5 twice"),
        (["model", "merges"], {}, "model.merges"),
        (["model", "merges", 0], ["a"], "merge 0"),
        (["model", "merges", 0], ["a", 1], "model.merges"),
        (["model", "merges", 0], [], "model.merges"),
        (["normalizer"], None, "normalizer"),
        (["pre_tokenizer"], {"type": "ByteLevel"}, "pre_tokenizer"),
        (["pre_tokenizer", "pretokenizers", 0, "pattern"], {"Regex": r"\w+"}, "pre_tokenizer"),
        (["added_tokens"], 7, "added_tokens"),
        (["added_tokens", 0], "x", "added_tokens"),
        (["added_tokens", 0, "id"], -3, "-3"),
        (["added_tokens", 0, "id"], 259, "added token 259"),
        (["added_tokens", 0, "lstrip"], True, "added token 258"),
        (["added_tokens", 0, "content"], "\ud800", "token 258"),
    ],
)
def test_hostile_tokenizer_json(small_json, path, value, named):
    if path == ["added_tokens", 0, "content"]:
        (small_json(["version"], "1.0") / "tokenizer_config.json").unlink()  # it names the token replaced here
    with pytest.raises(BadFile, match=regex.escape(named)):
        Tokenizer.from_tokenizer_json(small_json(path, value))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model": 1e999}'])
def test_broken_json(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        Tokenizer.from_tokenizer_json(tmp_path)


def test_missing_json(tmp_path):
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        Tokenizer.from_tokenizer_json(tmp_path)


def test_config_names_an_unknown_token(small_json):
    directory = small_json(["version"], "1.0")
    for value in ("<nope>", {"content": 3}, 5):
        (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": value}))
        with pytest.raises(BadFile, match="eos_token"):
            Tokenizer.from_tokenizer_json(directory)
