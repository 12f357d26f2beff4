"""Steps that the device makes by itself, on an emulated GPU: the host's tree, the sampler's walk, and plain text."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_draft_cases import file_of
from draft_cases import run
from emulator.gpu import emulated_gpu
from large_cases import MIXED, tensors_of
from large_cases import SHAPE as LARGER
from random_drafts import draft_config
from random_models import random_tree
from test_ddtree import random_marginals
from warpsmith.backend.base import Listener, Output, Want
from warpsmith.backend.cuda.draft.network import CudaDraft
from warpsmith.backend.cuda.draft.step import CudaGrowingTree, StepProgram, growth
from warpsmith.backend.cuda.draft.structures import Grow
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import Prices
from warpsmith.draft.ddtree import best_tree, marginals
from warpsmith.draft.dflash import DFlash
from warpsmith.engine.loop import Generation, Step
from warpsmith.engine.scheduler import Scheduler
from warpsmith.errors import BadRequest
from warpsmith.measure.assumed import Assumed

SMS, CONTEXT = 3, 128
NARROW = {"hidden": 256, "ffn": 256, "heads": 6, "kv_heads": 1, "key_heads": 1, "value_heads": 3, "vocab": 256}
SHAPE = replace(LARGER, layers=2, recurrent=(True, False), **NARROW)
DRAFT = draft_config(SHAPE, layers=1, ffn=256, heads=2, kv_heads=1, head_dim=128, target_layers=(0, 1), block=7)


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    with emulated_gpu(SMS, (1, 8), often=True):
        yield


@cache
def target() -> LargeBackend:
    return LargeBackend(SHAPE, tensors_of(SHAPE, MIXED))


@cache
def program() -> StepProgram:
    return StepProgram(target())


@cache
def draft() -> DFlash:
    made = DFlash(file_of(DRAFT), target(), nodes=7)
    assert isinstance(made.network, CudaDraft)
    return made


def growing_of(grow: Grow) -> CudaGrowingTree:
    network = draft().network
    assert isinstance(network, CudaDraft)
    return CudaGrowingTree(network, network.new_memory(), program(), grow)


def believed(ids: np.ndarray, log_probs: np.ndarray) -> Output:
    """Beliefs as top.cu leaves them: in single precision, over a sum."""
    total = np.linspace(3, 40, len(ids)).astype(np.float32)
    logits = (log_probs + total[:, None]).astype(np.float32)
    rows = np.concatenate([ids.astype(np.int32), logits.view(np.int32), total[:, None].view(np.int32)], axis=1)
    target().outputs.top._out.write(np.ascontiguousarray(rows))
    return Output(top_ids=ids, top_logits=logits, logsumexp=total)


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 15), st.integers(1, 16), st.integers(1, 63), st.booleans(), st.booleans(),
    st.floats(0.0, 0.2),
)  # fmt: skip
def test_the_tree_is_the_host_s(
    seed: int, depth: int, width: int, nodes: int, coarse: bool, holes: bool, price: float
) -> None:
    """Of equal paths too, with beliefs that are not numbers, and up to what further nodes must promise."""
    ids, log_probs = random_marginals(seed, depth, width, coarse)
    if holes:
        log_probs[seed % depth, seed % width :] = -np.inf if seed % 2 else np.nan
    prices = Prices(1.0, [price] * 64)
    expected = best_tree(7, *marginals(believed(ids, log_probs)), nodes, prices=prices)
    grow = growth(7, depth, width, nodes, 1 + seed % nodes, prices.least)
    assert grow is not None
    growing_of(grow)
    report = program().report
    assert report.grown == len(expected)
    assert report.verified == min(len(expected), 2 + seed % nodes)
    assert report.tree_tokens[: report.grown] == expected.tokens.tolist()
    assert report.tree_parents[: report.grown] == expected.parents.tolist()
    assert report.scores[: report.grown] == expected.scores.tolist()


def test_what_the_kernel_cannot_grow_is_left_to_the_host() -> None:
    for depth, width, nodes in ((16, 4, 8), (15, 17, 8), (15, 16, 64), (0, 4, 8)):
        assert growth(7, depth, width, nodes, nodes, []) is None


SAMPLINGS = [
    None,
    Sampling(temperature=0.8, seed=5, top_k=20, top_p=0.95),
    Sampling(temperature=1.3, seed=8, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_walk_and_the_commit_are_the_host_s(sampling: Sampling | None) -> None:
    """Trees that hold what the sampler takes for several levels, of one state and then of the next."""
    backend, rng = target(), np.random.default_rng(3)
    ours, theirs = backend.new_state(CONTEXT), backend.new_state(CONTEXT)
    for state in (ours, theirs):
        backend.prefill(state, [3, 1, 4, 1, 5], Want("none"))
    want = Want("argmax" if sampling is None else "logits", features=(0, 1))
    root = 9
    for step in (3, 1):
        plain = list(backend.decode(theirs, root, step, sampling=sampling, history=[root]))
        backend.restore(theirs, backend.snapshot(ours))
        tree = random_tree(rng, 8, SHAPE.vocab)
        tokens, node = tree.tokens.copy(), 0
        tokens[0] = root
        for level in range(step):  # the first child of each is right
            children = np.flatnonzero(tree.parents == node)
            if not len(children):
                break
            tokens[children], node = plain[level], children[0]
        tree = Tree(tokens, tree.parents)
        backend.forward([(theirs, tree)], want)
        path, decided = backend.verify(theirs, tree, sampling, [root])
        backend.commit(theirs, path)
        believed(*random_marginals(step, 5, 4))
        grow = growth(root, 5, 4, 7, 7, [])
        assert grow is not None
        growing = growing_of(grow)
        growing.instead(tree)
        seen = growing.verify(ours, want, sampling, [root], frozenset())
        assert (seen.path, seen.decided) == (path, decided)
        assert seen.tree is not None
        assert np.array_equal(seen.tree.tokens, tree.tokens)
        assert seen.output.features is not None
        backend.commit(ours, seen.path)
        same(backend, ours, theirs)
        root = decided[-1]


def same(backend: LargeBackend, one: object, other: object) -> None:
    for a, b in zip(backend.snapshot(one).data, backend.snapshot(other).data, strict=True):  # type: ignore[arg-type]
        assert np.array_equal(a.read(np.uint8, (a.nbytes,)), b.read(np.uint8, (b.nbytes,)))


def test_a_shorter_path_may_be_committed() -> None:
    """And what was not committed never happened."""
    backend = target()
    ours, theirs = backend.new_state(CONTEXT), backend.new_state(CONTEXT)
    for state in (ours, theirs):
        backend.prefill(state, [3, 1, 4, 1, 5], Want("none"))
    plain = list(backend.decode(theirs, 9, 5))
    backend.restore(theirs, backend.snapshot(ours))
    believed(*random_marginals(0, 5, 4))
    grow = growth(9, 5, 4, 7, 7, [])
    assert grow is not None
    growing = growing_of(grow)
    growing.instead(Tree.chain([9, *plain[:4]]))
    seen = growing.verify(ours, Want("argmax"), None, [], frozenset(plain[2:3]))
    assert seen.decided == plain[: plain.index(plain[2]) + 1]  # up to a token to stop at
    backend.commit(ours, seen.path[:2])
    assert ours.length == 7
    list(backend.decode(theirs, 9, 2))
    assert theirs.length == 7
    same(backend, ours, theirs)


@pytest.mark.parametrize("cut", [2, pytest.param(6, marks=pytest.mark.slow)])
def test_the_next_pass_is_queued_before_anybody_has_looked(cut: int) -> None:
    """It is the next step's if the whole path is committed; else what it wrote over is made again."""
    backend, network = target(), draft().network
    assert isinstance(network, CudaDraft)
    ours, theirs, memory = backend.new_state(CONTEXT), backend.new_state(CONTEXT), network.new_memory()
    for state in (ours, theirs):
        backend.prefill(state, [3, 1, 4, 1, 5], Want("none"))
    plain = list(backend.decode(theirs, 9, 8))
    backend.restore(theirs, backend.snapshot(ours))
    believed(np.array([[plain[d], 470 + d] for d in range(5)]), np.array([[-0.1, -3.0]] * 5))
    grow, want = growth(9, 5, 2, 7, 7, []), Want("argmax", features=DRAFT.target_layers)
    assert grow is not None
    seen = CudaGrowingTree(network, memory, program(), grow, again=True).verify(ours, want, None, [], frozenset())
    assert seen.decided == plain[:6]
    assert seen.output.features is not None
    with pytest.raises(BadRequest, match="gone"):  # the next pass writes its own there
        seen.output.features.numpy()
    backend.commit(ours, seen.path[:cut])
    if cut == 6:
        network.append(memory, seen.output.features[seen.path], 5)
        assert memory.ahead is not None
        queued, memory.asked, network._step = memory.ahead.growing, (5, 2, 7, 7), program()
        growing = network.grow(memory, plain[5], ours.length, 5, 2, 7, 7, [])
        assert growing is not None
        assert growing is queued
        after = growing.verify(ours, want, None, [], frozenset())
        assert after.decided[0] == plain[6]
        assert 0 < after.commit_seconds < 60, "that of the first path, which was queued behind its walk"
        assert seen.draft_seconds is None, "nobody knows when its beliefs were asked for"
        assert after.draft_seconds is not None
        assert 0 < after.draft_seconds < 60
        backend.commit(ours, after.path)
        cut += len(after.path)
    list(backend.decode(theirs, 9, cut))
    same(backend, ours, theirs)


