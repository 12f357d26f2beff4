"""The network of a DFlash draft: the one in the paper, whatever its memory was through."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from draft_cases import Alone, OneBlock
from random_drafts import (
    FULL,
    SLIDING,
    draft_config,
    draft_in_memory,
    random_weights,
)
from random_models import SMALL, random_tensors
from warpsmith.backend.base import Output, Want
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.reference.dflash import NumpyDraft, NumpyMemory
from warpsmith.backend.rows import HostRows
from warpsmith.checkpoint.dflash import DFlashConfig, expected_shapes
from warpsmith.draft.base import Context
from warpsmith.draft.dflash import DFlash
from warpsmith.model.dflash import block_plan, context_plan

BACKEND = ReferenceBackend(SMALL, random_tensors(SMALL))


def features_of(count: int, seed: int = 0, config: DFlashConfig = FULL) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, len(config.target_layers) * config.hidden)).astype(np.float32) * 2


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FULL, SLIDING], ids=["two layers", "five"])
def test_the_plans_name_every_tensor_and_no_other(config: DFlashConfig) -> None:
    stages = [*context_plan(config), *block_plan(config)]
    assert {name for stage in stages for name in stage.weights.values()} == set(expected_shapes(config))
    known = {"tokens", "features"}
    for stage in stages:
        assert set(stage.reads) <= known, stage.name
        known |= set(stage.writes)


class Seen(Alone):
    """A draft that says what its last layer holds."""

    def hidden(self, root: int, position: int) -> np.ndarray:
        assert isinstance(self.proposer, DFlash)
        return self.proposer.hidden(self.memory, root, position)


def hidden_after(draft: Seen, features: np.ndarray, pieces: list[int]) -> np.ndarray:
    """Rows of a block on top of features that came in pieces."""
    start = 0
    for count in pieces:
        draft.observe([1] * count, start, HostRows(features[start : start + count]), None)
        draft.catch_up(BACKEND.new_state(8)) if count % 2 else None
        start += count
    draft.catch_up(BACKEND.new_state(8))
    return draft.hidden(5, start)


SHAPES = {
    "full": FULL,
    "sliding and full": SLIDING,
    "sliding, not causal": draft_config(SMALL, windows=(5, 9), causal=(False, False)),
    "causal": draft_config(SMALL, causal=(True, True)),
    "one feature, one layer": draft_config(SMALL, layers=1, target_layers=(2,)),
    "window shorter than the block": draft_config(SMALL, windows=(3, None), causal=(True, False)),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_context_in_pieces_equals_context_at_once(config: DFlashConfig) -> None:
    features = features_of(40, config=config)
    file = draft_in_memory(config)
    whole = hidden_after(Seen(DFlash(file, BACKEND)), features, [40])
    for pieces in ([1] * 40, [13, 1, 1, 25], [39, 1]):
        assert hidden_after(Seen(DFlash(file, BACKEND)), features, pieces) == pytest.approx(whole, abs=2e-5)
    shorter = hidden_after(Seen(DFlash(file, BACKEND)), features[:39], [39])
    assert np.abs(shorter - whole).max() > 1e-3


def test_a_rolling_cache_forgets_what_its_window_hides() -> None:
    """Memory is bounded by the window, and nothing that is visible is missing."""
    config = draft_config(SMALL, windows=(9, 5), causal=(True, True))
    file, features = draft_in_memory(config), features_of(300, config=config)
    draft = Seen(DFlash(file, BACKEND))
    assert isinstance(draft.memory.network, NumpyMemory)
    assert [cache.keys.shape[1] for cache in draft.memory.network.caches] == [9, 5]
    far = hidden_after(draft, features, [100, 3, 1, 196])
    near = Seen(DFlash(file, BACKEND))
    near.observe([1] * 8, 292, HostRows(features[292:]), None)
    near.catch_up(BACKEND.new_state(8))
    assert near.hidden(5, 300) == pytest.approx(far, abs=2e-5)


def test_full_layers_see_as_far_as_their_cache() -> None:
    file, features = draft_in_memory(FULL), features_of(90)
    draft = Seen(DFlash(file, BACKEND, context_rows=32))
    bounded = hidden_after(draft, features, [50, 1, 7, 32])
    near = Seen(DFlash(file, BACKEND))
    near.observe([1] * 32, 58, HostRows(features[58:]), None)
    near.catch_up(BACKEND.new_state(8))
    assert near.hidden(5, 90) == pytest.approx(bounded, abs=2e-5)
    assert sum(len(rows) for _, rows in draft.memory.waiting) == 0


def test_waiting_features_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    file, features = draft_in_memory(FULL), features_of(400)
    expected = hidden_after(Seen(DFlash(file, BACKEND, context_rows=32)), features, [400])
    draft = Seen(DFlash(file, BACKEND, context_rows=32))
    for i in range(400):
        draft.observe([1], i, HostRows(features[i : i + 1]), None)
        assert sum(len(rows) for _, rows in draft.memory.waiting) <= 33
    draft.catch_up(BACKEND.new_state(8))
    assert draft.hidden(5, 400) == pytest.approx(expected, abs=2e-5)
    monkeypatch.setattr("warpsmith.draft.dflash.WAITING_BYTES", 10 * features[:1].nbytes)
    draft = Seen(DFlash(file, BACKEND, context_rows=32))
    for i in range(400):
        draft.observe([1], i, HostRows(features[i : i + 1]), None)
        assert sum(rows.nbytes for _, rows in draft.memory.waiting) <= 10 * features[:1].nbytes
    draft.catch_up(BACKEND.new_state(8))
    assert draft.hidden(5, 400) == pytest.approx(expected, abs=2e-5)


def test_after_a_gap_the_rows_before_it_still_stand_where_they_stood() -> None:
    file, features = draft_in_memory(SLIDING), features_of(50, config=SLIDING)
    draft, expected = Seen(DFlash(file, BACKEND)), OneBlock(NumpyDraft(file, BACKEND, [7, 4096, 7]))
    draft.observe([1] * 30, 0, HostRows(features[:30]), None)
    draft.observe([1] * 9, 30, None, None)
    draft.observe([1] * 20, 39, HostRows(features[30:]), None)
    draft.catch_up(BACKEND.new_state(8))
    expected.append(HostRows(features[:30]), 0)
    expected.append(HostRows(features[30:]), 39)
    rows = expected.fill(5, 59, SLIDING.block - 1, Want("none", hidden=True)).hidden.numpy()
    assert draft.hidden(5, 59) == pytest.approx(rows, abs=2e-5)


def test_going_back_to_a_snapshot() -> None:
    file, features = draft_in_memory(SLIDING), features_of(60, config=SLIDING)
    draft = Seen(DFlash(file, BACKEND))
    draft.observe([1] * 30, 0, HostRows(features[:30]), None)
    before = draft.snapshot()
    expected = hidden_after(Seen(DFlash(file, BACKEND)), features, [30, 10])
    other = features_of(20, seed=9, config=SLIDING)
    for _ in range(2):
        draft.observe([2] * 20, 30, HostRows(other), None)
        draft.catch_up(BACKEND.new_state(8))
        draft.hidden(5, 50)
        draft.restore(before)
        draft.observe([1] * 10, 30, HostRows(features[30:40]), None)
        draft.catch_up(BACKEND.new_state(8))
        assert draft.hidden(5, 40) == pytest.approx(expected, abs=2e-5)
        draft.restore(before)


def test_guesses_are_the_head_s_on_the_masked_rows() -> None:
    draft = Seen(DFlash(draft_in_memory(FULL), BACKEND, nodes=20))
    state = BACKEND.new_state(64)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    output = BACKEND.prefill(state, ids[:-1], draft.proposer.wants)
    assert output.features is not None
    draft.observe(ids[:-1], 0, output.features, None)
    tree = draft.propose(Context(ids, state, 100))
    assert tree is not None
    assert len(tree) == 21
    rows: Output = BACKEND.head(draft.hidden(5, 8)[1:], Want("logits"))
    assert rows.logits is not None
    shown = rows.logits.numpy() - np.log(np.exp(rows.logits.numpy().astype(np.float64)).sum(axis=1, keepdims=True))
    for node in range(1, len(tree)):
        path = tree.path(node)[1:]
        score = sum(shown[d, tree.tokens[n]] for d, n in enumerate(path))
        assert tree.scores[node] == pytest.approx(score, abs=1e-4)
    assert tree.tokens[1] == shown[0].argmax()
    assert draft.propose(Context(ids, state, 2)).depths().max() <= 2  # type: ignore[union-attr]


def test_the_order_of_target_layers_is_the_order_of_features() -> None:
    state = BACKEND.new_state(16)
    apart = [
        BACKEND.prefill(BACKEND.new_state(16), [1, 2, 3], Want("none", features=(i,))).features.numpy() for i in (3, 0)
    ]
    together = BACKEND.prefill(state, [1, 2, 3], Want("none", features=(3, 0))).features.numpy()
    assert together is not None
    assert np.array_equal(together, np.concatenate(apart, axis=1))  # type: ignore[arg-type]


# -- an oracle --------------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [0, 1, 30])
def test_the_network_equals_one_written_in_torch(config: DFlashConfig, length: int) -> None:
    """The formulas once more, written apart: whole context at once, per head, in float64, with explicit masks."""
    torch = pytest.importorskip("torch")
    c = config
    weights = {name: torch.tensor(w, dtype=torch.float64) for name, w in random_weights(c).items()}
    features = features_of(length, config=c)
    embedded = torch.tensor(BACKEND.embed([5, *[c.mask_token] * (c.block - 1)]), dtype=torch.float64)

    def norm(x: Any, name: str) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[name + ".weight"], eps=c.eps)

    def rotate(x: Any, positions: Any) -> Any:
        half = c.head_dim // 2
        angle = positions[:, None] * c.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones_like(angle), angle)
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    block_at = torch.arange(length, length + c.block, dtype=torch.float64)
    all_at = torch.arange(length + c.block, dtype=torch.float64)
    context = norm(torch.tensor(features, dtype=torch.float64) @ weights["fc.weight"].T, "hidden_norm")
    x = embedded
    for i in range(c.layers):
        layer = f"layers.{i}."
        a = norm(x, layer + "input_layernorm")
        source = torch.cat([context, a])
        heads = []
        for h in range(c.heads):
            kv = h // (c.heads // c.kv_heads)
            rows, kv_rows = slice(h * c.head_dim, (h + 1) * c.head_dim), slice(kv * c.head_dim, (kv + 1) * c.head_dim)
            q = rotate(
                norm(a @ weights[layer + "self_attn.q_proj.weight"][rows].T, layer + "self_attn.q_norm"), block_at
            )
            k = norm(source @ weights[layer + "self_attn.k_proj.weight"][kv_rows].T, layer + "self_attn.k_norm")
            v = source @ weights[layer + "self_attn.v_proj.weight"][kv_rows].T
            scores = q @ rotate(k, all_at).T / c.head_dim**0.5
            for j in range(c.block):
                for p in range(length + c.block):
                    too_far = c.windows[i] is not None and p < length + j - (c.windows[i] - 1)
                    too_late = p >= length and c.causal[i] and p > length + j
                    other_side = c.windows[i] is not None and p > length + j + (c.windows[i] - 1)
                    if too_far or too_late or other_side:
                        scores[j, p] = -torch.inf
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ weights[layer + "self_attn.o_proj.weight"].T
        n = norm(x, layer + "post_attention_layernorm")
        gate = torch.nn.functional.silu(n @ weights[layer + "mlp.gate_proj.weight"].T)
        x = x + (gate * (n @ weights[layer + "mlp.up_proj.weight"].T)) @ weights[layer + "mlp.down_proj.weight"].T
    expected = norm(x, "norm").numpy()

    draft = Seen(DFlash(draft_in_memory(c), BACKEND))
    if length:
        draft.observe([1] * length, 0, HostRows(features), None)
        draft.catch_up(BACKEND.new_state(8))
    assert draft.hidden(5, length) == pytest.approx(expected, abs=2e-4)
