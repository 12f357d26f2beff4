"""DFlash on CUDA against the same network in numpy, on an emulated GPU: shapes, weight types, whole texts."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from cuda_draft_cases import (
    CLOSE,
    SHAPES,
    TOP,
    both,
    check_rings,
    check_same,
    distance,
    draft_of_the_27b,
    features_of,
    file_of,
    shaped,
)
from draft_cases import OneBlock, run
from emulator.gpu import emulated_gpu
from large_cases import MIXED, tensors_of
from large_cases import SHAPE as LARGER
from random_models import random_tensors
from warpsmith.backend.base import Want
from warpsmith.backend.cuda import WeightsFirstBackend
from warpsmith.backend.cuda.draft import layout, lent
from warpsmith.backend.cuda.draft.layout import DraftStream, takes
from warpsmith.backend.cuda.draft.network import POLLED, CudaDraft
from warpsmith.backend.cuda.draft.plan import planned_draft
from warpsmith.backend.cuda.large import layout as target_layout
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.large.stream import SlabStages
from warpsmith.backend.cuda.memory.exchange import NOT_YET
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.rows import HostRows
from warpsmith.backend.sampling import Sampling
from warpsmith.checkpoint.dflash import expected_shapes
from warpsmith.draft.dflash import DFlash, capacity_of
from warpsmith.engine.prefix import held_bytes
from warpsmith.engine.scheduler import Scheduler

SMS = 3
SHAPE = dataclasses.replace(LARGER, ffn=512)


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    with emulated_gpu(SMS, (8,), often=True):
        yield


@cache
def targets() -> tuple[LargeBackend, ReferenceBackend]:
    # one key head, as wisp has: its past is cut into 128 splits, as many as there are
    config = dataclasses.replace(SHAPE, mtp_layers=1, heads=6, kv_heads=1)
    tensors = tensors_of(config, MIXED)
    return LargeBackend(config, tensors), ReferenceBackend(config, tensors)


EMULATED = ["sliding and full", "the first tokens only"]  # the others on a GPU
EMULATED += [pytest.param(name, marks=pytest.mark.slow) for name in SHAPES if "key head" in name or "shorter" in name]


@pytest.mark.parametrize("name", EMULATED)
def test_the_device_s_network_equals_numpy_s(name: str) -> None:
    native, numpy = both(*targets(), file_of(SHAPES[name]), rows=30)
    check_rings(native, numpy, [(1, 0), (35, 3)])


def check_a_long_memory(
    targets: tuple[LargeBackend, ReferenceBackend], rows: int, window: int | None, splits: int
) -> None:
    config = shaped(layers=1, kv_heads=1, block=16, windows=(window,), causal=(True,))
    native, numpy = both(*targets, file_of(config), rows=rows + 100)
    assert native.network.layout.splits == splits
    for draft in (native, numpy):
        draft.append(HostRows(features_of(rows, config)), 0)
    check_same(native, numpy, 5, rows, 15)


def test_long_memories_are_split() -> None:
    check_a_long_memory(targets(), rows=200, window=100, splits=SMS)


@pytest.mark.slow
def test_more_splits_than_are_merged_at_once() -> None:
    """Eleven chunks and the block's own."""
    with emulated_gpu(12, (8,), often=True):
        tensors = tensors_of(SHAPE, MIXED)
        pair = LargeBackend(SHAPE, tensors, context=1024), ReferenceBackend(SHAPE, tensors)
        check_a_long_memory(pair, rows=680, window=None, splits=12)


@pytest.mark.parametrize(("kv_heads", "block"), [(4, 2), (1, 9)])
def test_rows_are_there_before_anybody_attends_to_them(kv_heads: int, block: int) -> None:
    """Those that are appended: with a small block some SMs do nothing else, and nobody waits for their words. And the
    block's own."""
    with emulated_gpu(12, (8,), often=True):
        config = shaped(layers=1, kv_heads=kv_heads, block=block)
        cuda = LargeBackend(SHAPE, tensors_of(SHAPE, MIXED))
        network = CudaDraft(cuda, config, file_of(config).tensors, [100])

        def filled(before: bool) -> np.ndarray:
            draft = OneBlock(network)
            draft.append(HostRows(features_of(16, config)), 0)
            if before:
                network.project(draft.memory)
            return draft.fill(5, 16, block - 1, TOP).hidden.numpy()

        expected = filled(before=True)
        for _ in range(20):
            np.testing.assert_array_equal(filled(before=False), expected)


