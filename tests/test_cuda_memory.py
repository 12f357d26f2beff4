"""What a model takes on a GPU, planned without one: what fits, what is refused, and held to a limit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_draft_cases import draft_of_the_27b
from emulator.gpu import emulated_gpu
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.choice import PlannedDraft, planned
from warpsmith.backend.cuda.memory import driver
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.memory.plan import check_fit, weights_first_parts
from warpsmith.backend.cuda.memory.room import CONTEXT_BYTES, Room
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.checkpoint.dflash import HEAD
from warpsmith.checkpoint.dflash import expected_shapes as draft_shapes
from warpsmith.draft.dflash import capacity_of
from warpsmith.errors import DoesNotFit
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import tiny_model
from warpsmith.model.weights import expected_shapes, read_config

MODEL = SIZES["0.8B"]


def test_the_plan_counts_what_is_known() -> None:
    layout = Layout(MODEL, sms=132)
    parts = {part.what: part.nbytes for part in weights_first_parts(layout, 262_144)}
    assert parts["keys and values"] == 2 * 6 * 2 * 256 * 2 * 262_144  # K and V, layers, heads, dimensions, fp16
    assert 1.50e9 < parts["weights"] < 1.53e9
    states = 18 * 16 * 128 * 128 * 4
    assert 2 * states < parts["DeltaNet states"] < 2.3 * states  # and the copy that decoding can go back to
    several = {part.what: part.nbytes for part in weights_first_parts(layout, 262_144, sequences=3, snapshots=77)}
    of_sequences = ("keys and values", "DeltaNet states", "rows of a tree")
    assert several == parts | {what: 3 * parts[what] for what in of_sequences} | {"snapshots": 77}


@settings(max_examples=60, deadline=None)
@given(context=st.integers(2, 262_144), share=st.floats(0, 1.2))
def test_what_does_not_fit_is_refused_with_what_would(context: int, share: float) -> None:
    layout = Layout(MODEL, sms=82)

    def needed(tokens: int) -> int:
        return sum(part.nbytes for part in weights_first_parts(layout, tokens))

    smallest = needed(2)
    free = int(smallest * 0.9 + share * (needed(context) - smallest * 0.9))
    if needed(context) <= free:
        check_fit(layout, context, Room("a GPU", free))
        return
    with pytest.raises(DoesNotFit) as refused:
        check_fit(layout, context, Room("a GPU", free))
    assert refused.value.exit_code == 5
    assert f"a GPU has {free / 2**30:.2f} GiB free" in refused.value.problem
    assert f"{needed(context) / 2**30:.2f} GiB" in refused.value.problem
    fix = re.fullmatch(r"A context of (\d+) would fit \(-c \1\)\.", refused.value.fix)
    if fix is None:
        assert free < smallest
    else:
        assert needed(int(fix[1])) <= free < needed(int(fix[1]) + 1)


def test_a_limit_that_is_too_small_says_what_it_leaves_and_what_would_do() -> None:
    layout, context = Layout(MODEL, sms=82), 4096

    def needed(tokens: int) -> int:
        return sum(part.nbytes for part in weights_first_parts(layout, tokens))

    def refusal(limit: int, on_gpu: int = 100 << 30) -> DoesNotFit:
        with pytest.raises(DoesNotFit) as refused:
            check_fit(layout, context, Room("a GPU", on_gpu, limit))
        return refused.value

    enough = needed(context) + CONTEXT_BYTES
    check_fit(layout, context, Room("a GPU", 100 << 30, enough))
    assert refusal(enough - 1).fix == f"A context of {context - 1} would fit (-c {context - 1})."
    small = refusal(1 << 30)
    assert small.problem.startswith(f"A context of {context} tokens needs {needed(context) / 2**30:.2f} GiB (weights ")
    assert small.problem.endswith(
        ", and a --memory-limit of 1.00 GiB leaves 0.49 GiB after the CUDA context (0.51 GiB)."
    )
    said = re.fullmatch(r"Raise the limit: --memory-limit (\d+)M\.", small.fix)
    assert said is not None
    check_fit(layout, context, Room("a GPU", 100 << 30, int(said[1]) << 20))
    assert "leaves 0.00 GiB after the CUDA context" in refusal(CONTEXT_BYTES // 2).problem
    assert refusal(1 << 30, on_gpu=1 << 30).fix == "Use a smaller model, or --device cpu."  # no limit would do
    assert "a GPU has 0.25 GiB free" in refusal(1 << 30, on_gpu=1 << 28).problem  # it is not the limit


def test_the_27b_with_a_long_context_fits_a_24_gb_card_by_plan() -> None:
    config, chip = SIZES["27B"], load_profiles()["rtx-3090"]
    shapes = expected_shapes(config)
    stored = {n: tensor_type("q4_k_m", n, shape, config.layers, config.tied).name for n, shape in shapes.items()}

    def needed(*caches: str) -> dict[str, int]:
        return {part.what: part.nbytes for part in planned(config, stored, chip, 131_072, caches)}

    small, mixed, large = needed("q4_0", "q4_0"), needed("q8_0", "q4_0"), needed("f16", "f16")
    assert sum(small.values()) - small["CUDA itself"] < 21e9  # room for a draft
    assert sum(large.values()) > chip.memory
    rows = 16 * 4 * 131_072  # layers, heads, tokens
    assert [each["keys and values"] for each in (small, mixed, large)] == [rows * 288, rows * 416, rows * 1024]
    assert mixed["weights"] == large["weights"]


def test_the_27b_with_its_draft_and_a_long_context_fits_a_24_gb_card_by_plan() -> None:
    config, chip, draft = SIZES["27B"], load_profiles()["rtx-3090"], draft_of_the_27b()
    shapes = expected_shapes(config)
    stored = {n: tensor_type("q4_k_m", n, shape, config.layers, config.tied).name for n, shape in shapes.items()}
    of_the_draft = PlannedDraft(draft, dict.fromkeys(draft_shapes(draft), "BF16"), capacity_of(draft))
    parts = {p.what: p.nbytes for p in planned(config, stored, chip, 131_072, ("q4_0", "q4_0"), of_the_draft)}
    assert 1.9e9 < parts["draft"] < 2.1e9  # rounded to 8 bits; its LM head is the target's
    assert 99e6 < parts["draft's memory"] < 106e6  # 4096 rows of 20 KiB, and features that wait
    assert sum(parts.values()) < min(24e9, chip.memory)
    fewer = replace(of_the_draft, config=replace(draft, speaks=98_304))
    own = {p.what: p.nbytes for p in planned(config, stored, chip, 131_072, ("q4_0", "q4_0"), fewer)}
    head = 98_304 * 5120 * 210 // 256  # in Q6_K
    assert 0.9 * head < own["draft"] - parts["draft"] < 1.1 * head  # logits of fewer tokens, and what finds the best
    assert sum(own.values()) < min(24e9, chip.memory)
    types = {**of_the_draft.stored, HEAD: "Q4_K"}
    smaller = replace(fewer, config=replace(fewer.config, own_head=True), stored=types)
    least = {p.what: p.nbytes for p in planned(config, stored, chip, 131_072, ("q4_0", "q4_0"), smaller)}
    assert 0.9 * head < (own["draft"] - least["draft"]) * 210 / (210 - 148) < 1.1 * head  # 148: slabs of Q4_K


def test_buffers_are_held_to_a_limit() -> None:
    with emulated_gpu(4, (8,)):
        device = driver.Device(limit=CONTEXT_BYTES + 1000)
        first = device.allocate(600)
        assert device.free_memory() == 400
        with pytest.raises(DoesNotFit, match=r"more do not fit: a --memory-limit .* CUDA context .* of buffers\."):
            device.allocate(600)
        del first
        assert device.allocate(900).nbytes == 900


def test_what_cuda_takes_is_planned_and_counts_against_a_limit() -> None:
    model, chip = tiny_model(), load_profiles()["h200"]
    config, stored = read_config(model), {name: tensor.type.name for name, tensor in model.tensors.items()}
    parts = {part.what: part.nbytes for part in planned(config, stored, chip, 256, ("f16", "f16"))}
    assert parts["CUDA itself"] == CONTEXT_BYTES
    limit = sum(parts.values()) - 1
    with emulated_gpu(chip.sms, (8,)), pytest.raises(DoesNotFit, match="keys and values"):
        WeightsFirstBackend(config, model.tensors, context=256, memory_limit=limit)
