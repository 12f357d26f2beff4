"""Weights in some format on the CUDA backend: whether its products are those of the file's own weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from device_checks import relative
from random_models import random_tensors, random_tree
from warpsmith.backend.base import Want
from warpsmith.backend.cuda.debug.trace import read_exchange
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.checkpoint.blocks import LAYOUTS, TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.config import Config

# One stage alone, from the very activations it read: only the order of float32 sums is left.
EXACT = 2e-5


def stored_as(config: Config, kind: Callable[[str], str], seed: int = 1) -> dict[str, Tensor]:
    """A random model whose matrices have the types that `kind` gives their names."""
    tensors = random_tensors(config, seed)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and "conv1d" not in name:
            block_type = TYPES[kind(name)]
            raw = quantize(block_type, tensor.float32())
            tensors[name] = Tensor(name, block_type, tensor.shape, lambda raw=raw: raw)
    return tensors


def check_products(
    backend_of: Callable[[dict[str, Tensor]], WeightsFirstBackend], config: Config, kind: str, sizes: tuple[int, ...]
) -> None:
    """One stage at a time, in float64 from what the stage read: any bits, scales from the smallest to large ones. Layer
    0 is a DeltaNet, layer 1 attention; types are those of blocks with one scale."""
    tensors = stored_as(config, lambda name: kind, seed=3)
    random = np.random.default_rng(0)

    def replaced(name: str, raw: np.ndarray) -> None:
        tensors[name] = Tensor(name, tensors[name].type, tensors[name].shape, lambda: raw)

    for name in ("blk.1.attn_q.weight", "blk.1.attn_k.weight", "blk.0.ffn_down.weight"):
        raw = random.integers(0, 256, tensors[name].raw().shape, dtype=np.uint8)
        blocks = raw.reshape(-1).view(LAYOUTS[kind])
        blocks["d"] = 2.0 ** random.integers(-24, -3, len(blocks))
        replaced(name, raw)
    nothing = tensors["blk.0.ssm_out.weight"]  # so that the MLP reads the embedding
    replaced(nothing.name, np.zeros_like(nothing.raw()))
    cuda = backend_of(tensors)
    state = cuda.new_state(64)
    cuda.prefill(state, random.integers(0, config.vocab, 5))
    for nodes in sizes:
        tree = random_tree(np.random.default_rng(nodes), nodes, config.vocab)
        features = cuda.forward([(state, tree)], Want("argmax", features=(0,))).features.numpy()
        cuda.trace(state, tree, "mlp_in.0")
        exchange = cuda.layout.exchange
        h = exchange.values(read_exchange(cuda, 0), "h", nodes).astype(np.float64)
        embedded = tensors["token_embd.weight"].float32()[tree.tokens].astype(np.float64)
        expected = embedded + h @ tensors["blk.0.ffn_down.weight"].float32().astype(np.float64).T
        assert relative(features, expected) < EXACT

        cuda.trace(state, tree, "mlp_out.0")
        words = read_exchange(cuda, 1)
        x = exchange.values(words, "x", nodes).astype(np.float64)
        squares = exchange.squares(words, "x", nodes).view(np.float32).astype(np.float64)
        rms = np.sqrt(squares.sum(axis=1, keepdims=True) / config.hidden + config.eps)
        got = cuda.trace(state, tree, "attention_in.1")
        for name in ("q", "k", "v"):
            weights = tensors[f"blk.1.attn_{name}.weight"].float32().astype(np.float64)
            assert relative(got[name], x @ weights.T / rms) < EXACT, name
