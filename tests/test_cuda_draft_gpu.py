"""Drafts on a GPU: against numpy, and wisp's texts with its DFlash draft and its MTP head equal to plain ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cuda_draft_cases import SHAPES, both, check_rings, check_same, features_of, file_of, shaped
from large_cases import MIXED, SHAPE, tensors_of
from warpsmith.backend.cuda import CudaBackend, LargeBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.rows import HostRows
from warpsmith.checkpoint.canonical import Checkpoint, open_checkpoint
from warpsmith.checkpoint.dflash import DFlashConfig, open_draft
from warpsmith.draft.base import Draft
from warpsmith.draft.dflash import DFlash
from warpsmith.draft.mtp import MTP
from warpsmith.errors import NoDevice
from warpsmith.llm import LLM
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP, WISP_DRAFT

pytestmark = pytest.mark.gpu

PROMPTS = Path(__file__).parents[1] / "train" / "heldout_prompts.jsonl"
OPTIONS = {"WATCHDOG_CYCLES": "2000000000ll"}


@pytest.fixture(scope="module")
def toy() -> tuple[LargeBackend, ReferenceBackend]:
    tensors = tensors_of(SHAPE, MIXED)
    try:
        cuda = LargeBackend(SHAPE, tensors, context=2048, options=OPTIONS)
    except NoDevice as error:
        pytest.skip(str(error))
    return cuda, ReferenceBackend(SHAPE, tensors)


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_the_device_s_network_equals_numpy_s(toy: tuple[LargeBackend, ReferenceBackend], config: DFlashConfig) -> None:
    check_rings(*both(*toy, file_of(config), rows=90), [(1, 0), (20, 3), (67, 9), (16, 0)])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_K", "Q6_K"])
def test_weight_types(toy: tuple[LargeBackend, ReferenceBackend], kind: str) -> None:
    config = shaped(layers=1)
    native, numpy = both(*toy, file_of(config, kind))
    for draft in (native, numpy):
        draft.append(HostRows(features_of(9, config)), 0)
    check_same(native, numpy, 5, 9, config.block - 1, 0.03)


def test_a_long_memory(toy: tuple[LargeBackend, ReferenceBackend]) -> None:
    config = shaped(layers=2, block=16, windows=(700, None), causal=(True, False))
    native, numpy = both(*toy, file_of(config), rows=1500)
    for draft in (native, numpy):
        draft.append(HostRows(features_of(1400, config)), 0)
    check_same(native, numpy, 5, 1400, 15)


@pytest.fixture(scope="module")
def wisp() -> tuple[CudaBackend, Checkpoint]:
    checkpoint = open_checkpoint(WISP)
    try:
        return CudaBackend(read_config(checkpoint), checkpoint.tensors, options=OPTIONS), checkpoint
    except NoDevice as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("name", "nodes"), [("dflash", 8), ("dflash", 22), ("dflash", 63), ("mtp", 22)])
def test_texts_with_drafts_are_plain_texts(
    wisp: tuple[CudaBackend, Checkpoint], name: str, nodes: int, temperature: float
) -> None:
    cuda, checkpoint = wisp
    draft: Draft = DFlash(open_draft(WISP_DRAFT), cuda, nodes) if name == "dflash" else MTP(cuda, nodes)
    steps = tokens = 0
    for line in PROMPTS.read_text().splitlines()[:12]:
        prompt, options = json.loads(line)["prompt"], {"max_tokens": 96, "temperature": temperature, "seed": 3}
        plain = LLM(cuda, checkpoint, 1024).generate(prompt, **options, stop_ids=[])
        drafted = LLM(cuda, checkpoint, 1024, draft).generate(prompt, **options, stop_ids=[])
        assert drafted.token_ids == plain.token_ids
        steps, tokens = steps + drafted.stats.steps, tokens + drafted.stats.generated_tokens - 1
    print(f"{name}, {nodes} nodes, temperature {temperature}: {tokens / steps:.2f} tokens a step")
    assert tokens > 1.5 * steps
