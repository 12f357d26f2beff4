"""The activations-first forward pass on chips without wgmma and bulk copies, with 99 KB of shared memory an SM: it
builds for each of them, and computes the same on an emulated one and, as PTX, on a GPU at hand."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from device_checks import (
    check_decoded,
    check_drawn,
    check_interleaved,
    check_last_path,
    relative,
)
from emulator.gpu import emulated_gpu
from large_cases import CACHES, MIXED, SHAPE, bound_of, remember, rounded_caches, tensors_of
from random_models import random_tree
from warpsmith.backend.base import Want
from warpsmith.backend.cuda.build.compiler import compile_source, sources, target
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.large.backend import IN_FLIGHT, LargeBackend
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.large.plan import variants_for
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.errors import NoDevice
from warpsmith.model.config import SIZES
from warpsmith.model.weights import expected_shapes

LITTLE = load_profiles()["rtx-3090"].shared_memory
CHIPS = ["rtx-3090", "rtx-4090", "rtx-5090"]
LAB = Path(__file__).parents[1] / "bench" / "lab"
MOST_SPILLED = 160  # bytes put aside or fetched back in any function: of loops over spans, where they begin and end


def test_how_large_a_tree_may_be_follows_from_shared_memory() -> None:
    assert variants_for(LITTLE) == (1, 8)
    assert variants_for(load_profiles()["h200"].shared_memory) == (1, 8, 16, 24)


FILES = [("27B", "q4_k_m", ("f16", "f16")), ("27B", "q4_k_m", ("q4_0", "q4_0")), ("9B", "q6_k", ("q8_0", "q8_0"))]
BUILDS = [(chip, *file) for chip in CHIPS for file in FILES]


@cache
def built(
    name: str,
    size: str,
    recipe: str,
    caches: tuple[str, str],
    nodes: int,
    program: str = "large/forward.cu",
    short: bool | None = None,
) -> tuple[bytes, str]:
    """The kernel's machine code, or that of a program of the laboratory, and what the compiler says of it. `short`:
    for short contexts; where it is not given, for one node only."""
    chip, config = load_profiles()[name], SIZES[size]
    shapes, architecture = expected_shapes(config), target(chip.capability)
    stored = {n: tensor_type(recipe, n, shape, config.layers, config.tied).name for n, shape in shapes.items()}
    layout = LargeLayout(config, chip.sms, stored, caches)
    in_flight, between = IN_FLIGHT[nodes > 1]
    constants = layout.constants(nodes) | {
        "IN_FLIGHT": in_flight,
        "BETWEEN": between,
        "SHARED_MEMORY": chip.shared_memory,
        "SAMPLES": int(nodes == 1 and layout.samples),
        "SHORT_CONTEXT": int(nodes == 1 if short is None else short),
    }
    source = sources().get(program) or (LAB / program).read_text()
    try:
        return compile_source(source, program, architecture, constants, ("--ptxas-options=-v",))
    except NoDevice as error:
        pytest.skip(str(error))


def spilled(
    name: str, size: str, recipe: str, caches: tuple[str, str], nodes: int, short: bool | None = None
) -> list[int]:
    """Bytes that functions of the kernel put aside and fetch back; none where the driver makes its machine code."""
    _, log = built(name, size, recipe, caches, nodes, short=short)
    found = [int(n) for n in re.findall(r"(\d+) bytes spill", log)]
    print(f"{name}, {size} {recipe}, {nodes} nodes: {found}")
    assert found or target(load_profiles()[name].capability).startswith("compute"), log
    return found


def code_sections(image: bytes) -> list[bytes]:
    """The sections of an ELF file that are instructions."""
    first, (each, count) = struct.unpack_from("<Q", image, 40)[0], struct.unpack_from("<HH", image, 58)
    sections = (struct.unpack_from("<IIQQQQ", image, first + i * each) for i in range(count))
    return [image[start : start + size] for _, _, flags, _, start, size in sections if flags & 4]


def code_bytes(image: bytes) -> int:
    return sum(map(len, code_sections(image)))


@pytest.mark.parametrize(
    ("name", "size", "recipe", "caches"),
    BUILDS[:1] + [pytest.param(*each, marks=pytest.mark.slow) for each in BUILDS[1:]],
)
def test_the_kernel_builds_for_every_chip(name: str, size: str, recipe: str, caches: tuple[str, str]) -> None:
    for nodes in variants_for(load_profiles()[name].shared_memory):
        assert max(spilled(name, size, recipe, caches, nodes), default=0) <= MOST_SPILLED


ON_AN_H200 = [*product(("f16", "q8_0", "q4_0"), (1, 8, 16, 24), (True, False))]
USUAL = [("f16", 1, True), ("f16", 24, True), ("q8_0", 1, False), ("q4_0", 24, False)]


@pytest.mark.parametrize(
    ("cache", "nodes", "short"),
    [pytest.param(*each, marks=[] if each in USUAL else pytest.mark.slow) for each in ON_AN_H200],
)
def test_on_an_h200_a_stage_needs_nothing_from_the_stack(cache: str, nodes: int, short: bool) -> None:
    """There is hardly an L1 cache beside 227 KB of shared memory: with a few words of stack that every stage uses, a
    tree of 22 nodes took more than a tenth longer. Two words are the number of tokens so far."""
    assert max(spilled("h200", "27B", "q4_k_m", (cache, cache), nodes, short)) <= 8


@pytest.mark.parametrize("nodes", [1, 24])
def test_on_an_h200_there_is_little_code(nodes: int) -> None:
    """An SM keeps 128 KB of it. Of 289 KB a tree of 22 nodes ran 165 in four layers, and took 3% longer than now."""
    image, _ = built("h200", "27B", "q4_k_m", ("f16", "f16"), nodes)
    print(f"{nodes} nodes: {code_bytes(image)}")
    assert 100_000 < code_bytes(image) < 245_000


def loads_behind_arrivals(image: bytes) -> list[int]:
    """For every arrival at a barrier among tensor products: how many loads from shared memory were made before it, but
    after the last one that something waited for: they come in order. By opcodes and control bits of sm_90."""
    load, arrival, product = 0x984, 0x9A7, 0x23C
    words = [word for section in code_sections(image) for word in struct.iter_unpack("<QQ", section)]
    opcodes = [low & 0xFFF for low, _ in words]
    found = []
    for at, opcode in enumerate(opcodes):
        if opcode != arrival or not all(product in opcodes[i : i + 100] for i in (at - 100, at)):
            continue
        pending: dict[int, list[int]] = {}
        waited = -1
        for i in range(at - 200, at + 1):
            control = words[i][1] >> 41
            for board in range(6):
                if control >> (11 + board) & 1:
                    waited = max([waited, *pending.pop(board, [])])
            if opcodes[i] == load:
                pending.setdefault(control >> 5 & 7, []).append(i)
        found.append(sum(i > waited for loads in pending.values() for i in loads))
    return found


def test_one_node_gives_a_slot_back_when_its_words_are_there() -> None:
    """An arrival may overtake loads before it, and then the slot is filled again before it is read."""
    image, _ = built("h200", "27B", "q4_k_m", ("f16", "f16"), 1)
    found = loads_behind_arrivals(image)
    assert len(found) >= 2  # of Q4_K and of Q6_K
    assert not any(found)


def loops_that_poll_shared_memory(image: bytes) -> int:
    """Loops of a few instructions that load from one place in shared memory. By opcodes of sm_90."""
    load, branch, compare, most = 0x984, 0x947, 0x00C, 6  # comparisons write predicates
    words = [low for section in code_sections(image) for low, _ in struct.iter_unpack("<QQ", section)]
    found = 0
    for at, word in enumerate(words):
        offset = (word >> 34) << 8 | (word >> 16 & 0xFF)  # in four bytes, from the next instruction on
        back = ((1 << 38) - offset) // 4
        if word & 0xFFF != branch or not 1 < back <= most:
            continue
        body = words[at + 1 - back : at]
        written = {each >> 16 & 0xFF for each in body if each & 0x1FF != compare}
        found += any(each & 0xFFF == load and each >> 24 & 0xFF not in written for each in body)
    return found


def test_one_node_asks_again_how_many_copies_there_were() -> None:
    """A compiler may load a word once, ahead of the loop that waits for it, and then leave the loop out."""
    image, _ = built("h200", "27B", "q4_k_m", ("f16", "f16"), 1)
    assert loops_that_poll_shared_memory(image) >= 2  # of Q4_K and of Q6_K


@pytest.mark.parametrize(("program", "nodes"), [*product(("large_products.cu", "large_attention.cu"), (1, 24))])
def test_the_laboratory_times_the_same_code(program: str, nodes: int) -> None:
    image, _ = built("h200", "27B", "q4_k_m", ("f16", "f16"), nodes, program, short=False)
    assert code_bytes(image) > 0


# -- what it computes: emulated, and on a GPU --------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        ("emulated", CACHES[0]),
        pytest.param(("emulated", ("q4_0", "q4_0")), marks=pytest.mark.slow),  # values of two chunks at a time
        *(pytest.param(("gpu", caches), marks=pytest.mark.gpu) for caches in CACHES),
    ],
    ids=lambda param: f"{param[0]}-{'-'.join(param[1])}",
)
def small(request: pytest.FixtureRequest) -> Iterator[tuple[LargeBackend, ReferenceBackend]]:
    where, (keys, values) = request.param
    tensors = tensors_of(SHAPE, MIXED)
    given = {"context": 512, "cache_type_k": keys, "cache_type_v": values}
    options = {"SHARED_MEMORY": LITTLE}
    if where == "gpu":
        options["WATCHDOG_CYCLES"] = "2000000000ll"
        try:
            cuda = LargeBackend(SHAPE, tensors, architecture="compute_80", options=options, prompts=False, **given)
        except NoDevice as error:
            pytest.skip(str(error))
        with rounded_caches((keys, values)):
            yield cuda, ReferenceBackend(SHAPE, tensors)
        return
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    with emulated_gpu(6, (1, 8), often=True), rounded_caches((keys, values)):
        cuda = LargeBackend(SHAPE, tensors, architecture="sm_86", options=options, **given)
        yield cuda, ReferenceBackend(SHAPE, tensors)


def test_it_computes_what_the_reference_does(small: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = small
    rng = np.random.default_rng(0)
    for length in (0, 190):
        state, expected = cuda.new_state(256), reference.new_state(256)
        if length:
            remember(cuda, state, reference, expected, length, rng)
        tree, want = random_tree(rng, 8, SHAPE.vocab), Want("logits", features=(0, 1, 2))
        got, exact = cuda.forward([(state, tree)], want), reference.forward([(expected, tree)], want)
        assert relative(got.features.numpy(), exact.features.numpy()) < bound_of(cuda)
        assert relative(got.logits.numpy(), exact.logits.numpy()) < bound_of(cuda)


def test_a_tree_s_rows_are_those_of_plain_decoding(small: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, reference = small
    length, state, plain = 126, cuda.new_state(256), cuda.new_state(256)
    for each in (state, plain):
        remember(cuda, each, reference, reference.new_state(256), length, np.random.default_rng(length))
    check_last_path(cuda, state, plain, random_tree(np.random.default_rng(1), 8, SHAPE.vocab))


def test_a_tree_of_22_nodes_runs_in_several_launches(small: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = small
    assert cuda.largest_launch < 22 <= cuda.largest_tree
    tree = random_tree(np.random.default_rng(2), 22, SHAPE.vocab)
    check_last_path(cuda, cuda.new_state(256), cuda.new_state(256), tree)


@pytest.mark.slow  # test_cuda_large.py has the like
def test_decoding_is_forward_after_forward(small: tuple[LargeBackend, ReferenceBackend]) -> None:
    check_decoded(small[0], 3)
    check_drawn(small[0], Sampling(temperature=0.9, top_k=5, top_p=0.95, seed=7), 2)


@pytest.mark.slow
def test_sequences_interleave(small: tuple[LargeBackend, ReferenceBackend]) -> None:
    check_interleaved(small[0], [2, 3], 4)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_decoding_where_the_ring_has_fewer_slots_than_a_warp_passes() -> None:
    options = {"SHARED_MEMORY": LITTLE}
    with emulated_gpu(6, (1, 8), often=True):
        cuda = LargeBackend(
            SHAPE, tensors_of(SHAPE, {"": "Q8_0"}), architecture="sm_86", options=options, context=512, prompts=False
        )
        check_decoded(cuda, 3)
