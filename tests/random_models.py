"""Random models for tests: any shape, float weights large enough that a mistake anywhere shows."""

from __future__ import annotations

import dataclasses

import numpy as np

from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import LAYOUTS, TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.model.config import Config
from warpsmith.model.synthetic import random_blocks
from warpsmith.model.weights import expected_shapes

SMALL = Config(
    name="small",
    layers=4,
    hidden=64,
    ffn=96,
    vocab=160,
    heads=4,
    kv_heads=2,
    key_heads=2,
    value_heads=4,
    recurrent=(True, False, True, True),
    head_dim=32,
    rotary_dim=16,
    key_head_dim=16,
    value_head_dim=16,
    context=512,
    tied=True,
)


def small_config(ratio: int = 2, **changes: object) -> Config:
    return dataclasses.replace(SMALL, value_heads=SMALL.key_heads * ratio, **changes)


def random_tensors(config: Config, seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = rng.standard_normal(shape) * 1.5 / np.sqrt(shape[-1])
        if name.endswith("norm.weight"):
            values = 1 + 0.3 * rng.standard_normal(shape)
        elif name.endswith("ssm_a"):
            values = -rng.uniform(0.1, 8, shape)
        elif name.endswith("ssm_dt.bias"):
            values = 0.3 * rng.standard_normal(shape)
        raw = np.ascontiguousarray(values.astype(np.float32)).reshape(-1, shape[-1]).view(np.uint8)
        tensors[name] = Tensor(name, TYPES["F32"], shape, lambda raw=raw: raw)
    return tensors


def random_tree(rng: np.random.Generator, nodes: int, vocab: int) -> Tree:
    """A tree whose parents are drawn anywhere before their children: chains, stars and everything between."""
    parents = [-1] + [int(rng.integers(max(0, i - 4), i)) for i in range(1, nodes)]
    return Tree(rng.integers(0, vocab, nodes), np.array(parents))


def random_rows(kind: str, rows: int, cols: int, deviation: float = 1.0) -> np.ndarray:
    """Random rows of a quantised type, all its bits in use, whose weights have about this standard deviation."""
    block_type, count = TYPES[kind], rows * cols // TYPES[kind].elems
    if kind[0] == "Q" or kind.startswith("IQ4"):
        return random_blocks(block_type, np.random.SFC64(9), count, deviation).reshape(rows, -1)
    raw = np.random.default_rng(9).integers(0, 256, (rows, count // rows * block_type.bytes), np.uint8)
    blocks = raw.view(LAYOUTS[kind])
    with np.errstate(over="ignore"):

        def scale(by: float) -> None:
            half = np.float16(by)
            if kind == "MXFP4":
                blocks["e"] = 127 + round(np.log2(by))
            elif kind == "IQ1_M":  # a nibble of it above each four scales
                nibbles = int(half.view(np.uint16)) >> 4 * np.arange(4) & 15
                blocks["sc"] = (blocks["sc"] & 0xFFF) | nibbles << 12
            else:
                blocks["d"] = half

        scale(1.0)
        scale(deviation / dequantize(block_type, raw).std())
    return raw