def test_an_interrupted_step_has_not_happened() -> None:
    backend = target()
    ours, theirs = backend.new_state(CONTEXT), backend.new_state(CONTEXT)
    for state in (ours, theirs):
        backend.prefill(state, [3, 1, 4, 1, 5], Want("none"))
    believed(*random_marginals(0, 5, 4))
    grow = growth(9, 5, 4, 7, 7, [])
    assert grow is not None
    growing_of(grow).verify(ours, Want("argmax"), None, [], frozenset())  # and no commit
    same(backend, ours, theirs)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=10, seed=3)])
def test_text_of_unseen_trees_is_plain_text(sampling: Sampling) -> None:
    """With guesses that are right for several levels, by assumption, and tokens a step as the host's trees decide."""
    prompt, texts, seen = [3, 1, 4, 1, 5], [], list[Step]()
    assumed = Assumed(draft(), 2.5, SHAPE.vocab)
    for proposer in (None, assumed):
        scheduler = Scheduler(target(), CONTEXT, proposer)
        generation = Generation(scheduler, prompt, sampling, max_tokens=9, on_step=seen.append if proposer else None)
        texts.append([token for piece in generation for token in piece])
        assumed.expect(len(prompt), texts[0])
    assert texts[0] == texts[1]
    stats = generation.stats
    parts = stats.draft_seconds, stats.forward_seconds, stats.verify_seconds - stats.forward_seconds
    assert min(parts) > 0
    assert stats.draft_seconds + stats.verify_seconds + stats.commit_seconds > 0.9 * stats.decode_seconds
    assert max(len(step.accepted) for step in seen) > 1
    assert all(step.decided[:-1] == step.tree.tokens[step.accepted[1:]].tolist() for step in seen)


