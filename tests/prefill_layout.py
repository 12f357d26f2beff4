"""How activations of a prompt lie on the device (kernels/prefill/common.cuh), in numpy."""

from __future__ import annotations

import numpy as np


def stream_places(tiles: int, chunks: int) -> np.ndarray:
    """Where tiles of 32 k lie in the stream's order: a chunk of 256 k has one of every eighth of K."""
    tile = np.arange(tiles)
    return tile % chunks * 8 + tile // chunks


def to_tiles(rows: np.ndarray, chunks: int = 0) -> np.ndarray:
    """[tokens, k] -> [k / 32, tokens / 8, k % 8 / 2, token % 8, k % 32 / 8, k % 2]; with `chunks` in the stream's
    order."""
    tokens, k = rows.shape
    tiles = rows.reshape(tokens // 8, 8, k // 32, 4, 4, 2).transpose(2, 0, 4, 1, 3, 5)
    if chunks:
        placed = np.empty_like(tiles)
        placed[stream_places(k // 32, chunks)] = tiles
        tiles = placed
    return np.ascontiguousarray(tiles)


def from_tiles(tiles: np.ndarray, chunks: int = 0) -> np.ndarray:
    """[k / 32, tokens / 8, 256] -> [tokens, k]."""
    count, octets = tiles.shape[:2]
    if chunks:
        tiles = tiles[stream_places(count, chunks)]
    rows = tiles.reshape(count, octets, 4, 8, 4, 2).transpose(1, 3, 0, 4, 2, 5)
    return np.ascontiguousarray(rows).reshape(octets * 8, count * 32)


def slab_places(k: int) -> tuple[np.ndarray, np.ndarray]:
    """Of every pair of channels: its tile of 32 places in a product over slabs, and which of four words it is there."""
    pair = np.arange(0, k, 2)
    return pair // 64 * 2 + pair // 8 % 2, pair % 64 // 16


def to_slab_tiles(rows: np.ndarray) -> np.ndarray:
    """[tokens, k] -> [k / 32, tokens / 8, 4, 8 tokens, 4 words, 2]."""
    tokens, k = rows.shape
    tile, word = slab_places(k)
    out = np.empty((k // 32, tokens // 8, 4, 8, 4, 2), rows.dtype)
    pairs = rows.reshape(tokens // 8, 8, k // 2, 2)
    out[tile, :, np.arange(k // 2) % 4, :, word] = pairs.transpose(2, 0, 1, 3)
    return out


def from_slab_tiles(tiles: np.ndarray) -> np.ndarray:
    """[k / 32, tokens / 8, 256] -> [tokens, k]."""
    count, octets = tiles.shape[:2]
    k = count * 32
    tile, word = slab_places(k)
    words = tiles.reshape(count, octets, 4, 8, 4, 2)
    pairs = words[tile, :, np.arange(k // 2) % 4, :, word]
    return np.ascontiguousarray(pairs.transpose(1, 2, 0, 3)).reshape(octets * 8, k)


def from_bf16(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.uint32) << 16).view(np.float32)
