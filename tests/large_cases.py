"""A small model for the activations-first forward pass, with every type of weights that it multiplies."""

from __future__ import annotations

from random_models import random_tensors
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.config import Config

# A ratio of 3 value heads to a key head, groups of 6 query heads, and stages of one and of two groups of K.
SHAPE = Config(
    name="toy",
    layers=3,
    hidden=512,
    ffn=2560,
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


def tensors_of(config: Config, types: dict[str, str]) -> dict[str, Tensor]:
    """Random ones, in Q4_K where nothing else is said for a part of the name."""
    tensors = random_tensors(config, 1)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and "conv1d" not in name:
            kind = TYPES[next((kind for part, kind in types.items() if part in name), "Q4_K")]
            raw = quantize(kind, tensor.float32())
            tensors[name] = Tensor(name, kind, tensor.shape, lambda raw=raw: raw)
    return tensors
