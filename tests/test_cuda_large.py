"""The activations-first forward pass: how its work is dealt, and what it computes on an emulated GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from device_checks import (
    check_decoded,
    check_drawn,
    check_last_path,
    check_smaller_than_its_room,
    check_verified,
    distance,
    plain_run,
    relative,
    same_state,
)
from emulator.gpu import emulated_gpu
from large_cases import BOUND, CACHES, MIXED, SHAPE, bound_of, remember, rounded_caches, tensors_of
from random_models import random_tree
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.large import layout
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.large.deal import GROUP_BLOCKS, deal_groups
from warpsmith.backend.cuda.large.formats import SLABS
from warpsmith.backend.cuda.large.layout import LargeLayout, takes
from warpsmith.backend.cuda.large.loading import changes
from warpsmith.backend.cuda.large.rounds import rounds_of
from warpsmith.backend.cuda.large.stream import PARCEL_UNIT
from warpsmith.backend.cuda.memory.exchange import NOT_YET
from warpsmith.backend.cuda.structures import Commit, Path
from warpsmith.backend.cuda.weights.loading import warn_of_changes
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import MAX_NODES, Tree
from warpsmith.checkpoint.convert import RECIPES, tensor_type
from warpsmith.model.config import SIZES, Config
from warpsmith.model.weights import expected_shapes

LONG = 16448  # tokens: too many for builds for short contexts, and more chunks of keys than splits of them


@contextmanager
def emulated(
    config: Config,
    types: dict[str, str],
    caches: tuple[str, str] = ("f16", "f16"),
    sms: int = 6,
    variants: tuple[int, ...] = (1, 8),
    times: dict[str, float] | None = None,
    context: int = LONG,
) -> Iterator[tuple[LargeBackend, ReferenceBackend]]:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    tensors, (keys, values) = tensors_of(config, types, times), caches
    with emulated_gpu(sms, variants, often=True), rounded_caches(caches):
        cuda = LargeBackend(config, tensors, context=context, cache_type_k=keys, cache_type_v=values)
        yield cuda, ReferenceBackend(config, tensors)


# -- how work is dealt -------------------------------------------------------------------------------------------------


@given(st.integers(1, 80), st.integers(12, 160), st.sampled_from([7, 8]))
@settings(deadline=None)
def test_groups_cover_k_and_every_sm_has_one(blocks: int, sms: int, most: int) -> None:
    groups = deal_groups(blocks, sms, most)

    assert [g.first_block for g in groups] == np.cumsum([0, *(g.blocks for g in groups[:-1])]).tolist()
    assert sum(g.blocks for g in groups) == blocks
    assert sum(g.sms for g in groups) == sms
    assert len(groups) == -(-blocks // most)  # as many as the kernels count on
    assert all(1 <= g.blocks <= most and g.sms >= 1 for g in groups)


@pytest.mark.parametrize("size", ["27B", "9B", "4B", "2B", "0.8B"])
def test_groups_are_small_where_that_makes_no_more_of_the_residual_stream_s(size: str) -> None:
    config = SIZES[size]
    layout = LargeLayout(config, 132, dict.fromkeys(expected_shapes(config), "Q4_K"))

    assert layout.group_blocks == (8 if config.hidden in (2048, 4096) else 7)
    assert layout.constants(24)["GROUP_BLOCKS"] == layout.group_blocks
    # a draft's kernels, which multiply with the model's head, count on groups of up to eight
    assert len(layout.deals[-1].groups) == -(-config.hidden // 256 // GROUP_BLOCKS)
    assert max(group.blocks for deal in layout.deals for group in deal.groups) <= layout.group_blocks


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
        assert starts[0] == layout.stage_at[number]
        assert ends[-1] - starts[0] == deal.nbytes.sum()  # no room is left between them
        assert (np.diff(deal.tables, axis=1) >= 1).all()  # every tile of rows has a result in every group of K
        assert deal.tables.max() == deal.results
    slowest = sum(int(deal.nbytes.max()) for deal in layout.deals) * 132 / layout.stream_bytes
    assert slowest < (1.05 if size == "27B" else 1.12)


@pytest.mark.parametrize(("size", "recipe"), [("27B", "q4_k_m"), ("4B", "q4_k_m"), ("0.8B", "q8_0")])
def test_who_copies_finds_every_block_in_its_turn(size: str, recipe: str) -> None:
    """By the list of parcels, which lie by turns: the n-th of one SM behind the n-th of the SM before."""
    config, sms = SIZES[size], 132
    shapes = expected_shapes(config)
    stored = {n: tensor_type(recipe, n, shape, config.layers, config.tied).name for n, shape in shapes.items()}
    layout = LargeLayout(config, sms, stored)

    for number in (0, 1, 2, 3, 12, 15, len(layout.stages) - 1):
        deal, places, by_turns = layout.deals[number], layout.offsets(number), []
        for sm in range(sms):
            at = layout.first_parcel[number][sm]
            for first, count, group in zip(
                deal.first[:, sm], deal.count[:, sm], (deal.groups[n] for n in deal.group_of[:, sm]), strict=True
            ):
                tiles, blocks = np.divmod(np.arange(first, first + count), group.blocks)
                own = list(zip(tiles, blocks + group.first_block, strict=True))
                while own:
                    nbytes = deal.stage.tile_bytes[own[0][0]]
                    of_other_types = [n for n, (tile, _) in enumerate(own) if deal.stage.tile_bytes[tile] != nbytes]
                    together = min([deal.stage.parcel_blocks[own[0][0]], len(own), *of_other_types[:1]])
                    begins = int(layout.parcels[at]) * PARCEL_UNIT
                    assert [places[pair] for pair in own[:together]] == [begins + i * nbytes for i in range(together)]
                    by_turns.append((at - layout.first_parcel[number][sm], sm, begins))
                    at, own = at + 1, own[together:]
            after = layout.first_parcel[number + 1 :, sm]
            assert at == (after[0] if len(after) else [*layout.first_parcel[0, 1:], len(layout.parcels) - 64][sm])
        assert [begins for *_, begins in sorted(by_turns)] == sorted(begins for *_, begins in by_turns)


@pytest.mark.parametrize(("size", "ffn", "tags"), [("27B", 17408, 7), ("4B", 9216, 7), ("27B", 2048, 15)])
def test_sums_are_told_from_those_that_were_in_their_place(size: str, ffn: int, tags: int) -> None:
    """With a narrow MLP some places are a DeltaNet's alone: beside attention eight stages lie between two of them."""
    config = dataclasses.replace(SIZES[size], ffn=ffn)
    layout = LargeLayout(config, 132, dict.fromkeys(expected_shapes(config), "Q4_K"))
    stages = [*enumerate(layout.deals[:-1])]

    for of_one_place in (stages, stages[::2], stages[1::2]):  # a tree's, and one node's two
        held = np.full(layout.layer_results, -1)
        for stage, deal in of_one_place:
            assert ((held[: deal.results] ^ stage) & layout.sum_tags != 0).all()
            held[: deal.results] = stage
    assert layout.sum_tags == layout.constants(24)["SUM_TAGS"] == tags


