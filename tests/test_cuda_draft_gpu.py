"""Drafts on a GPU: against numpy, and wisp's texts with its DFlash draft and its MTP head equal to plain ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cuda_draft_cases import (
    SHAPES,
    both,
    check_rings,
    check_same,
    draft_of_the_27b,
    features_of,
    file_of,
    shaped,
)
from device_checks import distance
from large_cases import MIXED, SHAPE, tensors_of
from random_drafts import FORMATS, fill_holes, write_holes
from warpsmith.backend.base import Want
from warpsmith.backend.cuda import LargeBackend, WeightsFirstBackend
from warpsmith.backend.cuda.draft.network import CudaDraft
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.rows import HostRows
from warpsmith.backend.sampling import Sampling
from warpsmith.checkpoint.canonical import Checkpoint, Tensor, open_checkpoint
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.checkpoint.dflash import DFlashConfig, open_draft
from warpsmith.draft.base import Draft
from warpsmith.draft.dflash import DFlash
from warpsmith.draft.mtp import MTP
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler
from warpsmith.errors import NoDevice, WarpsmithError
from warpsmith.llm import LLM
from warpsmith.model.config import SIZES, Config
from warpsmith.model.synthetic import weight_bytes
from warpsmith.model.weights import expected_shapes, read_config
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
def wisp() -> tuple[WeightsFirstBackend, Checkpoint]:
    checkpoint = open_checkpoint(WISP)
    try:
        return WeightsFirstBackend(read_config(checkpoint), checkpoint.tensors, options=OPTIONS), checkpoint
    except NoDevice as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("name", "nodes"), [("dflash", 8), ("dflash", 22), ("dflash", 63), ("mtp", 22)])
def test_texts_with_drafts_are_plain_texts(
    wisp: tuple[WeightsFirstBackend, Checkpoint], name: str, nodes: int, temperature: float
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


def test_the_mtp_head_is_the_reference_s(wisp: tuple[WeightsFirstBackend, Checkpoint]) -> None:
    """Rows in pieces of every build, past two chunks of keys."""
    cuda, checkpoint = wisp
    reference = ReferenceBackend(cuda.config, checkpoint.tensors)
    state, expected_state, rng, position = cuda.new_state(256), reference.new_state(256), np.random.default_rng(0), 0
    for count in (24, 24, 24, 30, 24, 7, 1, 1, 16, 2, 1):
        tokens = rng.integers(0, cuda.config.vocab, count).tolist()
        hidden = rng.standard_normal((count, cuda.config.hidden)).astype(np.float32)
        want = Want("top", top=4, hidden=True)
        got = cuda.mtp(state, tokens, hidden, position, want)
        expected = reference.mtp(expected_state, tokens, hidden, position, want)
        rows = zip(got.hidden.numpy(), expected.hidden.numpy(), strict=True)
        errors = [distance(ours, theirs) for ours, theirs in rows]
        print(f"{count} rows at {position}: {max(errors):.5f}")
        assert max(errors) < 0.02
        position += count


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=20, seed=3)])
def test_a_request_may_be_interrupted_at_any_step(
    wisp: tuple[WeightsFirstBackend, Checkpoint], sampling: Sampling
) -> None:
    """When the tokens of a step are decided and not yet committed; the next one on the same state is right."""
    cuda, _ = wisp
    prompt = list(range(40, 90))
    plain = texts_of(Scheduler(cuda, 512), [prompt], sampling)[0]
    scheduler = Scheduler(cuda, 512, DFlash(open_draft(WISP_DRAFT), cuda, 22))
    for heard in range(1, 40, 3):
        left = iter(range(heard))

        def until(token: int, left: Iterator[int] = left) -> bool:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return False

        with pytest.raises(KeyboardInterrupt):
            list(Generation(scheduler, prompt, sampling, max_tokens=64, until=until))
        assert texts_of(scheduler, [prompt], sampling)[0] == plain


def test_sequences_draft_side_by_side(wisp: tuple[WeightsFirstBackend, Checkpoint]) -> None:
    cuda, _ = wisp
    prompts = [list(range(40 + 7 * i, 90 + 5 * i)) for i in range(3)]
    plain = [texts_of(Scheduler(cuda, 512), [prompt], Sampling())[0] for prompt in prompts]
    scheduler = Scheduler(cuda, 512, DFlash(open_draft(WISP_DRAFT), cuda, 15), parallel=3)
    assert texts_of(scheduler, prompts, Sampling()) == plain


def texts_of(scheduler: Scheduler, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    """Of requests that run at the same time, the later ones longer."""
    requests = [Generation(scheduler, each, sampling, max_tokens=64 + 16 * i) for i, each in enumerate(prompts)]
    for each in requests:
        scheduler.add(each)
    while any(each.finish_reason is None for each in requests):
        scheduler.step()
    texts = [[token for piece in each.runs for token in piece] for each in requests]
    return [text[:64] for text in texts]


def test_drafts_of_the_27b_s_shape_in_every_format(tmp_path: Path) -> None:
    """The same numbers, read from each kind of file, guess the same and change no text."""
    config, draft = SIZES["27B"], draft_of_the_27b()
    try:
        target = LargeBackend(config, shared_tensors(config), context=512, options=OPTIONS)
    except NoDevice as error:
        pytest.skip(str(error))
    prompt = np.random.default_rng(0).integers(0, 50_000, 40).tolist()
    plain, guesses = texts_of(Scheduler(target, 512), [prompt], Sampling())[0], []
    features = features_of(40, draft)
    for name in FORMATS:
        path = write_holes(tmp_path / name.replace(".", "-"), name, draft)
        fill_holes(path, 512)
        proposer = DFlash(open_draft(path), target, 22)
        assert isinstance(proposer.network, CudaDraft)
        memory = proposer.network.new_memory()
        proposer.network.append(memory, HostRows(features), 0)
        guess = proposer.network.fill(memory, 7, 40, 15, Want("top", top=16))
        guesses.append((guess.top_ids, guess.top_logits, guess.logsumexp))
        assert texts_of(Scheduler(target, 512, proposer), [prompt], Sampling())[0] == plain
        del proposer, memory
    for other in guesses[1:]:
        for ours, theirs in zip(guesses[0], other, strict=True):
            np.testing.assert_array_equal(ours, theirs)
    assert np.isfinite(guesses[0][1]).all()


def test_a_draft_that_does_not_fit_is_refused(wisp: tuple[WeightsFirstBackend, Checkpoint]) -> None:
    cuda, _ = wisp
    with pytest.raises(WarpsmithError, match="hidden size of 768"):
        DFlash(file_of(shaped(hidden=768)), cuda)


def shared_tensors(config: Config) -> dict[str, Tensor]:
    """Random ones of Q4_K_M; tensors of one shape and type share their bytes."""
    tensors, kept = {}, {}
    for name, shape in expected_shapes(config).items():
        kind = tensor_type("q4_k_m", name, shape, config.layers, config.tied)
        key = (kind.name, shape) if len(shape) == 2 and "conv1d" not in name else name
        if key not in kept:
            kept[key] = np.concatenate(list(weight_bytes(0, name, kind, shape))).reshape(-1, kind.row_bytes(shape[-1]))
        tensors[name] = Tensor(name, kind, shape, lambda raw=kept[key]: raw)
    return tensors
