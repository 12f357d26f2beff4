"""The activations-first forward pass: how its work is dealt, and what it computes on an emulated GPU and a real one."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_checks import check_interleaved, plain_run, relative, same_state
from emulator.gpu import emulated_gpu
from random_models import random_tensors, random_tree
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.large.layout import GROUP_BLOCKS, LargeLayout, deal_groups, takes
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.convert import RECIPES, tensor_type
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import NoDevice
from warpsmith.model.config import SIZES, Config
from warpsmith.model.weights import expected_shapes

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


@contextmanager
def emulated(config: Config, types: dict[str, str], sms: int = 6) -> Iterator[tuple[LargeBackend, ReferenceBackend]]:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    tensors = tensors_of(config, types)
    with emulated_gpu(sms, (8,)):
        yield LargeBackend(config, tensors), ReferenceBackend(config, tensors)


# -- how work is dealt -------------------------------------------------------------------------------------------------


@given(st.integers(1, 80), st.integers(12, 160))
@settings(deadline=None)
def test_groups_cover_k_and_every_sm_has_one(blocks: int, sms: int) -> None:
    groups = deal_groups(blocks, sms)

    assert [g.first_block for g in groups] == np.cumsum([0, *(g.blocks for g in groups[:-1])]).tolist()
    assert sum(g.blocks for g in groups) == blocks
    assert sum(g.sms for g in groups) == sms
    assert all(1 <= g.blocks <= GROUP_BLOCKS + 1 and g.sms >= 1 for g in groups)


@pytest.mark.parametrize(("size", "recipe"), [("27B", "q4_k_m"), ("9B", "q6_k"), ("4B", "q4_k_m"), ("0.8B", "q8_0")])
def test_every_block_has_its_place_and_bytes_are_shared_out(size: str, recipe: str) -> None:
    assert recipe in RECIPES
    config = SIZES[size]
    shapes = expected_shapes(config)
    stored = {n: tensor_type(recipe, n, shape, config.layers, config.tied).name for n, shape in shapes.items()}
    layout = LargeLayout(config, 132, stored)

    assert takes(config)
    for number in (0, 1, 2, 3, 12, len(layout.stages) - 1):
        deal, stage = layout.deals[number], layout.stages[number]
        places = np.sort(np.stack([layout.offsets(number), layout.offsets(number) + stage.tile_bytes[:, None]], -1), 0)
        starts, ends = np.sort(places[..., 0].ravel()), np.sort(places[..., 1].ravel())
        assert (starts[1:] >= ends[:-1]).all()  # nothing overlaps
        assert deal.count.sum() == stage.tiles * stage.blocks
        assert (np.diff(deal.tables, axis=1) >= 1).all()  # every tile of rows has a result in every group of K
        assert deal.tables.max() == deal.results
    slowest = sum(int(deal.nbytes.max()) for deal in layout.deals) * 132 / layout.stream_bytes
    assert slowest < (1.05 if size == "27B" else 1.12)


def test_a_shape_that_superblocks_do_not_divide_is_not_taken() -> None:
    assert not takes(dataclasses.replace(SHAPE, ffn=2592))
    assert not takes(dataclasses.replace(SHAPE, heads=20, kv_heads=2))
    assert takes(SHAPE)


# -- on an emulated GPU ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LargeBackend, ReferenceBackend]]:
    with emulated(SHAPE, MIXED) as backends:
        yield backends


def test_features_and_logits_are_those_of_the_reference(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = both
    state, expected = cuda.new_state(128), reference.new_state(128)
    want, rng = Want("logits", features=(0, 1, 2), hidden=True), np.random.default_rng(0)
    for nodes in (1, 5, 8):
        tree = random_tree(rng, nodes, SHAPE.vocab)
        got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
        assert relative(got.features.numpy(), exact.features.numpy()) < BOUND
        assert relative(got.hidden.numpy(), exact.hidden.numpy()) < BOUND
        assert relative(got.logits.numpy(), exact.logits.numpy()) < BOUND
        for backend, each in ((cuda, state), (reference, expected)):
            backend.commit(each, tree.path(nodes - 1))


def test_a_tree_s_rows_are_those_of_plain_decoding(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = both
    state, plain = cuda.new_state(64), cuda.new_state(64)
    rng = np.random.default_rng(1)
    tree = random_tree(rng, 8, SHAPE.vocab)
    path = tree.path(7)
    rows = cuda.forward([(state, tree)], LOGITS).logits.numpy()[path]
    np.testing.assert_array_equal(rows, plain_run(cuda, plain, tree.tokens[path]))
    cuda.commit(state, path)
    assert same_state(SHAPE, state, plain)


def test_decoding_on_the_device_is_forward_after_forward(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = both
    state, plain = cuda.new_state(64), cuda.new_state(64)
    token, tokens = 7, []
    for _ in range(3):
        token = int(cuda.forward([(plain, Tree.chain([token]))]).argmax[0])
        cuda.commit(plain, [0])
        tokens.append(token)
    assert list(cuda.decode(state, 7, 3)) == tokens
    assert same_state(SHAPE, state, plain)


# -- on a GPU ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu() -> tuple[LargeBackend, ReferenceBackend]:
    tensors = tensors_of(SHAPE, MIXED)
    try:
        cuda = LargeBackend(SHAPE, tensors, options={"WATCHDOG_CYCLES": "2000000000ll"})
    except NoDevice as error:
        pytest.skip(str(error))
    return cuda, ReferenceBackend(SHAPE, tensors)


@pytest.mark.gpu
def test_gpu_features_and_logits_are_those_of_the_reference(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = on_gpu
    state, expected, rng = cuda.new_state(512), reference.new_state(512), np.random.default_rng(0)
    want = Want("logits", features=(0, 1, 2), hidden=True)
    for nodes in (1, 5, 8, 13, 16, 22, 24, 1, 24, 24, 24, 24, 24, 24):  # past 128 tokens: chunks that all nodes share
        tree = random_tree(rng, nodes, SHAPE.vocab)
        got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
        assert relative(got.features.numpy(), exact.features.numpy()) < BOUND
        assert relative(got.logits.numpy(), exact.logits.numpy()) < BOUND
        for backend, each in ((cuda, state), (reference, expected)):
            backend.commit(each, tree.path(nodes - 1))


@pytest.mark.gpu
def test_gpu_rows_do_not_depend_on_the_tree_around_them(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = on_gpu
    rng = np.random.default_rng(2)
    text = rng.integers(0, SHAPE.vocab, 200)
    plain, state, at = cuda.new_state(512), cuda.new_state(512), 0
    expected = plain_run(cuda, plain, text)
    while at < len(text):
        count = int(min(len(text) - at, rng.integers(1, 13)))
        tokens, parents, main = [int(text[at])], [-1], [0]
        while len(main) < count or len(tokens) < count + 8:
            if len(main) < count and rng.random() < 0.5:
                parents.append(main[-1])
                main.append(len(tokens))
                tokens.append(int(text[at + len(main) - 1]))
            elif len(tokens) < 24 - (count - len(main)):
                parents.append(int(rng.integers(0, len(tokens))))
                tokens.append(int(rng.integers(0, SHAPE.vocab)))
            elif len(main) == count:
                break
        output = cuda.forward([(state, Tree(np.array(tokens), np.array(parents)))], LOGITS)
        np.testing.assert_array_equal(output.logits.numpy()[main], expected[at : at + count])
        cuda.commit(state, main)
        at += count
    assert same_state(SHAPE, state, plain)


@pytest.mark.gpu
def test_gpu_sequences_interleave(on_gpu: tuple[LargeBackend, ReferenceBackend]) -> None:
    check_interleaved(on_gpu[0], [5, 9, 8], 30)