def test_unseen_trees_are_those_of_the_host() -> None:
    """The same draft after the same text: seen and unseen."""
    trees = []
    for unseen in (True, False):
        scheduler, steps = Scheduler(target(), CONTEXT, draft()), list[Step]()
        generation = Generation(scheduler, [3, 1, 4, 1, 5], max_tokens=6, on_step=steps.append)
        generation.unseen = unseen
        list(generation)
        trees.append([(step.tree.tokens.tolist(), step.tree.parents.tolist()) for step in steps])
    assert trees[0] == trees[1]


def test_what_is_projected_ahead_is_what_the_host_appends() -> None:
    """Rows of paths of several nodes, and none that were not committed."""
    plain = run(Scheduler(target(), CONTEXT), [3, 1, 4, 1, 5], Sampling(), max_tokens=12)
    network, rings = draft().network, []
    assert isinstance(network, CudaDraft)
    for unseen in (True, False):
        assumed = Assumed(draft(), 2.5, SHAPE.vocab)
        assumed.expect(5, plain)
        generation = Generation(Scheduler(target(), CONTEXT, assumed), [3, 1, 4, 1, 5], max_tokens=12)
        generation.unseen = unseen
        list(generation)
        memory = generation.sequence.draft.network
        network.project(memory)
        assert memory.appended == generation.sequence.state.length
        saved = network.snapshot(memory)
        rings.append(
            [saved.buffers[name].read(np.uint16, (saved.buffers[name].nbytes // 2,)) for name in ("keys", "values")]
        )
        rings[-1].append(saved.buffers["positions"].read(np.int32, (memory.appended,)))
    for ahead, appended in zip(*rings, strict=True):
        assert np.array_equal(ahead, appended)


def test_text_ends_where_it_would() -> None:
    """At a token to stop at, and where somebody who listens says so, in the middle of what a step decided."""
    plain = run(Scheduler(target(), CONTEXT), [3, 1, 4, 1, 5], Sampling(), max_tokens=9)
    assumed = Assumed(draft(), 4.0, SHAPE.vocab)
    assumed.expect(5, plain)
    scheduler = Scheduler(target(), CONTEXT, assumed)
    for end in (1, 4):
        heard: list[int] = []

        def until(token: int, end: int = end, heard: list[int] = heard) -> bool:
            heard.append(token)
            return len(heard) == end

        generation = Generation(scheduler, [3, 1, 4, 1, 5], max_tokens=9, until=until)
        assert [token for piece in generation for token in piece] == plain[:end]
        assert heard == plain[:end]
        stopped = Generation(scheduler, [3, 1, 4, 1, 5], max_tokens=9, stop_ids=frozenset([plain[end]]))
        assert [token for piece in stopped for token in piece] == plain[: plain.index(plain[end]) + 1]


class Interrupted(BaseException):
    pass


def test_a_request_may_be_interrupted_in_the_middle_of_a_step() -> None:
    """When its tokens are decided and not yet committed; the next one on the same state is right."""
    plain = run(Scheduler(target(), CONTEXT), [3, 1, 4, 1, 5], Sampling(), max_tokens=9)
    assumed = Assumed(draft(), 4.0, SHAPE.vocab)
    assumed.expect(5, plain)
    scheduler = Scheduler(target(), CONTEXT, assumed)
    for heard in (2, 5):
        left = iter(range(heard))

        def until(token: int, left: Iterator[int] = left) -> bool:
            if next(left, None) is None:
                raise Interrupted
            return False

        with pytest.raises(Interrupted):
            list(Generation(scheduler, [3, 1, 4, 1, 5], max_tokens=9, until=until))
        assert run(scheduler, [3, 1, 4, 1, 5], Sampling(), max_tokens=9) == plain


def test_two_sequences_draft_side_by_side() -> None:
    """And one of them goes on alone, with what it knows."""
    prompts, lengths = ([3, 1, 4, 1, 5], [9, 2, 6]), (4, 8)
    plain = [
        run(Scheduler(target(), CONTEXT), prompt, Sampling(), max_tokens=length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    scheduler = Scheduler(target(), CONTEXT, draft(), parallel=2)
    both = [Generation(scheduler, prompt, max_tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
    for generation in both:
        scheduler.add(generation)
    while any(generation.finish_reason is None for generation in both):
        scheduler.step()
    assert [[token for piece in generation.runs for token in piece] for generation in both] == plain


@pytest.mark.parametrize("taken", [3, 5])
def test_rows_of_decoded_tokens_are_those_of_a_chain(taken: int) -> None:
    """Of all, and of those that somebody took who left before the end."""
    backend = target()
    ours, theirs = backend.new_state(CONTEXT), backend.new_state(CONTEXT)
    for state in (ours, theirs):
        backend.prefill(state, [3, 1, 4, 1, 5], Want("none"))
    heard: list[tuple[int, np.ndarray]] = []

    def hear(position: int, output: Output) -> None:
        assert output.features is not None
        heard.append((position, output.features.numpy()))

    decoding = backend.decode(ours, 9, 5, listener=Listener((0, 1), hear))
    tokens = [next(decoding) for _ in range(taken)]
    decoding.close()
    assert ours.length == 5 + taken
    rows = backend.forward([(theirs, Tree.chain([9, *tokens[:-1]]))], Want("argmax", features=(0, 1))).features
    assert rows is not None
    ((position, got),) = heard
    assert position == 5
    assert np.array_equal(got, rows.numpy())


class Dozing(Assumed):
    """Rests for some tokens after every step, and listens."""

    dozes, tokens = False, 2

    def rest(self, memory: object) -> int:
        self.dozes = not self.dozes
        return self.tokens if self.dozes else 0

    def listens(self, memory: object) -> bool:
        return True


@pytest.mark.parametrize(("tokens", "rest"), [(9, 2), pytest.param(90, 80, marks=pytest.mark.slow)])
def test_a_draft_that_rested_has_no_gap(tokens: int, rest: int) -> None:
    """However long: a launch decodes 64 tokens at most."""
    plain = run(Scheduler(target(), CONTEXT), [3, 1, 4, 1, 5], Sampling(), max_tokens=tokens)
    dozing = Dozing(draft(), 2.0, SHAPE.vocab)
    dozing.tokens = rest
    dozing.expect(5, plain)
    generation = Generation(Scheduler(target(), CONTEXT, dozing), [3, 1, 4, 1, 5], max_tokens=tokens)
    assert [token for piece in generation for token in piece] == plain
    memory, length = generation.sequence.draft.network, generation.sequence.state.length
    assert memory.appended + memory.waiting == length
    draft().network.snapshot(memory)  # nothing waits then
    assert memory.buffers["positions"].read(np.int32, (length,)).tolist() == list(range(length))


def test_who_cannot_be_walked_with_unseen() -> None:
    backend, few = target(), frozenset[int]()
    assert backend.verifies_unseen(None, few)
    assert not backend.verifies_unseen(None, frozenset(range(17)))
    assert not backend.verifies_unseen(Sampling(temperature=0.7), few)  # a sum over the vocabulary, heated
    assert not backend.verifies_unseen(Sampling(temperature=0.7, top_k=5, presence_penalty=1.0), few)
    assert not backend.verifies_unseen(Sampling(temperature=0.7, top_k=300), few)