def test_kernels_know_the_type_of_every_tile_and_pause_only_where_it_changes() -> None:
    config = SIZES["27B"]
    shapes = expected_shapes(config)
    stored = {n: tensor_type("q4_k_m", n, shape, config.layers, config.tied).name for n, shape in shapes.items()}
    layout = LargeLayout(config, 132, stored)
    stages, runs, _ = layout.tables

    changes_of = []
    for number, stage in enumerate(layout.stages):
        second, third, types = runs[number, 0, 6:9].tolist()
        told = [types >> (0 if tile < second else 8 if tile < third else 16) & 255 for tile in range(stage.tiles)]
        meant = [SLABS.index(part.type) for part in stage.parts for _ in range(part.tiles)]
        changes_of.append([tile for tile in range(1, stage.tiles) if meant[tile] != meant[tile - 1]])
        assert told == meant
        assert [end for end in (second, third) if end < stage.tiles] == changes_of[-1]
    assert {len(where) for where in changes_of} == {0, 1}  # both are there
    assert (stages[:, 0] % 8 == 0).all()  # tables are read sixteen bytes at a time


def test_what_is_held_as_another_type_is_told(caplog: pytest.LogCaptureFixture) -> None:
    types = {"ffn_gate": "Q4_0", "ffn_up": "Q4_0", "ssm_out": "F32", "ssm_a": "BF16", "ssm_b": "BF16"}
    tensors = tensors_of(SHAPE, types | {"token_embd": "Q4_0"})
    layout = LargeLayout(SHAPE, 6, {name: tensor.type.name for name, tensor in tensors.items()})

    warn_of_changes(changes(layout, tensors))

    embedding, woven = 480 * 512 * (2 - 18 / 32), 6 * 3328 * 512 * (4416 / 4096 - 18 / 32)
    assert caplog.messages == [
        "2 tensors of type F32 are rounded to BF16.",
        f"6 tensors of type Q4_0 are held as Q8_0, which takes {woven / 2**20:.1f} MiB more than their file.",
        f"1 tensors of type Q4_0 are rounded to BF16, which takes {embedding / 2**20:.1f} MiB more than their file.",
    ]


