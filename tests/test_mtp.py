"""Drafts of a model's own head: run on each token and the hidden row before it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from draft_cases import Alone, backend, prompt_of, run
from warpsmith.backend.base import Backend, Want
from warpsmith.backend.rows import HostRows
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.draft.base import Context, ScoredTree
from warpsmith.draft.mtp import MTP
from warpsmith.engine.scheduler import Scheduler


def mtp_after(on: Backend, pieces: list[list[int]], root: int, nodes: int = 30) -> ScoredTree:
    """The guess of a draft that heard the text in pieces, each committed by itself."""
    draft, state, position = Alone(MTP(on, nodes)), on.new_state(200), 0
    for piece in pieces:
        hidden = on.prefill(state, piece, Want("none", hidden=True)).hidden
        draft.observe(piece, position, None, hidden)
        position += len(piece)
    ids = [token for piece in pieces for token in piece]
    tree = draft.propose(Context([*ids, root], state, 10))
    assert tree is not None
    return tree


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_the_head_is_run_on_each_token_and_the_hidden_before_it(name: str) -> None:
    on, text, root = backend(name), prompt_of(20, 4), 3
    state = on.new_state(200)
    hidden = on.prefill(state, text, Want("none", hidden=True)).hidden.numpy()
    assert hidden is not None
    first = on.mtp(state, [*text[1:], root], hidden, 0, Want("logits", hidden=True))
    assert first.logits is not None
    assert first.hidden is not None
    beliefs = [first.logits.numpy()[-1] - np.log(np.exp(first.logits.numpy()[-1].astype(np.float64)).sum())]
    best = int(beliefs[0].argmax())
    second = on.mtp(state, [best], first.hidden.numpy()[-1:], len(text), Want("logits"))
    assert second.logits is not None
    beliefs.append(second.logits.numpy()[0] - np.log(np.exp(second.logits.numpy()[0].astype(np.float64)).sum()))
    tree = mtp_after(on, [text], root)
    for node in range(1, len(tree)):
        path = tree.path(node)[1:]
        if len(path) <= 2:
            score = sum(beliefs[d][tree.tokens[n]] for d, n in enumerate(path))
            assert tree.scores[node] == pytest.approx(score, abs=2e-3)
    assert tree.depths().max() >= 2


def test_mtp_in_pieces_equals_mtp_at_once() -> None:
    on, text = backend("reference"), prompt_of(60, 5)
    whole = mtp_after(on, [text], 7)
    for cuts in ([1] * 60, [10, 1, 1, 48], [59, 1]):
        starts = np.cumsum([0, *cuts])
        pieces = [text[a:b] for a, b in pairwise(starts)]
        tree = mtp_after(on, pieces, 7)
        assert tree.tokens.tolist() == whole.tokens.tolist()
        assert tree.scores == pytest.approx(whole.scores, abs=1e-4)


def test_rejected_guesses_leave_no_trace_in_the_head_s_memory() -> None:
    on, text = backend("reference"), prompt_of(40, 6)
    draft, state = Alone(MTP(on, 30)), on.new_state(200)
    output = on.prefill(state, text[:10], Want("none", hidden=True))
    draft.observe(text[:10], 0, None, output.hidden)
    for i in range(10, 40):
        assert draft.propose(Context(text[: i + 1], state, 10)) is not None
        output = on.forward([(state, Tree.chain([text[i]]))], Want("none", hidden=True))
        on.commit(state, [0])
        draft.observe([text[i]], i, None, output.hidden)
    tree, expected = draft.propose(Context([*text, 2], state, 10)), mtp_after(on, [text], 2)
    assert tree is not None
    assert tree.tokens.tolist() == expected.tokens.tolist()
    assert tree.scores == pytest.approx(expected.scores, abs=1e-4)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_mtp_comes_back_with_a_snapshot(name: str) -> None:
    on, text, other = backend(name), prompt_of(70, 7), prompt_of(30, 8)
    draft, state = Alone(MTP(on, 30)), on.new_state(200)
    draft.observe(text[:64], 0, None, on.prefill(state, text[:64], Want("none", hidden=True)).hidden)
    draft.catch_up(state)
    saved, snapshot = draft.snapshot(), on.snapshot(state)
    draft.observe(other, 64, None, on.prefill(state, other, Want("none", hidden=True)).hidden)
    draft.propose(Context([*text[:64], *other, 1], state, 10))
    on.restore(state, snapshot)
    draft.restore(saved)
    draft.observe(text[64:], 64, None, on.prefill(state, text[64:], Want("none", hidden=True)).hidden)
    tree = draft.propose(Context([*text, 5], state, 10))
    expected = mtp_after(on, [text[:64], text[64:]], 5)
    assert tree is not None
    assert tree.tokens.tolist() == expected.tokens.tolist()
    assert tree.scores == pytest.approx(expected.scores, abs=2e-3)


def test_of_a_long_past_mtp_hears_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that wait are bounded; after a gap the head begins anew, as if the text had begun there."""
    monkeypatch.setattr("warpsmith.draft.mtp.LISTENS", 16)
    on, text = backend("reference"), prompt_of(60, 9)
    draft, state = Alone(MTP(on, 30)), on.new_state(200)
    hidden = on.prefill(state, text, Want("none", hidden=True)).hidden.numpy()
    assert hidden is not None
    for i in range(60):
        draft.observe(text[i : i + 1], i, None, HostRows(hidden[i : i + 1]))
        if i == 10:
            draft.catch_up(state)
            assert draft.memory.rows == 10
        assert sum(len(tokens) for tokens, _ in draft.memory.waiting) <= 17
    kept = draft.memory.waiting[0][0]
    tree = draft.propose(Context([*text, 4], state, 10))
    assert tree is not None
    assert int(kept[0]) == text[60 - 16]
    other = on.new_state(200)
    output = on.mtp(other, [*text[-16:], 4], hidden[-17:], 0, Want("logits"))
    assert output.logits is not None
    beliefs = output.logits.numpy()[-1] - np.log(np.exp(output.logits.numpy()[-1].astype(np.float64)).sum())
    assert tree.scores[1] == pytest.approx(beliefs.max(), abs=1e-4)