def test_no_word_is_left_for_the_next_launch() -> None:
    """Whoever polls would take it for this launch's."""
    config = shaped(layers=2, kv_heads=1)
    native, _ = both(*targets(), file_of(config), rows=200)
    network = native.network
    assert isinstance(network, CudaDraft)

    def project() -> None:
        native.append(HostRows(features_of(9, config)), 100)
        network.project(native.memory)

    native.append(HostRows(features_of(100, config)), 0)
    for launch in (lambda: native.fill(3, 100, 4, TOP), lambda: native.fill(3, 100, 4, TOP), project):
        launch()
        for words in map(network._scratch.get, POLLED):
            assert (words.read(np.uint32, (words.nbytes // 4,)) == NOT_YET).all()


@pytest.mark.parametrize("block", [2, 9, 15])
def test_blocks_of_other_sizes(block: int) -> None:
    config = shaped(layers=1, block=block)
    native, numpy = both(*targets(), file_of(config))
    for draft in (native, numpy):
        draft.append(HostRows(features_of(block, config)), 0)
    check_same(native, numpy, 5, block, block - 1)


OF_FOUR_TYPES = pytest.param("Q4_K/Q5_K/Q8_0/Q6_K", marks=pytest.mark.slow)


@pytest.mark.parametrize("kinds", ["F32", "F16", "BF16", "Q4_K/Q6_K/Q6_K", "Q5_0", OF_FOUR_TYPES])
def test_every_weight_type_is_computed(kinds: str) -> None:
    """Matrices of more than 8 bits are rounded to Q8_0, and those of two types whose rows share tiles; the others are
    as they are in the file. Keys and values of the context may be of several."""
    config = shaped(layers=1 if "/" not in kinds else 2)
    native, numpy = both(*targets(), file_of(config, kinds))
    for draft in (native, numpy):
        draft.append(HostRows(features_of(9, config)), 0)
    check_same(native, numpy, 5, 9, config.block - 1, CLOSE if kinds == "Q5_0" else 0.03)


@pytest.mark.parametrize(
    ("values", "order", "types"),
    [
        (("Q6_K", "Q4_K", "Q6_K"), [0, 2, 3, 4, 1, 5], ["Q4_K", "Q6_K"]),
        (("Q8_0", "Q5_K", "Q6_K"), [0, 1, 2, 3, 4, 5], ["Q8_0"]),
    ],
)
def test_keys_and_values_of_the_context_keep_their_types(
    values: tuple[str, ...], order: list[int], types: list[str]
) -> None:
    """Unless there are more types than a stage has parts."""
    config = shaped(layers=3, hidden=512)
    stored = dict.fromkeys(expected_shapes(config), "Q4_K")
    stored |= {f"layers.{i}.self_attn.v_proj.weight": kind for i, kind in enumerate(values)}
    stream = DraftStream(config, SMS, stored)
    context = stream.stages[1]
    assert [part.type for part in context.parts] == types
    pieces = [piece for part in context.parts for piece in part.pieces]
    assert [piece.first_row for piece in pieces] == [128 * config.kv_heads * i for i in range(6)]
    assert stream.context_order == order
    names = [f"layers.{i // 2}.self_attn.{'kv'[i % 2]}_proj" for i in order]
    assert [piece.tensor.removesuffix(".weight") for piece in pieces] == names


def test_the_head_goes_over_k_in_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each group of K, in a draft's program and in the one that has nothing but the head."""
    monkeypatch.setattr(SlabStages, "group_blocks", 1)
    monkeypatch.setattr(target_layout, "FEWER_GROUP_BLOCKS", 1)
    for module in (target_layout, layout, lent):
        monkeypatch.setattr(module, "GROUP_BLOCKS", 1)
    config = dataclasses.replace(SHAPE, heads=4, layers=2, recurrent=(True, False))
    tensors, of_draft = tensors_of(config, MIXED), shaped(layers=1, target_layers=(0, 1))
    with emulated_gpu(6, (8,), often=True):
        cuda, reference = LargeBackend(config, tensors), ReferenceBackend(config, tensors)
        assert len(cuda.lend_head().deal.first) == 2
        native, numpy = both(cuda, reference, file_of(of_draft))
        for draft in (native, numpy):
            draft.append(HostRows(features_of(9, of_draft)), 0)
        for root in (5, 6):
            check_same(native, numpy, root, 9, of_draft.block - 1)
        rows = np.random.default_rng(0).standard_normal((19, config.hidden)).astype(np.float32)
        for _ in range(2):
            got, expected = cuda.head(rows, Want("top", top=3)), reference.head(rows, Want("top", top=3))
            assert distance(got.top_logits, expected.top_logits) < CLOSE


def test_what_is_remembered_can_be_brought_back_and_is_a_sequence_s_own() -> None:
    config = shaped(layers=1)
    native, numpy = both(*targets(), file_of(config), rows=40)
    other = OneBlock(native.network)
    native.append(HostRows(features_of(19, config)), 0)
    saved = native.snapshot()
    assert held_bytes((saved, [], 19)) == 2 * 19 * 2 * 128 * 2 + 40 * 4  # keys and values of 19 rows; positions
    expected = native.fill(3, 19, 4, TOP).hidden.numpy()
    other.append(HostRows(features_of(30, config, 1)), 0)
    native.append(HostRows(features_of(30, config, 2)), 19)
    assert not np.array_equal(native.fill(3, 49, 4, TOP).hidden.numpy(), expected)
    native.restore(saved)
    np.testing.assert_array_equal(native.fill(3, 19, 4, TOP).hidden.numpy(), expected)
    native.forget()
    check_same(native, numpy, 3, 0, 4)


def test_rows_that_wait_are_projected_when_the_next_block_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or when there is no more room for them, or others do not follow: it is all the same to the draft."""
    config, (cuda, _) = shaped(layers=1), targets()

    def made() -> OneBlock:
        return OneBlock(CudaDraft(cuda, config, file_of(config).tensors, [200]))

    waited, hurried = made(), made()
    assert waited.network.layout.groups == 12
    monkeypatch.setattr(layout, "WAITING_BYTES", 3 * waited.network.layout.group_bytes)
    little, position = made(), 0
    for count, gap in ((100, 0), (7, 0), (70, 9)):
        position += gap
        features = features_of(count, config, position)
        for draft in (waited, little):
            draft.append(HostRows(features), position)
        for first in range(0, count, 16):
            hurried.append(HostRows(features[first : first + 16]), position + first)
            hurried.network.project(hurried.memory)
        position += count
    assert (waited.memory.waiting, waited.memory.appended) == (70, 107)
    assert little.memory.waiting <= 48
    expected = hurried.fill(3, position, 4, TOP).hidden.numpy()
    for draft in (waited, little):
        np.testing.assert_array_equal(draft.fill(3, position, 4, TOP).hidden.numpy(), expected)
        assert draft.memory.appended == 177
        places = draft.memory.buffers["positions"].read(np.int32, (177,))
        assert places.tolist() == [*range(107), *range(116, 186)]


def test_text_with_a_draft_is_plain_text() -> None:
    """Features go from the pass to the draft on the device; a draft of random weights is right now and then."""
    cuda, _ = targets()
    draft = DFlash(file_of(shaped(layers=1)), cuda, nodes=7)
    assert isinstance(draft.network, CudaDraft)
    prompt, texts = [3, 1, 4, 1, 5], []
    for proposer in (None, draft):
        scheduler = Scheduler(cuda, 64, proposer)
        texts.append(run(scheduler, prompt, Sampling(temperature=0), max_tokens=5))
    assert texts[0] == texts[1]


def test_beside_a_model_of_the_other_pass() -> None:
    """Which lends copies of its LM head and its embeddings."""
    tensors = random_tensors(SHAPE, 1)
    cuda, reference, config = WeightsFirstBackend(SHAPE, tensors), ReferenceBackend(SHAPE, tensors), shaped(layers=1)
    native, numpy = both(cuda, reference, file_of(config))
    for draft in (native, numpy):
        draft.append(HostRows(features_of(9, config)), 0)
    check_same(native, numpy, 5, 9, config.block - 1)


@pytest.mark.parametrize(
    ("large", "speaks", "own_head"),
    [(True, None, False), (False, None, False), (True, 192, False), (False, 192, False), (True, None, True)],
)
def test_a_draft_takes_what_was_planned(large: bool, speaks: int | None, own_head: bool) -> None:
    """Weights, copies that the target lends, what a launch writes, and the memories of two sequences."""
    shape = {"layers": 2, "windows": (7, None), "causal": (True, False)}
    config, context = shaped(**shape, speaks=speaks, own_head=own_head), 256
    tensors = tensors_of(SHAPE, MIXED) if large else random_tensors(SHAPE, 1)
    cuda = (LargeBackend if large else WeightsFirstBackend)(SHAPE, tensors, context=context)
    file, capacity = file_of(config), capacity_of(config, 100)
    assert not any("draft" in part.what for part in cuda.memory(context))
    before = cuda.device.held
    network = cuda.block_draft(file.config, file.tensors, capacity)
    assert network is not None
    memories = [network.new_memory() for _ in range(2)]
    parts = [part for part in cuda.memory(context, len(memories)) if "draft" in part.what]
    assert sum(part.nbytes for part in parts) == cuda.device.held - before
    stored = {name: tensor.type.name for name, tensor in tensors.items()}
    types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    target = cuda.layout if isinstance(cuda, LargeBackend) else None
    assert planned_draft(target, SHAPE, stored, SMS, config, types, capacity, context)[0] == parts[0]


def test_the_head_is_lent() -> None:
    """Of rows that are normed already, more than a launch takes."""
    cuda, reference = targets()
    rows = np.random.default_rng(0).standard_normal((19, SHAPE.hidden)).astype(np.float32)
    got, expected = cuda.head(rows, Want("top", top=3)), reference.head(rows, Want("top", top=3))
    assert distance(got.top_logits, expected.top_logits) < CLOSE
    assert distance(got.logsumexp, expected.logsumexp) < CLOSE
    tokens = [3, 1, 479]
    np.testing.assert_allclose(cuda.embed(tokens), reference.embed(tokens), rtol=1e-6)


def test_the_mtp_head_is_the_reference_s() -> None:
    """Rows in pieces, each over what was there before from its position on."""
    cuda, reference = targets()
    assert cuda.runs_mtp
    rng = np.random.default_rng(0)
    state, expected_state = cuda.new_state(64), reference.new_state(64)
    for position, count in ((0, 11), (11, 1), (9, 2)):
        tokens = rng.integers(0, SHAPE.vocab, count).tolist()
        hidden = rng.standard_normal((count, SHAPE.hidden)).astype(np.float32)
        want = Want("top", top=4, hidden=True)
        got = cuda.mtp(state, tokens, hidden, position, want)
        expected = reference.mtp(expected_state, tokens, hidden, position, want)
        assert got.top_ids is not None
        assert got.top_ids.shape == (1, 4)
        assert distance(got.hidden.numpy(), expected.hidden.numpy()) < CLOSE
        assert distance(got.top_logits, expected.top_logits) < CLOSE


def test_the_mtp_head_counts_against_the_model_s_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, _ = targets()
    state, hidden = cuda.new_state(64), np.zeros((1, SHAPE.hidden), np.float32)
    monkeypatch.setattr(cuda, "_mtp", None)
    held = cuda.device.held
    cuda.mtp(state, [3], hidden, 0)
    assert cuda._mtp is not None
    block = cuda._mtp.block
    assert cuda.device.held - held > block.stream.nbytes + block.outputs.logits.nbytes + block.outputs.features.nbytes


def test_rows_of_a_pass_are_taken_where_they_are() -> None:
    cuda, _ = targets()
    config = shaped(layers=1)
    a, b = (both(*targets(), file_of(config))[0] for _ in range(2))
    want = Want("none", features=config.target_layers)
    rows = cuda.prefill(cuda.new_state(32), [1, 2, 3, 4, 5], want).features
    assert rows is not None
    b_rows = HostRows(rows[[0, 2, 4]].numpy())
    a.append(rows[[0, 2, 4]], 0)
    b.append(b_rows, 0)
    np.testing.assert_array_equal(a.fill(3, 3, 4, TOP).hidden.numpy(), b.fill(3, 3, 4, TOP).hidden.numpy())


def test_shapes_that_are_taken() -> None:
    large = draft_of_the_27b()
    assert takes(large, 248_320)
    assert not takes(large, 248_321)
    stream = DraftStream(large, 132, dict.fromkeys(expected_shapes(large), "BF16 to Q8_0"))
    assert 1.8e9 < stream.stream_bytes < 2.0e9  # 1.73 billion weights, keys' and values' twice
    assert not takes(shaped(head_dim=64), 480)
    assert not takes(shaped(ffn=320), 480)
    assert not takes(shaped(block=17), 480)
