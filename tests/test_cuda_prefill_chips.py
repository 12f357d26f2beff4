"""Prompts on chips without wgmma, in 99 KB of shared memory: their kernels build for each of them, and compute the same
on an emulated one and, as PTX, on a GPU at hand."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import pytest

import kernel_claims
from device_checks import plain_run, same_state
from emulator.gpu import emulated_gpu
from large_cases import rounded_caches, tensors_of
from test_cuda_build import usage
from test_cuda_prefill import EVERY, check_errors, error, state_errors
from test_cuda_prefill_widths import CASES, CONTEXT, bound_of, load
from warpsmith.backend.base import LOGITS, Want
from warpsmith.backend.cuda.build.compiler import compile_source, sources, target
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.prefill import plan, products, streams
from warpsmith.backend.cuda.prefill.streams import PromptStream, RowTiles, SlabStream
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.errors import NoDevice
from warpsmith.model.config import SIZES
from warpsmith.model.weights import expected_shapes

# -- builds ------------------------------------------------------------------------------------------------------------

CHIPS = ["generic", "rtx-3090", "rtx-4090", "rtx-5090"]
FILES = [
    ("0.8B", "bf16", ("f16", "f16")),
    ("0.8B", "q8_0", ("f16", "f16")),
    ("4B", "q4_0", ("f16", "f16")),
    ("27B", "q4_k_m", ("q8_0", "q4_0")),
    ("27B", "q6_k", ("q4_0", "q8_0")),
    ("27B", "bf16", ("f16", "f16")),
]


def stream_of(size: str, recipe: str, caches: tuple[str, str], chip_name: str) -> PromptStream:
    config, chip = SIZES[size], load_profiles()[chip_name]
    shapes = expected_shapes(config)
    stored = {n: tensor_type(recipe, n, shape, config.layers, config.tied).name for n, shape in shapes.items()}
    try:
        architecture = target(chip.capability)
    except NoDevice as problem:
        pytest.skip(str(problem))
    if size == "27B":
        return SlabStream(LargeLayout(config, chip.sms, stored, caches), architecture)
    return RowTiles(Layout(config, min(chip.sms, busy_sms(config)), stored), architecture)


def threads_of(name: str, heads: int) -> int:
    threads = {"embed": 128, "attention_rows": 128, "head": 512, "gemm": 384, "slab_gemm": 384}
    return heads * 32 if name == "attention_merge" else threads.get(name, 256)


BUILDS = [("rtx-3090", *FILES[0]), ("rtx-3090", *FILES[3])]
BUILDS += [(chip, *file) for chip in CHIPS for file in FILES if (chip, *file) not in BUILDS]


@pytest.mark.parametrize(
    ("chip", "size", "recipe", "caches"),
    BUILDS[:1] + [pytest.param(*each, marks=pytest.mark.slow) for each in BUILDS[1:]],
)
def test_kernels_build_without_spills(chip: str, size: str, recipe: str, caches: tuple[str, str]) -> None:
    stream = stream_of(size, recipe, caches, chip)
    kernels = plan.kernels_of(stream)
    assert "delta_short" not in {name for name, _ in kernels}  # a cluster
    for name, extra in kernels:
        source, constants = sources()[f"prefill/{name}.cu"], plan.header(stream) | extra
        _, log = compile_source(source, f"{name}.cu", stream.architecture, constants, ("--ptxas-options=-v",))
        if stream.architecture.startswith("compute"):
            continue  # the driver's to build
        used = usage(log)
        assert used.spill_stores == used.spill_loads == 0, (name, extra, log)
        assert used.registers * threads_of(name, stream.config.heads) <= 65536, (name, extra)


def check_claims(stream: PromptStream, name: str, extra: Mapping[str, object], claims: list[str]) -> None:
    kernel_claims.check_claims(sources()[f"prefill/{name}.cu"], claims, "compute_80", plan.header(stream) | dict(extra))


def test_the_host_knows_what_kernels_take() -> None:
    stream = stream_of(*FILES[0], "rtx-3090")
    room = products.shared_memory(stream.architecture)
    assert room <= load_profiles()["rtx-3090"].shared_memory
    assert max(plan.PREP_SHARED, plan.scan_shared(plan.FEW)) <= room
    groups = {"GROUPS": 2, **plan.attention_constants(stream)}
    check_claims(stream, "attention_flash", groups, [f"SHARED_HERE == {plan.flash_shared(2, stream)}"])
    for slot in streams.SLOTS:
        matrix, ending = stream.matrix(slot, 0), streams.ENDINGS[slot]
        for tile in matrix.tiles:
            shared = tile.shared(ending, matrix.types)
            assert shared <= room
            numbers = {"SHARED": shared, "THREADS": tile.threads, "ROWS": tile.rows(ending), "N": tile.tokens}
            claims = [f"Chosen::{n} == {v}" for n, v in numbers.items()]
            check_claims(stream, tile.kernel, tile.constant(ending, matrix.types) or {}, claims)


@pytest.mark.parametrize("types", [1 << n for n in range(5)])
def test_every_type_of_slabs_has_a_tile(types: int) -> None:
    for ending in range(4):
        assert products.DIRECT_SLAB_TILES[0].constant(ending, types) is not None


# -- what they compute: on an emulated GPU -----------------------------------------------------------------------------

# As narrow as a model may be, a layer of either kind.
TOY = replace(
    SIZES["0.8B"], name="toy", layers=2, recurrent=(True, False), hidden=256, ffn=512, vocab=320, heads=2, kv_heads=1,
    key_heads=2, value_heads=4, context=256,
)  # fmt: skip
WIDER = replace(TOY, heads=4, kv_heads=2, value_heads=6, ffn=768, tied=False)
EVERY_TYPE = {"attn_q.": "Q5_K", "attn_k": "Q6_K", "attn_v": "Q8_0", "ssm_": "BF16", "attn_qkv": "Q6_K",
              "attn_gate": "Q5_K", "ffn_down": "Q8_0", "output": "Q6_K"}  # fmt: skip
EMULATED = [
    ("bf16", TOY, {"": "BF16"}, ("f16", "f16")),
    ("q8_0", TOY, {"": "Q8_0"}, ("f16", "f16")),
    ("q4_0", TOY, {"": "Q4_0"}, ("f16", "f16")),
    ("types", WIDER, EVERY_TYPE, ("q8_0", "q4_0")),
    ("types", WIDER, {}, ("q4_0", "f16")),
]


@pytest.fixture(
    scope="module",
    params=[EMULATED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in EMULATED[1:])],
    ids=lambda case: f"{case[0]}-{'-'.join(case[3])}",
)
def small(request: pytest.FixtureRequest) -> Iterator[tuple[WeightsFirstBackend, ReferenceBackend, float]]:
    recipe, config, types, caches = request.param
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    tensors = tensors_of(config, types)
    bound = bound_of(recipe, caches)
    with pytest.MonkeyPatch.context() as patch, emulated_gpu(6, (1,), prompts=True), rounded_caches(caches):
        for name in ("WIDE", "NARROW", "SCALED_WIDE", "SCALED_NARROW", "SLAB"):  # few builds
            name = f"DIRECT_{name}_TILES"
            patch.setattr(streams, name, getattr(streams, name)[:1])
        cuda: WeightsFirstBackend
        if recipe == "types":
            cache_types = dict(zip(("cache_type_k", "cache_type_v"), caches, strict=True))
            cuda = LargeBackend(config, tensors, architecture="sm_86", **cache_types)
        else:
            cuda = WeightsFirstBackend(config, tensors, architecture="sm_86")
        yield cuda, ReferenceBackend(config, tensors), bound


@pytest.mark.parametrize("count", [1, 150])
def test_every_position_and_state(small: tuple[WeightsFirstBackend, ReferenceBackend, float], count: int) -> None:
    cuda, reference, bound = small
    prompt = np.random.default_rng(count).integers(0, cuda.config.vocab, count)
    state, expected = cuda.new_state(256), reference.new_state(256)
    got, wanted = (b.prefill(s, prompt, EVERY).logits.numpy() for b, s in ((cuda, state), (reference, expected)))
    errors = {"logits": error(got, wanted), **state_errors(cuda, state, expected)}
    print(f"{count} tokens: { ({n: round(e, 5) for n, e in errors.items()}) } of {bound:.5f}")
    check_errors(cuda, errors, bound, count)


def test_cuts_keep_the_bits(small: tuple[WeightsFirstBackend, ReferenceBackend, float]) -> None:
    check_cuts(small[0], 150, [64, 128])


def check_cuts(cuda: WeightsFirstBackend, count: int, cuts: list[int]) -> None:
    prompt, context = np.random.default_rng(3).integers(0, cuda.config.vocab, count), -(-count // 64) * 64
    whole, cut = cuda.new_state(context), cuda.new_state(context)
    logits = cuda.prefill(whole, prompt, LOGITS).logits.numpy()
    for low, high in zip([0, *cuts], [*cuts, count], strict=True):
        last = cuda.prefill(cut, prompt[low:high], LOGITS).logits.numpy()
    np.testing.assert_array_equal(last, logits)
    assert same_state(cuda.config, whole, cut)


# -- and on a GPU ------------------------------------------------------------------------------------------------------

LENGTHS = (1, 65, 520)
PROGRAMS = [
    ("compute_80", *CASES[0]),
    ("compute_80", *CASES[2]),
    ("compute_80", *CASES[-1]),
    ("sm_90", *CASES[3]),  # as on 10.0 and 12.0: launches may begin early
    ("sm_90", *CASES[-2]),
]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "size", "recipe", "caches"), PROGRAMS)
def test_their_own_program_on_a_gpu(architecture: str, size: str, recipe: str, caches: tuple[str, str]) -> None:
    """Widths, types and ratios as in test_cuda_prefill_widths.py."""
    cuda, reference = load(size, recipe, caches, architecture)
    bound, expected, done = bound_of(recipe, caches), reference.new_state(CONTEXT), 0
    prompt = np.random.default_rng(2).integers(0, cuda.config.vocab, LENGTHS[-1])
    rows = np.zeros((0, cuda.config.vocab), np.float32)
    with rounded_caches(caches):
        for count in LENGTHS:
            rows = np.concatenate([rows, reference.prefill(expected, prompt[done:count], EVERY).logits.numpy()])
            state, done = cuda.new_state(CONTEXT), count
            got = cuda.prefill(state, prompt[:count], EVERY).logits.numpy()
            errors = {"logits": error(got, rows), **state_errors(cuda, state, expected)}
            print(f"{size} {recipe}, {count}: { ({n: round(e, 5) for n, e in errors.items()}) } of {bound:.5f}")
            check_errors(cuda, errors, bound, count)
    for count, cuts in ((129, [64]), (600, [64, 320]), (4000, [1024, 1600])):
        check_cuts(cuda, count, cuts)
    features = Want("none", features=(1,))
    one, other = (cuda.prefill(cuda.new_state(256), prompt[:200], features).features.numpy() for _ in range(2))
    np.testing.assert_array_equal(one, other)
    after = cuda.new_state(512)
    first = cuda.prefill(after, prompt[:150], LOGITS).logits.numpy()[0]
    assert error(first, plain_run(cuda, cuda.new_state(512), prompt[:150])[-1]) < bound * 2**0.5
