"""Other files, chips and numbers of layers on the emulated GPU: a build of the kernels each."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from device_checks import relative
from emulated_cases import SHAPE, Case, backends, check_a_tree
from warpsmith.backend.tree import Tree

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

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
# What a test of another file has the like of: three formats and an embedding of its own (test_cuda_q4_0.py), Q8_0
# (test_cuda_q8.py), SMs that share a split (on a GPU, any model).
SLOW = ("SMs that share a split of keys", "q8_0, gates in bf16", "untied, head and half of the narrow ones in q8_0")


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in OTHERS])
def test_other_files_and_chips(case: str) -> None:
    built, nodes = OTHERS[case]
    with backends(built) as both:
        check_a_tree(both, 8, nodes)


@pytest.mark.parametrize("layers", [pytest.param(64, marks=pytest.mark.slow), 67])
def test_as_many_layers_as_a_word_has_bits_and_more(layers: int) -> None:
    """Which layers are recurrent is a bit each. What is published last is multiplied by the final norm's weights."""
    config = dataclasses.replace(SHAPE, layers=layers, ffn=256, recurrent=tuple(i % 4 != 3 for i in range(layers)))
    with backends(Case((1,)), config) as (cuda, reference):
        stage, tree = f"mlp_out.{layers - 1}", Tree.chain([3])
        expected = reference.trace(reference.new_state(16), tree, stage)
        got = cuda.trace(cuda.new_state(16), tree, stage)
        assert relative(got["x"], expected["x"]) < 0.15  # rounded to bf16 in 64 layers, one after the other
