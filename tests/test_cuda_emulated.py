"""The CUDA backend and its kernels without a GPU: on an emulated one (see emulator/), at the size of a toy."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from device_checks import check_interleaved, check_verified, plain_run, relative, same_state
from emulator.gpu import emulated_gpu
from random_models import random_tensors, random_tree
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.backend import CudaBackend
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling, choose
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.errors import BadRequest
from warpsmith.model.config import Config
from warpsmith.model.plan import forward_plan

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SHAPE = Config(
    name="emulated",
    layers=3,
    hidden=256,
    ffn=768,
    vocab=480,
    heads=4,
    kv_heads=2,
    key_heads=2,
    value_heads=4,
    recurrent=(True, False, True),
    context=256,
    tied=True,
)
STAGES = [s.name for s in forward_plan(SHAPE) if s.op not in ("final_norm", "head")]
BOUND = 0.02  # relative error, as on a GPU


def tensors_of(config: Config, types: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Random ones, in BF16 where nothing else is said for a part of the name."""
    tensors = random_tensors(config, 1)
    for name, tensor in tensors.items():
        if len(tensor.shape) == 2 and "conv1d" not in name:
            kind = next((kind for part, kind in (types or {}).items() if part in name), "BF16")
            raw = quantize(TYPES[kind], tensor.float32())
            tensors[name] = Tensor(name, TYPES[kind], tensor.shape, lambda raw=raw: raw)
    return tensors


@dataclasses.dataclass(frozen=True)
class Case:
    """A file and a chip that the kernels are built for, and for trees of which sizes."""

    variants: tuple[int, ...]
    types: dict[str, str] = dataclasses.field(default_factory=dict)
    tied: bool = True
    architecture: str | None = None
    sms: int = 3  # so few that each has several units of a stage
    options: dict[str, object] = dataclasses.field(default_factory=dict)


@contextmanager
def backends(case: Case, shape: Config = SHAPE) -> Iterator[tuple[CudaBackend, ReferenceBackend]]:
    config = dataclasses.replace(shape, tied=case.tied)
    tensors = tensors_of(config, case.types)
    profile = dataclasses.replace(load_profiles()["h200"], largest_tree=case.variants[-1])
    with emulated_gpu(case.sms, case.variants):
        cuda = CudaBackend(config, tensors, profile=profile, architecture=case.architecture, options=case.options)
        yield cuda, ReferenceBackend(config, tensors)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[CudaBackend, ReferenceBackend]]:
    with backends(Case((1, 8, 24))) as both:
        yield both


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab, count)


@pytest.mark.parametrize("nodes", [1, 11])
def test_every_stage_matches_the_reference(pair, nodes: int) -> None:
    cuda, reference = pair
    tree = random_tree(np.random.default_rng(nodes), nodes, SHAPE.vocab)
    states = [backend.new_state(64) for backend in pair]
    for backend, state in zip(pair, states, strict=True):
        backend.prefill(state, ids(0, 11))
    for stage in STAGES:
        expected = reference.trace(states[1], tree, stage)
        for name, got in cuda.trace(states[0], tree, stage).items():
            assert relative(got, expected[name]) < BOUND, (stage, name)


def test_a_stage_that_is_not_in_the_plan_is_refused(pair) -> None:
    cuda, _ = pair
    for stage in ("head", "attention_mix.0", "mlp_in.3", "nothing"):
        with pytest.raises(BadRequest, match="no stage"):
            cuda.trace(cuda.new_state(8), Tree.chain([1]), stage)


def check_a_tree(pair, length: int, nodes: int) -> None:
    """Near the reference; its rows as plain decoding makes them, to the bit; and so is what is committed."""
    cuda, reference = pair
    tree = random_tree(np.random.default_rng(nodes), nodes, SHAPE.vocab)
    states = [backend.new_state(64) for backend in (cuda, cuda, reference)]
    for backend, state in zip((cuda, cuda, reference), states, strict=True):
        if length:
            backend.prefill(state, ids(3, length))
    logits = cuda.forward([(states[0], tree)], LOGITS).logits.numpy()
    path = tree.path(nodes - 1)
    cuda.commit(states[0], path)
    assert relative(logits, reference.forward([(states[2], tree)], LOGITS).logits.numpy()) < BOUND
    np.testing.assert_array_equal(logits[path], plain_run(cuda, states[1], tree.tokens[path]))
    assert same_state(SHAPE, states[0], states[1])


