"""The CUDA backend against the reference, on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

from device_checks import check_interleaved, check_verified, plain_run, relative, same_state
from random_models import random_tensors, random_tree
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import NoDevice
from warpsmith.model.config import Config
from warpsmith.model.plan import forward_plan

pytestmark = pytest.mark.gpu

SHAPE = Config(
    name="cuda-test",
    layers=4,
    hidden=1024,
    ffn=1536,
    vocab=4096,
    heads=4,
    kv_heads=2,
    key_heads=4,
    value_heads=8,
    recurrent=(True, False, True, True),
    context=4096,
    tied=True,
)


def bf16_tensors(config: Config, seed: int) -> dict[str, Tensor]:
    tensors = random_tensors(config, seed)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and "conv1d" not in name:
            raw = quantize(TYPES["BF16"], tensor.float32())
            tensors[name] = Tensor(name, TYPES["BF16"], tensor.shape, lambda raw=raw: raw)
    return tensors


@pytest.fixture(scope="module")
def pair():
    from warpsmith.backend.cuda.weights_first import WeightsFirstBackend

    tensors = bf16_tensors(SHAPE, seed=1)
    try:
        cuda = WeightsFirstBackend(SHAPE, tensors, options={"WATCHDOG_CYCLES": "4000000000ll"})
    except NoDevice as error:
        pytest.skip(str(error))
    return cuda, ReferenceBackend(SHAPE, tensors)


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab, count)


STAGES = [s.name for s in forward_plan(SHAPE) if s.op not in ("final_norm", "head")]


@pytest.mark.parametrize("prompt", [0, 37])
def test_every_stage_matches_the_reference(pair, prompt: int) -> None:
    cuda, reference = pair
    states = [b.new_state(128) for b in pair]
    if prompt:
        for backend, state in zip(pair, states, strict=True):
            plain_run(backend, state, ids(0, prompt))
    tree = Tree(ids(1, 6), np.array([-1, 0, 0, 1, 1, 2]))
    worst = {}
    for stage in STAGES:
        expected = reference.trace(states[1], tree, stage)
        for name, got in cuda.trace(states[0], tree, stage).items():
            worst[f"{stage}:{name}"] = relative(got, expected[name])
    bad = {k: v for k, v in worst.items() if not v < 0.02}
    print({k: round(v, 5) for k, v in worst.items()})
    assert not bad, bad


@pytest.mark.parametrize("length", [1, 20, 100, 300])
def test_logits_match_the_reference(pair, length: int) -> None:
    want = Want("logits", every_row=True)
    got, expected = (b.prefill(b.new_state(512), ids(2, length), want).logits.numpy() for b in pair)
    agreement = float((got.argmax(axis=1) == expected.argmax(axis=1)).mean())
    print(f"length {length}: relative error {relative(got, expected):.5f}, top-1 agreement {agreement:.4f}")
    assert relative(got, expected) < 0.02
    assert agreement > 0.9


@pytest.mark.parametrize("nodes", [1, 3, 8, 13, 16, 22, 32, 50, 64])
def test_a_node_depends_only_on_its_ancestors(pair, nodes: int) -> None:
    cuda, _ = pair
    rng = np.random.default_rng(nodes)
    prompt = ids(3, 45)
    tree = random_tree(rng, nodes, SHAPE.vocab)
    state = cuda.new_state(256)
    cuda.prefill(state, prompt)
    logits = cuda.forward([(state, tree)], LOGITS).logits.numpy()
    for node in {nodes - 1, int(rng.integers(nodes))}:
        path = tree.path(node)
        plain = cuda.new_state(256)
        cuda.prefill(plain, prompt)
        np.testing.assert_array_equal(logits[path], plain_run(cuda, plain, tree.tokens[path]))
    cuda.forward([(state, tree)])  # only the last forward can be committed
    cuda.commit(state, path)
    assert same_state(SHAPE, state, plain)


def test_decoding_on_the_device_equals_stepping(pair) -> None:
    cuda, _ = pair
    prompt = ids(4, 30)
    state, twin = cuda.new_state(512), cuda.new_state(512)
    token = int(cuda.prefill(state, prompt).argmax[-1])
    cuda.prefill(twin, prompt)
    tokens = list(cuda.decode(state, token, 150))
    assert len(tokens) == 150
    expected, step = [], token
    for _ in range(150):
        step = int(cuda.forward([(twin, Tree.chain([step]))]).argmax[0])
        cuda.commit(twin, [0])
        expected.append(step)
    assert tokens == expected
    assert same_state(SHAPE, state, twin)
    again = cuda.new_state(512)
    cuda.prefill(again, prompt)
    stop = tokens[70]
    assert list(cuda.decode(again, token, 150, frozenset({stop}))) == tokens[: tokens.index(stop) + 1]


def test_a_listener_who_leaves_early_finds_the_state_where_he_left(pair) -> None:
    cuda, _ = pair
    state, twin = cuda.new_state(256), cuda.new_state(256)
    token = int(cuda.prefill(state, ids(9, 20)).argmax[-1])
    cuda.prefill(twin, ids(9, 20))
    listening = cuda.decode(state, token, 60)
    heard = [next(listening) for _ in range(7)]
    listening.close()
    assert heard == list(cuda.decode(twin, token, 7))
    assert same_state(SHAPE, state, twin)


def test_sequences_interleave(pair) -> None:
    check_interleaved(pair[0], [22, 9, 1, 30], decoded=150)
    check_interleaved(pair[0], [1] * 8, decoded=7)


def test_a_sampled_tree_is_verified_without_its_logits(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    check_verified(pair[0], Sampling(temperature=0.9, top_k=20, presence_penalty=0.5, seed=7), 0, monkeypatch)
    check_verified(pair[0], Sampling(temperature=0.8, top_k=50, top_p=0.9, seed=8), 0, monkeypatch)
    check_verified(pair[0], Sampling(temperature=0.5, seed=9), 3, monkeypatch)


def test_features_and_hidden(pair) -> None:
    want = Want("argmax", features=(2, 0), hidden=True)
    outputs = [b.prefill(b.new_state(128), ids(5, 70), want) for b in pair]
    assert relative(outputs[0].features.numpy(), outputs[1].features.numpy()) < 0.02
    assert relative(outputs[0].hidden.numpy(), outputs[1].hidden.numpy()) < 0.02


def test_snapshots(pair) -> None:
    cuda, _ = pair
    state = cuda.new_state(128)
    cuda.prefill(state, ids(6, 40))
    saved = cuda.snapshot(state)
    first = plain_run(cuda, state, ids(7, 10))
    cuda.restore(state, saved)
    np.testing.assert_array_equal(plain_run(cuda, state, ids(7, 10)), first)


def test_long_contexts_use_every_split(pair) -> None:
    """Past 16 keys x 64 splits, an item walks several chunks."""
    want = Want("logits")
    got, expected = (b.prefill(b.new_state(2304), ids(8, 2200), want).logits.numpy() for b in pair)
    assert relative(got, expected) < 0.02
