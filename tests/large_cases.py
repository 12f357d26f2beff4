"""A small model for the activations-first forward pass, with every type of weights that it multiplies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np

from random_models import random_tensors
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.backend.reference import ReferenceBackend, mixers
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.config import Config

# A ratio of 3 value heads to a key head, groups of 6 query heads, and stages of one and of two groups of K.
SHAPE = Config(
    name="toy",
    layers=3,
    hidden=512,
    ffn=3328,  # two groups of K, one of them odd
    vocab=480,
    heads=12,
    kv_heads=2,
    key_heads=2,
    value_heads=6,
    recurrent=(True, False, True),
    context=512,
    tied=False,
)
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "attn_qkv": "Q5_K", "ssm_a": "BF16", "ssm_b": "BF16", "output.": "Q6_K",
         "ssm_out": "Q8_0", "ffn_gate": "Q4_0", "ffn_up": "Q5_0"}  # fmt: skip
BOUND = 0.015  # relative error of logits after three layers, with activations in bf16
# Where keys and values are quantised, an error of e of a value moves it to the next step s with a probability of e / s,
# which makes a root mean square of sqrt(e s): with e = 0.4% (bf16) and Q4_0's steps of 3/8 of a usual value, 3.9% of a
# value that is attended to alone. Attention is one of six parts of the residual stream: 1.6%, beside the 1.5% above.
QUANTISED_BOUND = 0.03


def tensors_of(config: Config, types: dict[str, str], times: dict[str, float] | None = None) -> dict[str, Tensor]:
    """Random ones, in Q4_K where nothing else is said for a part of the name, some multiplied with a number."""
    tensors = random_tensors(config, 1)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and "conv1d" not in name:
            kind = TYPES[next((kind for part, kind in types.items() if part in name), "Q4_K")]
            by = next((by for part, by in (times or {}).items() if part in name), 1.0)
            raw = quantize(kind, tensor.float32() * np.float32(by))
            tensors[name] = Tensor(name, kind, tensor.shape, lambda raw=raw: raw)
    return tensors


# Every type, of keys and of values.
CACHES = [("f16", "f16"), ("q8_0", "q4_0"), ("q4_0", "q8_0")]
EXACT_INPUTS = mixers.attention_inputs  # a fixture may be rounding already


@contextmanager
def rounded_caches(types: tuple[str, str]) -> Iterator[None]:
    """The reference rounds keys and values as caches of these types do."""

    def rounded(x: np.ndarray, name: str) -> np.ndarray:
        kind = TYPES[name.upper()]
        return dequantize(kind, quantize(kind, np.ascontiguousarray(x, np.float32))).reshape(x.shape)

    def attention_inputs(*args):
        q, k, v, gate = EXACT_INPUTS(*args)
        return q, rounded(k, types[0]), rounded(v, types[1]), gate

    with mock.patch.object(mixers, "attention_inputs", attention_inputs):
        yield


def random_rows(rng: np.random.Generator, name: str, shape: tuple[int, ...], size: float) -> np.ndarray:
    """Bytes of rows of keys or values of about this size."""
    kept = CACHE_ROWS[name]
    if name == "f16":
        return (rng.standard_normal((*shape, 256)) * size).astype(np.float16).view(np.uint8)
    rows = rng.integers(0, 256, (*shape, kept.row_bytes)).astype(np.uint8)
    steps = 64 if name == "q8_0" else 4  # of a usual quant
    scales = (size / steps * rng.uniform(0.5, 1.5, (*shape, 8))).astype(np.float16)
    rows[..., -16:] = scales.view(np.uint8)
    return rows


def remember(backend, state, reference: ReferenceBackend, expected, length: int, rng: np.random.Generator) -> None:
    """The same random past in both states: keys and values of `length` tokens."""
    c = backend.config
    for which, name in enumerate(backend.cache_types):
        rows = random_rows(rng, name, (len(c.attention_layers), c.kv_heads, state.context), 1.0)
        (state.keys, state.values)[which].write(rows)
        decoded = CACHE_ROWS[name].decode(rows)
        for layer, cached in zip(c.attention_layers, decoded, strict=True):
            kept = expected.layers[layer].values if which else expected.layers[layer].keys
            kept[:length] = cached[:, :length].swapaxes(0, 1)
    state.length = expected.length = length


def bound_of(backend) -> float:
    return BOUND if backend.cache_types == ("f16", "f16") else QUANTISED_BOUND