@pytest.mark.parametrize("gap", [1, 7, 40])
def test_after_a_gap_mtp_goes_on_with_what_it_heard(gap: int) -> None:
    """To the block it is as if the tokens it was not told of had never been."""
    on, text = backend("reference"), prompt_of(60 + gap, 11)
    draft, state = Alone(MTP(on, 30)), on.new_state(200)
    hidden = on.prefill(state, text, Want("none", hidden=True)).hidden.numpy()
    assert hidden is not None
    draft.observe(text[:40], 0, None, HostRows(hidden[:40]))
    draft.observe(text[40 : 40 + gap], 40, None, None)
    assert draft.propose(Context(text[: 41 + gap], state, 10)) is None, "it does not know what came before the root"
    draft.observe(text[40 + gap :], 40 + gap, None, HostRows(hidden[40 + gap :]))
    tree = draft.propose(Context([*text, 4], state, 10))
    assert tree is not None
    other = on.new_state(200)
    heard = [*range(1, 40), *range(41 + gap, 60 + gap)]  # tokens whose predecessor's hidden was told
    tokens, before = [*(text[i] for i in heard), 4], [*(hidden[i - 1] for i in heard), hidden[-1]]
    output = on.mtp(other, tokens, np.array(before), 0, Want("logits"))
    assert output.logits is not None
    beliefs = output.logits.numpy()[-1] - np.log(np.exp(output.logits.numpy()[-1].astype(np.float64)).sum())
    assert tree.scores[1] == pytest.approx(beliefs.max(), abs=1e-4)


def test_mtp_at_the_end_of_the_context_stays_inside() -> None:
    for name in ("reference", "cpu"):
        on = backend(name)
        plain = run(Scheduler(on, 24), prompt_of(10), Sampling())
        assert run(Scheduler(on, 24, MTP(on)), prompt_of(10), Sampling()) == plain
        assert len(plain) == 14
