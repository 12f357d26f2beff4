"""Tokenizer: the real vocabulary against an independent BPE, and every source against every other."""

from __future__ import annotations

import json
import unicodedata
from itertools import pairwise

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

import qwen_vocab
from tokenizer_cases import small_metadata
from warpsmith.errors import BadFile, BadRequest
from warpsmith.model.tokenizer import Tokenizer, byte_tokenizer, to_gguf_metadata

# Characters that Unicode had when Python's tables were made: newer ones are letters to some libraries only.
ASSIGNED = st.characters(exclude_categories=["Cs", "Cn"])
TRICKY = st.sampled_from(
    ["'s", "'LL", " ", "  ", "\n", "\r\n", "\t", "12", "é", "e\u0301", "नमस्ते", "👩‍👩‍👧‍👦", "<think>", "人力资源"]
)
TEXT = st.lists(st.text(ASSIGNED, max_size=8) | TRICKY | st.text("abc XYZ019.,_'\n", max_size=12), max_size=8).map(
    "".join
)

SAMPLES = [
    "",
    "Hello, world! It's 2026 and we've 12345 reasons.",
    "人力资源和社会保障部发布了通知。",
    "Привет, мир! Ёлки-палки.",
    "नमस्ते दुनिया, कैसे हो?",
    "สวัสดีชาวโลก ภาษาไทยไม่มีช่องว่าง",
    "مرحبا بالعالم ١٢٣",
    "こんにちは世界、한국어도 됩니다.",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumbs",
    "cafe\u0301 vs café, Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A͔̬L̰͖G̱̺O̩̱",
    "def f(x):\n    return {\n\t'a': x ** 2,  # comment\n    }\r\n",
    "   leading, trailing   \n\n\n   and   inner  ",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\ufeffbom\0nul",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think>\n\n<tool_call>",
]


@pytest.fixture(scope="module")
def qwen():
    return qwen_vocab.tokenizer()


@pytest.fixture(scope="module")
def qwen_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen")
    qwen_vocab.write_files(directory)
    return directory


@pytest.fixture(scope="module")
def python_bpe():
    """A second implementation: regex, then merge the pair that comes first in the merge list until none is left."""
    order = {pair: i for i, pair in enumerate(qwen_vocab.merges())}
    ids, split = qwen_vocab.ranks(), regex.compile(qwen_vocab.REGEX)

    def encode(text: str) -> list[int]:
        out = []
        for word in split.findall(unicodedata.normalize("NFC", text)):
            parts = [bytes([byte]) for byte in word.encode()]
            while pairs := [(order[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in order]:
                _, i = min(pairs)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            out += [ids[part] for part in parts]
        return out

    return encode


def streamed(tokenizer: Tokenizer, ids: list[int], **options) -> list[str]:
    stream = tokenizer.stream(**options)
    return [*(stream.push(i) for i in ids), stream.finish()]


# The real vocabulary


def test_the_rebuilt_vocabulary_has_the_published_counts(qwen):
    assert (len(qwen_vocab.ranks()), len(qwen_vocab.merges()), qwen.vocab_size) == (248044, 247556, 248077)


def test_ids_that_are_published(qwen):
    # A word the ranks list as one token but no merge reaches: byte-level BPE and a rank lookup differ here.
    assert qwen.encode("人力资源和社会保障") == [108583, 96852, 102637]
    published = {
        "<|endoftext|>": 248044,
        "<|im_start|>": 248045,
        "<|im_end|>": 248046,
        "<tool_call>": 248058,
        "</think>": 248069,
        "<|audio_pad|>": 248076,
    }
    for text, id in published.items():
        assert qwen.encode(text) == [id] == [qwen.token_id(text)]
        assert qwen.token_bytes(id) == text.encode()


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_equal_the_second_implementation_and_round_trip(qwen, python_bpe, text):
    assert qwen.encode(text, special=False) == python_bpe(text)
    for special in (True, False):
        assert qwen.decode(qwen.encode(text, special)) == unicodedata.normalize("NFC", text)


@settings(max_examples=150, deadline=None)
@given(TEXT)
def test_random_text_equals_the_second_implementation(qwen, python_bpe, text):
    ids = qwen.encode(text, special=False)
    assert ids == python_bpe(text)
    assert "".join(streamed(qwen, ids)) == qwen.decode(ids) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("in 2026", ["in", " ", "2", "0", "2", "6"]),  # digits one by one
        ("a   word", ["a", "  ", " word"]),  # the last space of a run goes with the word
        ("हिन्दी है", ["हिन्दी", " है"]),  # combining marks stay with their letters
        ("I'Ve", ["I", "'Ve"]),
        ("x\n\n y", ["x", "\n\n", " y"]),
    ],
)
def test_split_rules(qwen, text, pieces):
    alone = [i for piece in pieces for i in qwen.encode(piece)]
    assert qwen.encode(text) == alone


