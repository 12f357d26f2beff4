"""The numbers the kernels are written for, whatever the model and the chip."""

from __future__ import annotations

from warpsmith.backend.tree import MAX_NODES

# of shape.cuh and shared.cuh
WARPS, CHUNK_K = 8, 256
WIDE, NARROW = 16, 8  # rows of a row tile
LARGEST_HIDDEN = 16 * CHUNK_K  # MAX_CHUNKS: a row tile must fit in the registers
COLUMNS, HISTORY, STATE_DIM, HEAD_DIM = 16, 4, 128, 256
# of params.cuh
MAX_STOPS, MAX_FEATURES = 16, 8
# rows of logits: of a tree, then of a draft's block
LOGIT_ROWS = MAX_NODES + 16
# of candidates.cuh and sample.cuh
MAX_STEPS, CANDIDATES, ROUNDS, MAX_OWN_LOGITS = 64, 768, 8, 4096
# of stream.cu
READ_AHEAD = 3 * 32768  # PIECES * PIECE_BYTES


def chunks_of(k: int) -> int:
    return -(-k // CHUNK_K)


def tiles_of(rows: int, tile_rows: int) -> int:
    return -(-rows // tile_rows)


def threads_of(architecture: str) -> int:
    """Consumers, and the warp that fills the ring; on sm_90a with three idle companions."""
    return WARPS * 32 + (128 if architecture == "sm_90a" else 32)
