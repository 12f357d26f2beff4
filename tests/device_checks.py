"""What tests of a device, real or emulated, ask of it."""

from __future__ import annotations

import numpy as np
import pytest

from random_models import random_tree
from warpsmith.backend.base import LOGITS, Output, Want
from warpsmith.backend.cuda.structures import MadeTree
from warpsmith.backend.cuda.tree import TreeOnDevice
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import Tree
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def distance(got: np.ndarray, expected: np.ndarray) -> float:
    """Of all numbers together, relative."""
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def plain_run(backend, state, tokens) -> np.ndarray:
    """Logits of one token after the other, each committed."""
    rows = []
    for token in tokens:
        rows.append(backend.forward([(state, Tree.chain([token]))], LOGITS).logits.numpy())
        backend.commit(state, [0])
    return np.concatenate(rows)


def same_state(config: Config, a, b) -> bool:
    """To the bit: the recurrent states, and the keys and values of committed tokens."""

    def rows(state, buffer) -> np.ndarray:
        caches = len(config.attention_layers) * config.kv_heads
        shape = (caches, state.context, buffer.nbytes // caches // state.context)
        return buffer.read(np.uint8, shape)[:, : state.length]

    def delta(state) -> np.ndarray:
        return state.delta.read(np.uint32, (state.delta.nbytes // 4,))

    return (
        a.length == b.length
        and np.array_equal(delta(a), delta(b))
        and np.array_equal(rows(a, a.keys), rows(b, b.keys))
        and np.array_equal(rows(a, a.values), rows(b, b.values))
    )


def check_last_path(cuda, state, plain, tree: Tree) -> None:
    """Rows on the way to a tree's last node, and what committing it leaves, are to the bit those of plain decoding."""
    path = tree.path(len(tree) - 1)
    rows = cuda.forward([(state, tree)], LOGITS).logits.numpy()[path]
    np.testing.assert_array_equal(rows, plain_run(cuda, plain, tree.tokens[path]))
    cuda.commit(state, path)
    assert same_state(cuda.config, state, plain)


def check_smaller_than_its_room(cuda, nodes: int, room: int) -> None:
    """A tree on the device of so many nodes, launched for `room`: its rows are those of a tree the host gives."""
    rng = np.random.default_rng(nodes)
    tree, state = random_tree(rng, nodes, cuda.config.vocab), cuda.new_state(64)
    cuda.prefill(state, rng.integers(0, cuda.config.vocab, 11))
    expected = cuda.forward([(state, tree)], LOGITS).logits.numpy()
    made = MadeTree(nodes=nodes)
    made.tokens[:nodes], made.parents[:nodes] = tree.tokens.tolist(), tree.parents.tolist()
    memory = cuda.device.upload(np.frombuffer(bytes(made), np.uint8))
    cuda.launch(state, TreeOnDevice(memory.pointer, room), LOGITS)
    np.testing.assert_array_equal(cuda.outputs.rows_of([nodes], LOGITS).logits.numpy(), expected)


def check_decoded(cuda, count: int) -> None:
    """So many tokens decoded on the device are those of one forward pass after another, and so is the state."""
    state, plain = cuda.new_state(64), cuda.new_state(64)
    token, tokens = 7, []
    for _ in range(count):
        token = int(cuda.forward([(plain, Tree.chain([token]))]).argmax[0])
        cuda.commit(plain, [0])
        tokens.append(token)
    assert list(cuda.decode(state, 7, count)) == tokens
    assert same_state(cuda.config, state, plain)


def check_interleaved(cuda, sizes: list[int], decoded: int) -> None:
    """Trees of several sequences in one forward, as each alone; and what is drafted on one of them outlives the passes,
    the decoding and the commits of the others."""
    config, rng = cuda.config, np.random.default_rng(len(sizes))
    trees = [random_tree(rng, nodes, config.vocab) for nodes in sizes]
    prompts = [rng.integers(0, config.vocab, 9 + 4 * i) for i in range(len(sizes))]
    path, last = trees[0].path(sizes[0] - 1), len(sizes) - 1

    def started(which: int):
        state = cuda.new_state(64 + decoded)
        cuda.prefill(state, prompts[which])
        return state

    def rows(output: Output) -> tuple[np.ndarray, ...]:
        return output.argmax, output.logits.numpy(), output.features.numpy(), output.hidden.numpy()

    want = Want("logits", features=(2, 0), hidden=True)
    alone = [rows(cuda.forward([(started(i), tree)], want)) for i, tree in enumerate(trees)]
    states = [started(i) for i in range(len(sizes))]
    together, start = cuda.forward(list(zip(states, trees, strict=True)), want), 0
    for nodes, expected in zip(sizes, alone, strict=True):
        for got, exact in zip(rows(together[start : start + nodes]), expected, strict=True):
            np.testing.assert_array_equal(got, exact)
        start += nodes
    kept = together[path].features.groups([1], of=2).keep()
    cuda.commit(states[last], [0])
    tokens, others = cuda.decode(states[last], 3, decoded), cuda.decode(started(0), 5, decoded)
    heard = [next(tokens)]
    next(others)  # takes the ring that the first was writing to
    heard += [next(tokens), next(tokens)]
    others.close()
    heard += tokens
    cuda.commit(states[0], path)
    with pytest.raises(BadRequest, match="are gone"):
        together.logits.numpy()
    np.testing.assert_array_equal(kept.numpy(), alone[0][2][path, config.hidden :])
    twin, plain = started(last), started(0)
    cuda.forward([(twin, trees[last])])
    cuda.commit(twin, [0])
    assert heard == list(cuda.decode(twin, 3, decoded))
    assert same_state(config, states[last], twin)
    plain_run(cuda, plain, trees[0].tokens[path])
    assert same_state(config, states[0], plain)


def check_drawn(cuda, how: Sampling, count: int) -> None:
    """Tokens drawn while decoding are the sampler's choice from the logits at their places, penalties and all."""
    prompt = np.random.default_rng(5).integers(0, cuda.config.vocab, 9).tolist()
    state, twin = cuda.new_state(32 + count), cuda.new_state(32 + count)
    cuda.prefill(state, prompt)
    cuda.prefill(twin, prompt)
    text = [*prompt, 3]
    for token in list(cuda.decode(state, 3, count, sampling=how, history=text)):
        logits = cuda.forward([(twin, Tree.chain([text[-1]]))], LOGITS).logits.numpy()[0]
        cuda.commit(twin, [0])
        assert token == choose(logits, how, text, twin.length)
        text.append(token)
    assert same_state(cuda.config, state, twin)


def check_verified(cuda, how: Sampling, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk through a sampled tree is plain decoding, and brings so many rows of logits to the host."""
    from warpsmith.backend.cuda.memory.driver import Buffer

    text = np.random.default_rng(8).integers(0, cuda.config.vocab, 12).tolist()
    state, twin, other = (cuda.new_state(64) for _ in range(3))
    for each in (state, twin):
        cuda.prefill(each, text)
    truth = list(cuda.decode(twin, 3, 3, sampling=how, history=[*text, 3]))
    wrong = [(token + 1) % cuda.config.vocab for token in truth]
    tree = Tree(np.array([3, wrong[0], *truth[:2], wrong[1], wrong[0]]), np.array([-1, 0, 0, 2, 2, 0]))
    cuda.forward([(other, Tree.chain([5, 6])), (state, tree)], LOGITS)
    read, sizes = Buffer.read, []
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "read", lambda self, *args, **more: sizes.append(args[1]) or read(self, *args, **more))
        assert cuda.verify(state, tree, how, [*text, 3]) == ([0, 2, 3], truth)
    assert sizes.count((cuda.config.vocab,)) == rows
    assert sum(map(np.prod, sizes)) < (rows + 1) * cuda.config.vocab * 4
