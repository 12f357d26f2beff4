"""What the kernels of a prompt take: which builds, how much memory."""

from __future__ import annotations

from warpsmith.backend.base import PREFILL_CHUNK
from warpsmith.backend.cuda.prefill.products import QUEUED
from warpsmith.backend.cuda.prefill.streams import ENDINGS, SLOTS, PromptStream
from warpsmith.backend.cuda.shape import HEAD_DIM, STATE_DIM
from warpsmith.model.config import Config

PIECE = 2048  # tokens that run together
OVERRUN = 256  # tokens that a product's last tile may read past a piece
SHORT, SHORTS, LONG = 512, 15, 2048  # keys whose attention is one part (attention.cuh)
PARTS_BYTES = 128 << 20  # of attention's parts; more queries than fit take turns
PREP_SHARED, SLICE = 100_608, 16  # of delta_prep.cu and delta_scan.cu
SHORT_SHARED, SHORT_CTAS = 126_720, 4  # of delta_short.cu, and CTAs that share a head
FEW, MANY = 2, 5  # chunks on their way in a scan of few and of many: few leave room for the next launch's blocks
ROWS_A_CTA = 4  # of attention_rows.cu

Build = tuple[str, dict[str, object]]


def segments_of(keys: int) -> int:
    """Into how many parts attention over so many keys is cut."""
    rest = keys - SHORTS * SHORT
    return -(-keys // SHORT) if rest <= 0 else SHORTS + -(-rest // LONG)


def scan_shared(ahead: int) -> int:
    """SCAN_SHARED of delta_scan.cu."""
    return ahead * 36_864 + 12_288 + 256


def scans_of(stream: PromptStream) -> tuple[int, ...]:
    """By chunks on their way."""
    return (FEW, MANY) if stream.architecture == QUEUED else (FEW,)


def groups_of(stream: PromptStream) -> tuple[int, ...]:
    """Warpgroups of attention's builds."""
    return (1, 2) if stream.architecture == QUEUED else (2,)


def flash_shared(groups: int, stream: PromptStream) -> int:
    """SHARED_HERE of attention_flash.cu."""
    if stream.architecture != QUEUED:
        return (groups * 64 + PREFILL_CHUNK) * HEAD_DIM * 2
    staged = sum(rows.row_bytes for rows in (stream.key_rows, stream.value_rows) if rows.name != "f16")
    return (groups * 64 + 256) * HEAD_DIM * 2 + PREFILL_CHUNK * staged


def attention_constants(stream: PromptStream) -> dict[str, object]:
    """What kernels of attention are told of the cache."""
    return {"KEY_TYPE": stream.key_rows.number, "VALUE_TYPE": stream.value_rows.number}


def header(stream: PromptStream) -> dict[str, object]:
    """prompt.cuh, what every build is told of the model, and embedding_format.cuh."""
    c = stream.config
    numbers = {
        "HIDDEN": c.hidden, "VOCAB": c.vocab, "HEADS": c.heads, "KV_HEADS": c.kv_heads, "KEY_HEADS": c.key_heads,
        "VALUE_HEADS": c.value_heads, **stream.numbers(),
    }  # fmt: skip
    lines = [f"constexpr int {name} = {int(value)};" for name, value in numbers.items()]
    lines.append(f"constexpr float EPS = {c.eps!r}f;")
    embedding = stream.embedding_format
    names = [f'#include "{embedding.header}"', f"typedef {embedding.struct} EmbeddingFormat;"]
    texts = {"prompt.cuh": lines, "embedding_format.cuh": names}
    return {name: "\n".join(["#pragma once", *text, ""]) for name, text in texts.items()}


def kernels_of(stream: PromptStream) -> list[Build]:
    """Files of kernels/prefill, and what each of their builds is told beside the model's numbers."""
    names, cache = ["rows", "delta_prep", "delta_output"], attention_constants(stream)
    if stream.architecture == QUEUED:
        names.append("delta_short")  # its blocks are clusters
    kernels: list[Build] = [("embed", {"EMBEDDING_TYPE": stream.embedding_type}), *((name, {}) for name in names)]
    kernels += [("delta_scan", {"AHEAD": ahead}) for ahead in scans_of(stream)]
    kernels += [("attention_rows", cache), ("attention_merge", cache)]
    kernels += [("attention_flash", {"GROUPS": groups, **cache}) for groups in groups_of(stream)]
    kernels += stream.heads()
    slots = [(slot, layer) for layer in range(stream.config.layers) for slot in SLOTS]
    for slot, layer in slots if stream.heads() else [*slots, ("HEAD", 0)]:
        matrix = stream.matrix(slot, layer)
        for tile in matrix.tiles:
            constant = tile.constant(ENDINGS[slot], matrix.types)
            if constant is not None and (tile.kernel, constant) not in kernels:
                kernels.append((tile.kernel, constant))
    return kernels


def buffer_bytes(c: Config, piece: int = PIECE) -> dict[str, int]:
    """What a piece takes on the device, beside weights and states."""
    tokens, chunks = piece + OVERRUN, -(-piece // PREFILL_CHUNK)
    items = chunks * c.value_heads * any(c.recurrent)
    square = STATE_DIM * STATE_DIM
    return {
        "ids": piece * 4,
        "residual": c.hidden * tokens * 4,
        "x": c.hidden * tokens * 2,
        "squares": c.hidden // 64 * tokens * 4,
        "raw": max(c.conv_channels + c.value_dim, 2 * (c.heads + c.kv_heads) * c.head_dim) * tokens * 2,
        "y": max(c.value_dim, c.heads * c.head_dim) * tokens * 2,
        "h": c.ffn * tokens * 2,
        "gates": 2 * c.value_heads * tokens * 4,
        "n": items * square * 2,
        "b": items * square * 2,
        "q": items * PREFILL_CHUNK * STATE_DIM * 2,
        "o": items * PREFILL_CHUNK * STATE_DIM * 2,
        "fade": items * 4,
        "states": items * square * 2,
        "arrived": c.key_heads * 4,
        "best": 8 * 8,
        "queries": c.heads * HEAD_DIM * tokens * 2,
        "parts": PARTS_BYTES,
        "stats": PARTS_BYTES // (HEAD_DIM * 2) * 8,
    }