@pytest.mark.parametrize(("length", "nodes"), [(0, 11), (13, 8), (16, 13), (21, 22)])
def test_a_node_depends_only_on_its_ancestors(pair, length: int, nodes: int) -> None:
    """Wherever the tree lies among the chunks of keys."""
    check_a_tree(pair, length, nodes)


OTHERS = {
    "SMs that share a split of keys": (Case((1, 24), sms=8), 13),
    "q8_0, gates in bf16": (Case((1, 24), {"ssm_alpha": "BF16", "ssm_beta": "BF16", "": "Q8_0"}), 9),
    "untied, head and half of the narrow ones in q8_0": (
        Case((1, 8), {"output": "Q8_0", "ffn_down": "Q8_0"}, tied=False),
        5,
    ),
    "without bulk copies, fewer slots than copies asked for": (
        Case((1, 8), architecture="compute_80", options={"IN_FLIGHT": 20}),
        5,
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_files_and_chips(case: str) -> None:
    built, nodes = OTHERS[case]
    with backends(built) as both:
        check_a_tree(both, 8, nodes)


@pytest.mark.parametrize("layers", [64, 67])
def test_as_many_layers_as_a_word_has_bits_and_more(layers: int) -> None:
    """Which layers are recurrent is a bit each. What is published last is multiplied by the final norm's weights."""
    config = dataclasses.replace(SHAPE, layers=layers, ffn=256, recurrent=tuple(i % 4 != 3 for i in range(layers)))
    with backends(Case((1,)), config) as (cuda, reference):
        stage, tree = f"mlp_out.{layers - 1}", Tree.chain([3])
        expected = reference.trace(reference.new_state(16), tree, stage)
        got = cuda.trace(cuda.new_state(16), tree, stage)
        assert relative(got["x"], expected["x"]) < 0.15  # rounded to bf16 in 64 layers, one after the other


def test_decoding_in_one_launch_equals_stepping(pair) -> None:
    cuda, _ = pair
    state, twin = cuda.new_state(64), cuda.new_state(64)
    token = int(cuda.prefill(state, ids(4, 14)).argmax[-1])
    cuda.prefill(twin, ids(4, 14))
    tokens = list(cuda.decode(state, token, 5))
    step, expected = token, []
    for _ in range(5):
        step = int(cuda.forward([(twin, Tree.chain([step]))]).argmax[0])
        cuda.commit(twin, [0])
        expected.append(step)
    assert tokens == expected
    assert same_state(SHAPE, state, twin)


def test_tokens_are_drawn_as_the_sampler_draws_them(pair) -> None:
    cuda, _ = pair
    how = Sampling(temperature=0.9, top_k=20, top_p=0.95, repeat_penalty=1.2, seed=7)
    state, twin = cuda.new_state(64), cuda.new_state(64)
    prompt = ids(5, 9).tolist()
    cuda.prefill(state, prompt)
    cuda.prefill(twin, prompt)
    tokens = list(cuda.decode(state, 3, 5, sampling=how, history=[*prompt, 3]))
    text = [*prompt, 3]
    for token in tokens:
        logits = cuda.forward([(twin, Tree.chain([text[-1]]))], LOGITS).logits.numpy()[0]
        cuda.commit(twin, [0])
        assert token == choose(logits, how, text, twin.length)
        text.append(token)


def test_features_and_hidden(pair) -> None:
    want = Want("argmax", features=(2, 0), hidden=True)
    got, expected = (backend.prefill(backend.new_state(64), ids(5, 8), want) for backend in pair)
    assert relative(got.features.numpy(), expected.features.numpy()) < BOUND
    assert relative(got.hidden.numpy(), expected.hidden.numpy()) < BOUND


def test_sequences_interleave(pair) -> None:
    check_interleaved(pair[0], [5, 3], decoded=4)


def test_a_sampled_tree_is_verified_without_its_logits(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    check_verified(pair[0], Sampling(temperature=0.9, top_k=20, presence_penalty=0.5, seed=7), 0, monkeypatch)
    check_verified(pair[0], Sampling(temperature=0.5, seed=9), 3, monkeypatch)


def test_memory_is_given_back_with_the_backend_and_its_states() -> None:
    small = dataclasses.replace(load_profiles()["h200"], largest_tree=1)
    with emulated_gpu(3, (1,)) as driver:
        backend = CudaBackend(SHAPE, tensors_of(SHAPE), profile=small)
        state = backend.new_state(16)
        list(backend.decode(state, 3, 2))
        output = backend.forward([(state, Tree.chain([5]))], LOGITS)
        assert driver.memory
        del backend, state, output
        assert not driver.memory