def test_qwen2_splits_marks_from_letters():
    def split(pre):
        tokens = byte_tokenizer(266)
        metadata = to_gguf_metadata(tokens) | {"tokenizer.ggml.pre": pre}
        return [piece for piece, _ in Tokenizer.from_gguf(metadata)._text_only.pre_tokenizer.pre_tokenize_str("हिन्दी")]

    assert len(split("qwen35")) == 1 < len(split("qwen2"))


def test_decomposed_text_is_composed_first(qwen):
    assert qwen.encode("cafe\u0301") == qwen.encode("café") != qwen.encode("cafe")


def test_text_only_never_yields_an_added_token(qwen):
    text = "".join(qwen_vocab.ADDED)
    assert max(qwen.encode(text, special=False)) < qwen_vocab.FIRST_ADDED
    assert qwen.encode(text) == list(range(qwen_vocab.FIRST_ADDED, qwen.vocab_size))


def test_skip_special_drops_control_tokens_and_keeps_tags(qwen):
    ids = qwen.encode("<|im_start|>a<think>b</think><tool_call>c</tool_call><tool_response>d</tool_response><|im_end|>")
    kept = "a<think>b</think><tool_call>c</tool_call><tool_response>d</tool_response>"
    assert qwen.decode(ids, skip_special=True) == kept
    assert "".join(streamed(qwen, ids, skip_special=True)) == kept
    assert qwen.is_special(248045)
    assert not qwen.is_special(248068)


def test_stop_set(qwen):
    names = {"<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"}
    assert {qwen.decode([i]) for i in qwen.eos_ids} == names
    assert qwen.eos_id == 248046


def test_every_token_has_the_bytes_its_rank_lists(qwen):
    for token, id in qwen_vocab.ranks().items():
        assert qwen.token_bytes(id) == token


def test_long_runs_do_not_overflow(qwen):
    for text in (" " * 200_000 + "a", "a" * 200_000, "\n" * 100_000, "\u0301" * 100_000):
        assert qwen.decode(qwen.encode(text)) == text


# Streaming


@pytest.mark.parametrize("text", SAMPLES)
def test_streaming_emits_each_character_with_its_last_byte(qwen, text):
    ids = qwen.encode(text)
    parts = streamed(qwen, ids)
    for n in range(len(ids)):
        complete = b"".join(map(qwen.token_bytes, ids[: n + 1])).decode("utf-8", "ignore")
        assert "".join(parts[: n + 1]) == complete
    assert parts[-1] == ""


@pytest.mark.parametrize("text", SAMPLES)
def test_streaming_split_at_every_byte(text):
    tokenizer = byte_tokenizer(300)
    data = text.encode()
    for cut in range(len(data) + 1):
        parts = streamed(tokenizer, list(data[:cut]))
        assert "".join(parts[:-1]) == data[:cut].decode("utf-8", "ignore")
        assert "".join(parts) == data[:cut].decode("utf-8", "replace") == tokenizer.decode(data[:cut])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_streaming_broken_bytes_equals_decoding_at_once(data):
    tokenizer = byte_tokenizer(300)
    assert "".join(streamed(tokenizer, list(data))) == tokenizer.decode(data) == data.decode("utf-8", "replace")


def test_all_bytes():
    tokenizer = byte_tokenizer(266)
    for byte in range(256):
        assert tokenizer.token_bytes(byte) == bytes([byte])
    everything = "".join(map(chr, range(256)))
    assert bytes(tokenizer.encode(everything)) == everything.encode()


# Sources


def same(a: Tokenizer, b: Tokenizer) -> None:
    assert to_gguf_metadata(a) == to_gguf_metadata(b)
    assert (a.eos_ids, a.special_ids, a.vocab_size) == (b.eos_ids, b.special_ids, b.vocab_size)
    for text in SAMPLES:
        assert a.encode(text) == b.encode(text)


