"""Q4_0 weights: products against exact ones, and a file of several formats, on an emulated GPU and on a real one."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest

import test_cuda
from emulator.gpu import emulated_gpu
from format_cases import check_products, stored_as
from test_cuda_emulated import SHAPE, Case, backends, check_a_tree
from test_cuda_q8 import backend_of
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.weights.formats import format_for
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.tree import Tree

emulated = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


def test_q4_0_is_held_as_it_is() -> None:
    held = format_for(["Q4_0"])
    assert held.type.name == "Q4_0"
    assert held.tile_bytes(16, 1024) == 16 * 1024 * 18 // 32


@emulated
def test_products_are_those_of_the_file_s_weights() -> None:
    profile = dataclasses.replace(load_profiles()["h200"], largest_tree=8)
    with emulated_gpu(3, (1, 8)):
        check_products(lambda tensors: WeightsFirstBackend(SHAPE, tensors, profile=profile), SHAPE, "Q4_0", (1, 7))


@emulated
def test_beside_other_formats_with_an_embedding_of_its_own() -> None:
    with backends(Case((1, 8), {"ffn_down": "Q8_0", "ssm_": "BF16", "": "Q4_0"}, tied=False)) as both:
        check_a_tree(both, 8, 5)
        cuda, reference = both
        x = cuda.trace(cuda.new_state(8), Tree.chain([7]), "embed")["x"]
        np.testing.assert_allclose(x[0], reference.tensors["token_embd.weight"].float32()[7], rtol=2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("tied", [True, False])
def test_on_a_gpu(tied: bool) -> None:
    config = dataclasses.replace(test_cuda.SHAPE, tied=tied)
    check_products(lambda tensors: backend_of(config, tensors), config, "Q4_0", (1, 7, 20))
    cuda = backend_of(config, stored_as(config, lambda name: "Q4_0"))
    state, twin = cuda.new_state(64), cuda.new_state(64)
    decoded = list(cuda.decode(state, 3, 20))
    steps = []
    for token in [3, *decoded[:-1]]:
        steps.append(int(cuda.forward([(twin, Tree.chain([token]))]).argmax[0]))
        cuda.commit(twin, [0])
    assert decoded == steps
