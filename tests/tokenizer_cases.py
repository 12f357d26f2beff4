"""A vocabulary small enough to spell out."""

from __future__ import annotations

from warpsmith.model.tokenizer import byte_tokenizer, to_gguf_metadata


def small_metadata() -> dict:
    """Bytes, two merged tokens, then added tokens and padding: 270 in all."""
    plain = to_gguf_metadata(byte_tokenizer(266))
    tokens, types = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"]
    return plain | {
        "tokenizer.ggml.tokens": [*tokens[:256], "ab", "abc", *tokens[257:], "[PAD267]", "[PAD268]", "[PAD269]"],
        "tokenizer.ggml.token_type": [*types[:256], 1, 1, *types[257:], 5, 5, 5],
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.padding_token_id": 258,
    }
