"""What the kernels of a prompt take: which models, which builds, how much memory, and where weights are."""

from __future__ import annotations

import numpy as np

from warpsmith.backend.base import PREFILL_CHUNK
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.prefill.products import NARROW_TILES, PLAIN, RESIDUAL, SILU, WIDE_TILES
from warpsmith.backend.cuda.shape import HEAD_DIM, STATE_DIM
from warpsmith.backend.cuda.weights.formats import Bf16
from warpsmith.model.config import Config

PIECE = 2048  # tokens that run together
OVERRUN = 256  # tokens that a product's last tile may read past a piece
SHORT, SHORTS, LONG = 512, 16, 2048  # keys whose attention is one part (attention.cuh)
PARTS_BYTES = 128 << 20  # of attention's parts; more queries than fit take turns
SHARED = 232_448  # bytes of shared memory a block may ask for
PREP_SHARED, SCAN_SHARED, SLICE = 103_680, 196_864, 16  # of delta_prep.cu and delta_scan.cu


def suits(layout: Layout, architecture: str) -> bool:
    """Whether these kernels take the model: all matrices in BF16, widths of whole steps, on sm_90a."""
    c = layout.config
    formats = [*(held.format for held in layout.stream.parts), layout.stream.embedding_format]
    fits = all(isinstance(each, Bf16) for each in formats)  # the one their loader is written for
    widths = c.hidden % 256 == 0 and c.ffn % 512 == 0 and c.value_dim % 512 == 0 and c.heads % 2 == 0
    return architecture == "sm_90a" and fits and widths and c.heads + 2 * c.kv_heads <= 32


def row_tile_starts(layout: Layout) -> list[np.ndarray]:
    """Where every row tile of each stage that reads weights begins in the stream."""
    stream = layout.stream
    starts = {stage.names: np.zeros(stage.tiles, np.uint64) for stage in layout.schedule.weight_stages}
    for held, part_start in zip(stream.parts, stream.part_start, strict=True):
        first = stream.first_tiles[held.stage.names[-1]]
        tiles = held.part.first_tile + np.arange(held.part.tiles)
        sm = np.searchsorted(first, tiles, side="right") - 1
        before = tiles - np.maximum(first[sm], held.part.first_tile)  # of the part, that the SM has before
        starts[held.stage.names][tiles] = part_start[sm] + before * held.tile_bytes
    return list(starts.values())


def segments_of(keys: int) -> int:
    """Into how many parts attention over so many keys is cut."""
    rest = keys - SHORTS * SHORT
    return -(-keys // SHORT) if rest <= 0 else SHORTS + -(-rest // LONG)


def kernels_of(layout: Layout) -> list[tuple[str, dict[str, object]]]:
    """Files of kernels/prefill, and what each of their builds is told beside the model's constants."""
    names = ("embed", "rows", "delta_prep", "delta_scan", "delta_output", "attention_rows", "attention_merge")
    kernels: list[tuple[str, dict[str, object]]] = [(name, {}) for name in names]
    kernels += [("attention_flash", {"GROUPS": groups}) for groups in (1, 2)]
    kernels += [("head", {"HEAD_OCTETS": octets}) for octets in sorted({1, head_octets(layout.config)})]
    kernels += [("gemm", tile.constant(ending)) for tile in WIDE_TILES for ending in (PLAIN, SILU)]
    return kernels + [("gemm", tile.constant(RESIDUAL)) for tile in NARROW_TILES]


def head_octets(config: Config) -> int:
    """Octets of tokens whose logits are made together: their activations lie in shared memory."""
    return min(8, (SHARED - 4096) // (config.hidden * 16))


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
        "queries": c.heads * HEAD_DIM * tokens * 2,
        "parts": PARTS_BYTES,
        "stats": PARTS_BYTES // (HEAD_DIM * 2) * 8,
        "rows": piece * c.hidden * 4,
    }
