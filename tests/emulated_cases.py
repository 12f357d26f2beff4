"""A small model on an emulated GPU (see emulator/), and what every build of the kernels must do with a tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from device_checks import plain_run, relative, same_state
from emulator.gpu import emulated_gpu
from random_models import random_tensors, random_tree
from warpsmith.backend.base import LOGITS
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.config import Config

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
    often: bool = False  # the kernels will be run
    options: dict[str, object] = dataclasses.field(default_factory=dict)


@contextmanager
def backends(case: Case, shape: Config = SHAPE) -> Iterator[tuple[WeightsFirstBackend, ReferenceBackend]]:
    config = dataclasses.replace(shape, tied=case.tied)
    tensors = tensors_of(config, case.types)
    profile = dataclasses.replace(load_profiles()["h200"], largest_tree=case.variants[-1])
    with emulated_gpu(case.sms, case.variants, often=case.often):
        cuda = WeightsFirstBackend(
            config, tensors, profile=profile, architecture=case.architecture, options=case.options
        )
        yield cuda, ReferenceBackend(config, tensors)


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab, count)


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
