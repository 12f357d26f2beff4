"""Random models: the same for a seed, at the right scale, readable and runnable."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from warpsmith.backend.base import Want
from warpsmith.backend.reference.backend import ReferenceBackend
from warpsmith.checkpoint.blocks import TYPES, dequantize
from warpsmith.model.config import SIZES, every_fourth_is_attention
from warpsmith.model.synthetic import random_blocks, random_checkpoint, tiny_model, weight_bytes
from warpsmith.model.weights import expected_shapes, read_config

SMALL = replace(SIZES["tiny"], name="small", layers=2, recurrent=(True, False), ffn=256, vocab=272, mtp_layers=1)
QUANTISED = [name for name in TYPES if name not in ("F32", "F16", "BF16")]


def digest(seed: int, name: str, type_name: str, shape: tuple[int, ...]) -> str:
    return hashlib.sha256(b"".join(weight_bytes(seed, name, TYPES[type_name], shape))).hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "type_name", "expected"),
    [
        ("blk.0.ffn_up.weight", "BF16", "c41f5221b9bbf412"),
        ("output.weight", "Q4_K", "eb6d68db2f47c5f7"),
        ("blk.3.ssm_a", "F32", "ea5445c533325777"),
    ],
)
def test_a_seed_means_the_same_weights_everywhere(name: str, type_name: str, expected: str) -> None:
    assert digest(7, name, type_name, (64, 256)) == expected


def test_weights_depend_on_seed_and_name_only() -> None:
    one = digest(0, "blk.0.ffn_up.weight", "Q6_K", (16, 256))
    assert one == digest(0, "blk.0.ffn_up.weight", "Q6_K", (16, 256))
    assert one != digest(1, "blk.0.ffn_up.weight", "Q6_K", (16, 256))
    assert one != digest(0, "blk.1.ffn_up.weight", "Q6_K", (16, 256))


def test_pieces_add_up_to_the_tensor() -> None:
    shape = (1031, 4096)  # more than one piece, and not a whole number of them
    for type_name in ("F32", "BF16", "Q5_K"):
        pieces = list(weight_bytes(0, "blk.0.ffn_up.weight", TYPES[type_name], shape))
        assert len(pieces) > 1
        assert sum(map(len, pieces)) == shape[0] * TYPES[type_name].row_bytes(shape[1])


@pytest.mark.parametrize("type_name", QUANTISED)
@pytest.mark.parametrize("deviation", [1.0, 1 / 64, 1 / 132])
def test_random_blocks_have_the_spread_asked_for_and_no_lean(type_name: str, deviation: float) -> None:
    kind = TYPES[type_name]
    raw = random_blocks(kind, np.random.SFC64(3), (1 << 19) // kind.elems, deviation)
    weights = dequantize(kind, raw.reshape(-1, 4096 // kind.elems * kind.bytes)).astype(np.float64) / deviation
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(1, abs=0.02)
    # A mean that all rows share is a direction every layer amplifies: it must be no more than sampling noise.
    assert abs(weights.mean()) < 0.01
    assert weights.mean(axis=1).std() * np.sqrt(4096) == pytest.approx(1, abs=0.35)


@pytest.mark.parametrize(
    ("recipe", "types"),
    {
        "f32": {"F32"},
        "f16": {"F32", "F16"},
        "bf16": {"F32", "BF16"},
        "q8_0": {"F32", "Q8_0"},
        "q4_0": {"F32", "Q4_0", "Q6_K"},
        "q4_k_m": {"F32", "Q4_K", "Q6_K"},
        "q5_k_m": {"F32", "Q5_K", "Q6_K"},
        "q6_k": {"F32", "Q6_K"},
    }.items(),
)
def test_checkpoints_are_complete_and_of_the_recipe(recipe: str, types: set[str]) -> None:
    checkpoint = random_checkpoint(SMALL, recipe=recipe)
    config = read_config(checkpoint)
    assert replace(config, name="small") == SMALL
    assert {t.type.name for t in checkpoint.tensors.values()} == types
    for name, tensor in checkpoint.tensors.items():
        assert tensor.raw().nbytes == tensor.nbytes, name


def test_recipes_round_the_same_weights() -> None:
    exact = random_checkpoint(SMALL, seed=5)
    for recipe, tolerance in (("bf16", 0.01), ("q8_0", 0.02), ("q4_k_m", 0.12)):
        rounded = random_checkpoint(SMALL, seed=5, recipe=recipe)
        for name, tensor in exact.tensors.items():
            a, b = tensor.float32(), rounded.tensors[name].float32()
            assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(a), (recipe, name)


@pytest.mark.parametrize("layers", [4, 12])
def test_activations_and_logits_stay_around_one(layers: int) -> None:
    config = replace(SIZES["tiny"], layers=layers, recurrent=every_fourth_is_attention(layers))
    checkpoint = random_checkpoint(config)
    backend = ReferenceBackend(config, checkpoint.tensors)
    output = backend.prefill(
        backend.new_state(64), np.arange(64), Want("logits", features=tuple(range(layers)), every_row=True)
    )
    assert output.logits is not None
    assert output.features is not None
    assert 0.5 < output.logits.numpy().std() < 2
    for features in np.split(output.features.numpy(), layers, axis=1):
        assert 0.3 < features.std() < 4
    # and the past matters: the same token is answered differently at different positions
    repeated = backend.prefill(backend.new_state(8), [65] * 8, Want("logits", every_row=True)).logits.numpy()
    assert repeated is not None
    assert np.abs(repeated[7] - repeated[1]).max() > 0.05


def test_the_stand_in_model_is_small_and_complete() -> None:
    checkpoint = tiny_model()
    assert set(checkpoint.tensors) == set(expected_shapes(SIZES["tiny"]))
    assert checkpoint.nbytes < 32 << 20
