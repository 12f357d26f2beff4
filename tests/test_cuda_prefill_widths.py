"""Prompts of models with the family's true widths, every type of weights and of caches, against the reference.

Two layers of each kind of model: what a layer does with its widths does not depend on how many there are.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from device_checks import plain_run, same_state
from large_cases import rounded_caches
from test_cuda_prefill import EVERY, STEPS, after_layers, check_errors, error, handed_over, state_errors
from warpsmith.backend.base import LOGITS
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.state import CudaState
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.errors import NoDevice
from warpsmith.model.config import SIZES, Config
from warpsmith.model.synthetic import weight_bytes
from warpsmith.model.weights import expected_shapes

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LENGTHS = (1, 2, 63, 64, 65, 127, 520, 2048)
CONTEXT = 8192 + 128
# All types in one model; what is multiplied together has one.
EVERY_TYPE = {"attn_qkv": "Q5_K", "attn_gate": "Q8_0", "ssm_alpha": "BF16", "ssm_beta": "BF16", "ssm_out": "Q8_0",
              "attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "attn_output": "Q5_K", "ffn_down": "Q6_K",
              "output": "Q6_K"}  # fmt: skip
ROW_TILES = ("bf16", "q8_0", "q4_0")
CASES = [
    ("0.8B", "bf16", ("f16", "f16")),  # ratio 1, row tiles
    ("4B", "bf16", ("f16", "f16")),  # ratio 2
    ("0.8B", "q8_0", ("f16", "f16")),
    ("4B", "q4_0", ("f16", "f16")),
    ("0.8B", "types", ("q8_0", "q8_0")),  # ratio 1, slabs
    ("4B", "types", ("q4_0", "q4_0")),
    ("27B", "types", ("f16", "f16")),  # ratio 3
    ("27B", "q4_k_m", ("q8_0", "q4_0")),
]


def model_of(size: str, recipe: str) -> tuple[Config, dict[str, Tensor]]:
    whole = SIZES[size]
    tied = whole.tied and recipe in ROW_TILES
    config = dataclasses.replace(whole, layers=2, recurrent=(True, False), vocab=2048, tied=tied, context=CONTEXT)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        kind = tensor_type("q4_k_m" if recipe == "types" else recipe, name, shape, whole.layers, config.tied)
        if recipe == "types" and kind.name != "F32":
            kind = TYPES[next((each for part, each in EVERY_TYPE.items() if part in name), "Q4_K")]
        raw = np.concatenate(list(weight_bytes(0, name, kind, shape))).reshape(-1, kind.row_bytes(shape[-1]))
        tensors[name] = Tensor(name, kind, shape, lambda raw=raw: raw)
    return config, tensors


def load(
    size: str, recipe: str, caches: tuple[str, str], architecture: str | None = None
) -> tuple[WeightsFirstBackend, ReferenceBackend]:
    config, tensors = model_of(size, recipe)
    try:
        if recipe in ROW_TILES:
            profile = dataclasses.replace(load_profiles()["h200"], largest_tree=1)
            cuda = WeightsFirstBackend(config, tensors, context=CONTEXT, profile=profile, architecture=architecture)
        else:
            cuda = LargeBackend(
                config,
                tensors,
                context=CONTEXT,
                cache_type_k=caches[0],
                cache_type_v=caches[1],
                architecture=architecture,
            )
    except NoDevice as problem:
        pytest.skip(str(problem))
    return cuda, ReferenceBackend(config, tensors)


def bound_of(recipe: str, caches: tuple[str, str]) -> float:
    """Of two layers; weights of slabs are rounded too, and attention is one of four parts that may be a step off."""
    bound = after_layers(2) if recipe == "bf16" else after_layers(2) * 1.5**0.5
    return (bound**2 + bound * max(STEPS[kind] for kind in caches) / 4) ** 0.5


@pytest.mark.parametrize(("size", "recipe", "caches"), CASES)
def test_every_position_and_state(size: str, recipe: str, caches: tuple[str, str]) -> None:
    cuda, reference = load(size, recipe, caches)
    bound, expected, done = bound_of(recipe, caches), reference.new_state(CONTEXT), 0
    prompt = np.random.default_rng(2).integers(0, cuda.config.vocab, LENGTHS[-1])
    rows = np.zeros((0, cuda.config.vocab), np.float32)
    with rounded_caches(caches):
        for count in LENGTHS:  # the reference goes on, the device begins anew
            rows = np.concatenate([rows, reference.prefill(expected, prompt[done:count], EVERY).logits.numpy()])
            state, done = cuda.new_state(CONTEXT), count
            got = cuda.prefill(state, prompt[:count], EVERY).logits.numpy()
            errors = {"logits": error(got, rows), **state_errors(cuda, state, expected)}
            print(
                f"{size} {recipe} {caches}, {count}: { ({n: round(e, 5) for n, e in errors.items()}) } of {bound:.5f}"
            )
            check_errors(cuda, errors, bound, count)


def copy_of(cuda: WeightsFirstBackend, state: CudaState) -> CudaState:
    twin = cuda.new_state(CONTEXT)
    cuda.restore(twin, cuda.snapshot(state))
    return twin


@pytest.mark.parametrize(("size", "recipe", "caches"), [*CASES[:4], CASES[-1]])
def test_8192_tokens_in_pieces(size: str, recipe: str, caches: tuple[str, str]) -> None:
    """Cut elsewhere; from 8,128 on also against one-token passes and against the reference, every position."""
    cuda, reference = load(size, recipe, caches)
    prompt = np.random.default_rng(3).integers(0, cuda.config.vocab, 8192)
    whole, cut = cuda.new_state(CONTEXT), cuda.new_state(CONTEXT)
    logits = cuda.prefill(whole, prompt, LOGITS).logits.numpy()
    for low, high in ((0, 64), (64, 4160), (4160, 8128)):
        cuda.prefill(cut, prompt[low:high])
    twin = copy_of(cuda, cut)
    np.testing.assert_array_equal(cuda.prefill(cut, prompt[8128:], LOGITS).logits.numpy(), logits)
    assert same_state(cuda.config, whole, cut)
    with rounded_caches(caches):
        expected = reference.prefill(handed_over(cuda, twin, reference), prompt[8128:], EVERY).logits.numpy()
    rows = cuda.prefill(copy_of(cuda, twin), prompt[8128:], EVERY).logits.numpy()
    errors = error(rows, expected), error(plain_run(cuda, twin, prompt[8128:])[-1], logits[0])
    print(f"{size} {recipe} {caches}, 8192: {errors} of {bound_of(recipe, caches):.5f}")
    assert max(errors) < bound_of(recipe, caches)