def test_a_shape_that_superblocks_do_not_divide_is_not_taken() -> None:
    assert not takes(dataclasses.replace(SHAPE, ffn=3360))
    assert not takes(dataclasses.replace(SHAPE, heads=20, kv_heads=2))
    assert takes(SHAPE)


# -- trees of more nodes than a launch takes ---------------------------------------------------------------------------


@given(st.integers(1, 64), st.integers(1, 64), st.integers(2, 24), st.integers(0, 1000))
@settings(deadline=None)
def test_rounds_are_subtrees_whose_paths_have_run(nodes: int, reach: int, most: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(max(0, i - reach), i)) for i in range(1, nodes))]
    rounds, ran = rounds_of(parents, most), set[int]()
    for part in rounds:
        assert len(part.nodes) <= most
        assert set(part.path) <= ran
        assert part.parents[0] == -1
        assert [part.nodes[p] for p in part.parents[1:]] == [parents[n] for n in part.nodes[1:]]
        above = [*part.path, part.nodes[0]]
        assert [-1, *above[:-1]] == [parents[n] for n in above]
        assert part is rounds[0] or not set(part.nodes) <= ran
        ran |= set(part.nodes)
    assert ran == set(range(nodes))


# -- on an emulated GPU ------------------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=[] if each == CACHES[1] else pytest.mark.slow) for each in CACHES],
    ids="-".join,
)
def both(request: pytest.FixtureRequest) -> Iterator[tuple[LargeBackend, ReferenceBackend]]:
    with emulated(SHAPE, MIXED, request.param) as backends:
        yield backends