def test_json_with_tokens_in_the_config_file(qwen, qwen_dir):
    same(qwen, Tokenizer.from_tokenizer_json(qwen_dir))
    without = json.loads((qwen_dir / "tokenizer.json").read_text())["added_tokens"]
    assert max(token["id"] for token in without) == 248069  # so the rest did come from tokenizer_config.json


def test_gguf_round_trip_with_padding(qwen):
    metadata = to_gguf_metadata(qwen, qwen_vocab.ROWS)
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert len(tokens) == len(types) == len(set(tokens)) == qwen_vocab.ROWS
    assert (tokens[-1], types[-1], types[248068], types[248063]) == ("[PAD248319]", 5, 4, 3)
    assert metadata["tokenizer.ggml.eos_token_id"] == 248046
    assert metadata["tokenizer.ggml.padding_token_id"] == 248044
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    metadata["tokenizer.ggml.token_type"] = np.array(types, np.int32)
    metadata["tokenizer.ggml.eos_token_id"] = np.uint32(248046)

    read = Tokenizer.from_gguf(metadata)
    assert (read.vocab_size, read.padded_size) == (248077, qwen_vocab.ROWS)
    assert read.token_bytes(248319) == b""
    assert read.encode("[PAD248319]") == qwen.encode("[PAD248319]", special=False)
    assert to_gguf_metadata(read) == to_gguf_metadata(qwen, qwen_vocab.ROWS)


def test_saved_json_is_what_the_tokenizers_library_reads(qwen, tmp_path):
    from tokenizers import Tokenizer as Library

    qwen.to_json_files(tmp_path)
    theirs = Library.from_file(str(tmp_path / "tokenizer.json"))
    for text in SAMPLES:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == qwen.encode(text)
        assert theirs.decode(ids, skip_special_tokens=True) == qwen.decode(ids, skip_special=True)


def test_saved_json_is_what_transformers_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.from_gguf(small_metadata())
    ours.to_json_files(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
    assert (theirs.eos_token_id, theirs.pad_token_id) == (ours.eos_id, ours.pad_id)


def test_added_tokens_need_not_follow_the_vocabulary(tmp_path):
    metadata = small_metadata()
    order = [*range(258, 266), *range(258), *range(266, 270)]  # put the added tokens first
    for field in ("tokens", "token_type"):
        metadata[f"tokenizer.ggml.{field}"] = [metadata[f"tokenizer.ggml.{field}"][i] for i in order]
    metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.padding_token_id"] = 2, 269
    first = Tokenizer.from_gguf(metadata)
    assert first.encode("<|im_end|>ab") == [2, 8 + 256]
    first.to_json_files(tmp_path)
    again = Tokenizer.from_tokenizer_json(tmp_path)
    assert again.encode("<|im_end|>ab") == [2, 8 + 256]
    from tokenizers import Tokenizer as Library

    assert Library.from_file(str(tmp_path / "tokenizer.json")).encode("<|im_end|>ab").ids == [2, 8 + 256]


def test_generation_config_adds_stop_ids(tmp_path):
    byte_tokenizer(300).to_json_files(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [10, 257]}')
    assert Tokenizer.from_tokenizer_json(tmp_path).eos_ids == {10, 257, 259}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -1}')
    with pytest.raises(BadFile, match=r"generation_config.json: eos_token_id"):
        Tokenizer.from_tokenizer_json(tmp_path)


def test_byte_tokenizer_round_trips(tmp_path):
    tokenizer = byte_tokenizer(512)
    assert tokenizer.padded_size == 512
    assert {tokenizer.decode([i]) for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}
    metadata = to_gguf_metadata(tokenizer)
    assert len(metadata["tokenizer.ggml.tokens"]) == 512
    same(tokenizer, Tokenizer.from_gguf(metadata))
    tokenizer.to_json_files(tmp_path)
    read = Tokenizer.from_tokenizer_json(tmp_path / "tokenizer.json")
    assert to_gguf_metadata(read, 512) == metadata
    with pytest.raises(BadRequest):
        byte_tokenizer(265)
    with pytest.raises(BadRequest):
        to_gguf_metadata(tokenizer, 265)


def test_requests_that_cannot_be_met():
    tokenizer = byte_tokenizer(300)
    with pytest.raises(BadRequest, match="Unicode"):
        tokenizer.encode("half \ud83d")
    with pytest.raises(BadRequest, match="-1"):
        tokenizer.decode([-1])
