"""A DFlash draft's program for an H200, without a GPU: nothing that the compiler puts aside."""

from __future__ import annotations

import re

import pytest

from cuda_draft_cases import draft_of_the_27b
from warpsmith.backend.cuda.build.compiler import compile_source, sources
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.draft.formats import handed_over
from warpsmith.backend.cuda.draft.layout import DraftLayout, DraftStream
from warpsmith.backend.cuda.draft.network import COPIES
from warpsmith.backend.cuda.large.formats import EMBEDDINGS
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.checkpoint.dflash import expected_shapes
from warpsmith.checkpoint.dflash_writer import to_gguf_name
from warpsmith.errors import NoDevice
from warpsmith.model.config import SIZES
from warpsmith.model.weights import expected_shapes as model_shapes

PROGRAM = "draft/draft.cu"


@pytest.mark.parametrize("recipe", ["bf16", pytest.param("q4_k_m", marks=pytest.mark.slow)])
def test_nothing_of_a_draft_lies_on_the_stack(recipe: str) -> None:
    """There is hardly an L1 cache beside 227 KB of shared memory: what is put aside comes back from the L2 cache."""
    target, config, chip = SIZES["27B"], draft_of_the_27b(), load_profiles()["h200"]
    stored = {n: tensor_type("q4_k_m", n, s, target.layers, target.tied).name for n, s in model_shapes(target).items()}
    model = LargeLayout(target, chip.sms, stored)
    shapes = expected_shapes(config).items()
    types = {n: tensor_type(recipe, to_gguf_name(n), s, config.layers, tied=False).name for n, s in shapes}
    stream = DraftStream(config, chip.sms, {name: handed_over(kind) for name, kind in types.items()})
    layout = DraftLayout(config, stream, model.deals[-1], capacity=4096)
    constants = layout.constants(EMBEDDINGS.index(model.embedding_type)) | COPIES
    constants |= {"SHARED_MEMORY": chip.shared_memory}
    try:
        _, log = compile_source(sources()[PROGRAM], PROGRAM, "sm_90a", constants, ("--ptxas-options=-v",))
    except NoDevice as error:
        pytest.skip(str(error))
    found = [int(n) for n in re.findall(r"(\d+) bytes (?:stack|spill)", log)]
    assert len(found) > 3, log
    assert max(found) == 0, log