def test_features_and_logits_are_those_of_the_reference(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = both
    state, expected = cuda.new_state(128), reference.new_state(128)
    want, rng = Want("logits", features=(0, 1, 2), hidden=True), np.random.default_rng(0)
    for nodes in (1, 5, 8):
        tree = random_tree(rng, nodes, SHAPE.vocab)
        got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
        assert relative(got.features.numpy(), exact.features.numpy()) < bound_of(cuda)
        assert relative(got.hidden.numpy(), exact.hidden.numpy()) < bound_of(cuda)
        assert relative(got.logits.numpy(), exact.logits.numpy()) < bound_of(cuda)
        for backend, each in ((cuda, state), (reference, expected)):
            backend.commit(each, tree.path(nodes - 1))


def test_a_tree_s_rows_are_those_of_plain_decoding(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = both
    tree = random_tree(np.random.default_rng(1), 8, SHAPE.vocab)
    check_last_path(cuda, cuda.new_state(64), cuda.new_state(64), tree)


def test_activations_may_be_far_from_one() -> None:
    """Too small for fp16 as they are, or too large, some superblocks and not others: these are scaled, and their sums
    scaled back. The MLP is nearly all of the residual stream here, and its error twice that of a projection."""
    times = {"token_embd": 2**-14, "ffn_gate": 2**4, "ffn_up": 2**7}
    with emulated(SHAPE, MIXED, CACHES[1], times=times) as (cuda, reference):  # the kernels of the tests above
        state, expected, plain = cuda.new_state(64), reference.new_state(64), cuda.new_state(64)
        tree = random_tree(np.random.default_rng(4), 8, SHAPE.vocab)
        got = cuda.forward([(state, tree)], LOGITS).logits.numpy()
        assert relative(got, reference.forward([(expected, tree)], LOGITS).logits.numpy()) < 2 * BOUND
        path = tree.path(7)
        np.testing.assert_array_equal(got[path], plain_run(cuda, plain, tree.tokens[path]))


def test_units_that_two_warps_share_have_the_bits_of_plain_decoding() -> None:
    """SMs with five and with six units of a DeltaNet's states: eight warps walk them in halves."""
    config = dataclasses.replace(SHAPE, value_heads=2, layers=2, recurrent=(True, False), ffn=512)
    with emulated(config, MIXED) as (cuda, _):
        tree = random_tree(np.random.default_rng(5), 8, config.vocab)
        check_last_path(cuda, cuda.new_state(64), cuda.new_state(64), tree)


@pytest.mark.parametrize("rounds", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_head_goes_over_k_in_rounds(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    """One for each group of K: an even number of stages in a token, and an odd one."""
    for name in ("GROUP_BLOCKS", "FEWER_GROUP_BLOCKS"):
        monkeypatch.setattr(layout, name, 1)
    narrow = {"layers": 2, "recurrent": (True, False), "ffn": 512, "heads": 4}
    config = dataclasses.replace(SHAPE, hidden=256 * rounds, **narrow)
    with emulated(config, MIXED) as (cuda, reference):
        assert cuda.layout.tables[1].shape[0] == 4 * config.layers + rounds
        state, expected, rng = cuda.new_state(64), reference.new_state(64), np.random.default_rng(7)
        tree = random_tree(rng, 8, config.vocab)
        got, exact = cuda.forward([(state, tree)], LOGITS), reference.forward([(expected, tree)], LOGITS)
        assert relative(got.logits.numpy(), exact.logits.numpy()) < bound_of(cuda)
        check_last_path(cuda, state, cuda.new_state(64), tree)
        check_decoded(cuda, 4)


@pytest.mark.slow
def test_a_build_for_more_nodes_has_the_same_bits() -> None:
    """Where SMs that share a key head convolve a part of its q and k each, a tile's sums have one buffer, and attention
    has one chunk of values."""
    with emulated(SHAPE, MIXED, variants=(1, 24), context=128) as (cuda, _):
        state, plain, rng = cuda.new_state(128), cuda.new_state(128), np.random.default_rng(3)
        for _ in range(2):
            check_last_path(cuda, state, plain, random_tree(rng, 22, SHAPE.vocab))
        check_smaller_than_its_room(cuda, 3, 24)


@pytest.mark.parametrize("nodes", [1, 5])
def test_a_tree_on_the_device_may_be_smaller_than_its_room(
    both: tuple[LargeBackend, ReferenceBackend], nodes: int
) -> None:
    check_smaller_than_its_room(both[0], nodes, 8)


@pytest.mark.slow  # test_cuda_large_chips.py has a smaller one
def test_a_tree_of_many_launches_has_the_bits_of_plain_decoding(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = both
    nodes, length = 22, 60
    tree = random_tree(np.random.default_rng(6), nodes, SHAPE.vocab)
    states = [cuda.new_state(128) for _ in range(2)]
    for each in states:
        remember(cuda, each, reference, reference.new_state(128), length, np.random.default_rng(length))
    state, plain = states
    want = Want("logits", features=(0, 2), hidden=True)
    got, path = cuda.forward([(state, tree)], want), tree.path(nodes - 1)
    logits, features, hidden = got.logits.numpy(), got.features.numpy(), got.hidden.numpy()
    np.testing.assert_array_equal(got.argmax, logits.argmax(axis=-1))
    for row, token in enumerate(tree.tokens[path]):
        one = cuda.forward([(plain, Tree.chain([token]))], want)
        for some, all_of_it in ((one.logits, logits), (one.features, features), (one.hidden, hidden)):
            np.testing.assert_array_equal(some.numpy()[0], all_of_it[path[row]])
        cuda.commit(plain, [0])
    cuda.commit(state, path)
    assert same_state(SHAPE, state, plain)


def test_decoding_on_the_device_is_forward_after_forward(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    check_decoded(both[0], 3)


def test_no_word_is_left_for_the_next_launch(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    """Whoever polls would take it for this launch's."""
    cuda, _ = both
    state = cuda.new_state(64)
    tree = random_tree(np.random.default_rng(0), 5, SHAPE.vocab)
    for run in (
        lambda: cuda.forward([(state, Tree.chain([7]))]),
        lambda: cuda.forward([(state, tree)]),
        lambda: cuda.decode(state, 7, 2),
    ):
        run()
        for words in (cuda.scratch["words"], cuda.scratch["sums"]):
            assert (words.read(np.uint32, (words.nbytes // 4,)) == NOT_YET).all()


@pytest.mark.parametrize(("length", "nodes"), [(63, 8), (300, 8), (4300, 2)])
def test_a_long_past_is_attended_to_as_the_reference_does(
    both: tuple[LargeBackend, ReferenceBackend], length: int, nodes: int
) -> None:
    cuda, reference = both
    state, expected = cuda.new_state(length + 64), reference.new_state(length + 64)
    rng = np.random.default_rng(length)
    remember(cuda, state, reference, expected, length, rng)
    tree, want = random_tree(rng, nodes, SHAPE.vocab), Want("logits", features=(0, 1))
    got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
    mixed, known = (each.features.groups([1], of=2).numpy() for each in (got, exact))
    assert distance(mixed, known) < bound_of(cuda)
    assert distance(got.logits.numpy(), exact.logits.numpy()) < bound_of(cuda)


def test_rows_and_states_do_not_depend_on_the_tree_at_any_length(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    """Positions cross from one chunk of keys to the next inside the tree."""
    cuda, reference = both
    rng = np.random.default_rng(4)
    tree = random_tree(rng, 8, SHAPE.vocab)
    path = tree.path(7)
    length = dict(zip(CACHES, (61, 126, 190), strict=True))[cuda.cache_types]  # one each: all of them take minutes
    state, plain = cuda.new_state(256), cuda.new_state(256)
    for each in (state, plain):
        remember(cuda, each, reference, reference.new_state(256), length, np.random.default_rng(length))
    rows = cuda.forward([(state, tree)], LOGITS).logits.numpy()[path]
    np.testing.assert_array_equal(rows, plain_run(cuda, plain, tree.tokens[path]))
    cuda.commit(state, path)
    assert same_state(SHAPE, state, plain)


def test_a_long_path_leaves_what_its_parts_leave(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    """What nodes wrote is shared some nodes at a time."""
    cuda, _ = both
    rng = np.random.default_rng(8)
    whole, parts = cuda.new_state(64), cuda.new_state(64)
    for name in whole.pending:
        rows = rng.standard_normal(whole.pending[name].nbytes // 4, dtype=np.float32) * 0.1
        for state in (whole, parts):
            state.pending[name].write(rows)
    path = rng.permutation(MAX_NODES)[:41].tolist()
    for state, cuts in ((whole, (0, 41)), (parts, (0, 9, 25, 41))):
        for first, end in pairwise(cuts):
            nodes = (ctypes.c_int * MAX_NODES)(*path[first:end])
            cuda.queue_commit(state, Commit(path=Path(end - first, nodes)))
            state.take_new()
            state.length += end - first
    assert same_state(SHAPE, whole, parts)
    for state in (whole, parts):
        assert state.delta.read(np.float32, (state.delta.nbytes // 4,)).any()
    histories = [state.history.read(np.uint32, (state.history.nbytes // 4,)) for state in (whole, parts)]
    np.testing.assert_array_equal(*histories)


def test_a_snapshot_keeps_the_rows_in_use(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = both
    state, other = cuda.new_state(64), cuda.new_state(80)
    cuda.prefill(state, [3, 1, 4, 1, 5])
    kept = cuda.snapshot(state)
    assert kept.nbytes == cuda.snapshot_bytes(5)
    cuda.restore(other, kept)
    tree = Tree.chain([9, 2])
    rows = [cuda.forward([(each, tree)], LOGITS).logits.numpy() for each in (state, other)]
    np.testing.assert_array_equal(*rows)


@pytest.mark.slow  # test_cuda_large_chips.py has another
def test_tokens_are_drawn_as_the_sampler_draws_them(both: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = both
    cuda.undecided = 0
    check_drawn(cuda, Sampling(temperature=0.9, top_k=5, top_p=0.95, repeat_penalty=1.2, seed=7), 3)
    check_drawn(cuda, Sampling(temperature=1.0, min_p=0.05, logit_bias={5: 2.0, 300: -100.0}, seed=2), 2)
    assert cuda.undecided == 0  # all on the device
    assert not cuda._decoder.takes(frozenset(), Sampling(temperature=1.0, top_k=200), [])


def test_a_sampled_tree_is_verified_without_its_logits(
    both: tuple[LargeBackend, ReferenceBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_verified(both[0], Sampling(temperature=0.9, top_k=20, presence_penalty=0.5, seed=7), 0, monkeypatch)
