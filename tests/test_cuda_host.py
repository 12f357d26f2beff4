"""The CUDA backend's host side, without a GPU: chips, memory, and what it says where it cannot run."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_draft_cases import draft_of_the_27b
from emulator.gpu import emulated_gpu
from warpsmith.backend.cuda.backend import CudaBackend
from warpsmith.backend.cuda.build import profiles
from warpsmith.backend.cuda.build.profiles import choose, load_profiles, parse
from warpsmith.backend.cuda.builds import build_constants, check_shape
from warpsmith.backend.cuda.choice import PlannedDraft, planned
from warpsmith.backend.cuda.memory import driver
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.memory.plan import check_fit, memory_parts
from warpsmith.backend.cuda.memory.room import CONTEXT_BYTES, Room
from warpsmith.backend.cuda.schedule import deal
from warpsmith.backend.cuda.shape import chunks_of
from warpsmith.backend.cuda.weights.formats import format_for
from warpsmith.backend.devices import Driver
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.checkpoint.blocks import LAYOUTS, TYPES, dequantize
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.checkpoint.dflash import expected_shapes as draft_shapes
from warpsmith.cli import doctor
from warpsmith.draft.budget import Budgeted
from warpsmith.draft.dflash import capacity_of
from warpsmith.draft.select import make_proposer
from warpsmith.errors import BadFile, BadRequest, DoesNotFit, NoDevice
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import tiny_model
from warpsmith.model.weights import expected_shapes, read_config
from warpsmith.wisp import WISP

MODEL = SIZES["0.8B"]

# -- chips -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "capability", "name", "measured"),
    [
        ("NVIDIA H200", (9, 0), "h200", True),
        ("NVIDIA H100 80GB HBM3", (9, 0), "h100", False),
        ("NVIDIA GH200 480GB", (9, 0), "h200", False),  # a relative of the one that was measured
        ("NVIDIA GeForce RTX 3090", (8, 6), "rtx-3090", False),
        ("NVIDIA GeForce RTX 3060", (8, 6), "rtx-3090", False),
        ("NVIDIA GeForce RTX 4090", (8, 9), "rtx-4090", False),
        ("NVIDIA GeForce RTX 5090", (12, 0), "rtx-5090", False),
        ("NVIDIA A100-SXM4-80GB", (8, 0), "generic", False),
        ("NVIDIA of tomorrow", (17, 3), "generic", False),
    ],
)
def test_a_chip_gets_its_own_profile_or_that_of_a_relative(
    device: str, capability: tuple[int, int], name: str, measured: bool
) -> None:
    profile, was_measured = choose(device, capability)
    assert (profile.name, was_measured) == (name, measured)


def test_a_device_s_own_numbers_count() -> None:
    """A cut-down part has fewer SMs or less shared memory than the profile says."""
    profile, _ = choose("NVIDIA GeForce RTX 3090", (8, 6))
    whole = driver.Chip("whole", (8, 6), profile.sms, profile.shared_memory)
    less = driver.Chip("less", (8, 6), profile.sms, profile.shared_memory - (20 << 10))
    assert "constexpr int SMS = 60;" in str(build_constants(Layout(MODEL, 60), whole, profile, 1)["schedule.cuh"])
    layout = Layout(MODEL, profile.sms)
    assert build_constants(layout, whole, profile, 1) != build_constants(layout, less, profile, 1)


def profile_text(**changes: str | None) -> str:
    fields: dict[str, str | None] = {
        "devices": '["A"]',
        "compute_capability": '"8.6"',
        "multiprocessors": "82",
        "memory_gb": "24",
        "shared_memory_kib": "99",
        "in_flight_kib": "32",
        "largest_tree": "16",
        "measured": "false",
    }
    return "\n".join(f"{key} = {value}" for key, value in (fields | changes).items() if value is not None)


def test_a_profile_is_read() -> None:
    profile = parse("new", profile_text())
    assert (profile.devices, profile.capability, profile.sms) == (("A",), (8, 6), 82)
    assert profile.memory == 24 * 10**9
    assert (profile.shared_memory, profile.in_flight, profile.largest_tree) == (99 << 10, 32 << 10, 16)
    assert not profile.measured


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("devices", "7"),
        ("devices", "[7]"),
        ("compute_capability", '"7.5"'),
        ("compute_capability", "8.6"),
        ("compute_capability", '"new"'),
        ("multiprocessors", "0"),
        ("multiprocessors", "true"),
        ("memory_gb", "0"),
        ("shared_memory_kib", "16"),
        ("in_flight_kib", "-1"),
        ("largest_tree", "65"),
        ("largest_tree", None),
        ("measured", "1"),
        ("clusters", "4"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(field: str, value: str | None) -> None:
    with pytest.raises(BadFile, match=field):
        parse("new", profile_text(**{field: value}))


def test_a_profile_that_is_not_toml_is_refused() -> None:
    with pytest.raises(BadFile, match=r"chips/new\.toml"):
        parse("new", "devices = [")


def test_doctor_tells_the_profile_and_whether_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"compute_capability": "9.0", "multiprocessors": 132, "memory": 150 << 30}
    names = ("NVIDIA H200", "NVIDIA H100 PCIe")
    found = [facts | {"name": name} for name in names]
    monkeypatch.setattr(doctor, "gpus", lambda: (found, Driver("driver for CUDA 13.0")))
    assert doctor.main(SimpleNamespace(json=False)) == 0  # type: ignore[arg-type]
    page = capsys.readouterr().out
    assert "NVIDIA H200: compute capability 9.0, 132 SMs, 150.00 GiB; profile h200, measured on this chip" in page
    assert "PCIe: compute capability 9.0, 132 SMs, 150.00 GiB; profile h200, not measured on this chip" in page


def test_drafts_keep_to_the_largest_tree() -> None:
    backend = ReferenceBackend(SIZES["tiny"], tiny_model().tensors)
    backend.largest_tree = 16
    proposer = make_proposer("ngram", "auto", backend)
    assert isinstance(proposer, Budgeted)
    assert proposer.draft.nodes == 15
    assert make_proposer("ngram", 15, backend) is not None
    with pytest.raises(BadRequest, match="15 drafted nodes, not 16"):
        make_proposer("ngram", 16, backend)
    backend.largest_launch = 8  # a larger tree would read the weights twice
    proposer = make_proposer("ngram", "auto", backend)
    assert isinstance(proposer, Budgeted)
    assert proposer.draft.nodes == 7


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_plan_counts_what_is_known() -> None:
    layout = Layout(MODEL, sms=132)
    parts = {part.what: part.nbytes for part in memory_parts(layout, 262_144)}
    assert parts["keys and values"] == 2 * 6 * 2 * 256 * 2 * 262_144  # K and V, layers, heads, dimensions, fp16
    assert 1.50e9 < parts["weights"] < 1.53e9
    states = 18 * 16 * 128 * 128 * 4
    assert 2 * states < parts["DeltaNet states"] < 2.3 * states  # and the copy that decoding can go back to
    several = {part.what: part.nbytes for part in memory_parts(layout, 262_144, sequences=3, snapshots=77)}
    of_sequences = ("keys and values", "DeltaNet states", "rows of a tree")
    assert several == parts | {what: 3 * parts[what] for what in of_sequences} | {"snapshots": 77}


@pytest.mark.parametrize("profile", load_profiles().values(), ids=load_profiles())
def test_the_stream_holds_every_weight_once(profile: profiles.Profile) -> None:
    """Rows are padded to whole row tiles and columns to whole chunks, which the 0.8B's are but for a few."""
    layout = Layout(MODEL, profile.sms)
    names = [piece.tensor for held in layout.stream.parts for piece in held.part.pieces]
    shapes = {name: shape for name, shape in expected_shapes(MODEL).items() if name not in layout.schedule.vectors()}
    assert sorted(names) == sorted(shapes)
    stored = sum(2 * math.prod(shape) for shape in shapes.values())
    assert stored <= layout.stream.bytes < 1.01 * stored
    assert sum(p.nbytes for p in memory_parts(layout, MODEL.context)) < 24 << 30  # a 24 GB card takes the whole context


def test_embeddings_of_their_own_are_counted() -> None:
    tied, untied = (Layout(replace(MODEL, tied=tied), 132, {"token_embd.weight": "Q8_0"}) for tied in (True, False))
    extra = memory_parts(untied, 1024)[0].nbytes - memory_parts(tied, 1024)[0].nbytes
    table = MODEL.vocab * MODEL.hidden * 34 // 32
    assert untied.stream.embedding_bytes == table
    assert tied.stream.embedding_bytes == 0
    assert extra == table + (untied.stream.bytes - tied.stream.bytes)  # the untied head is BF16 here, the tied one Q8_0


# -- types in the stream -----------------------------------------------------------------------------------------------


def test_rows_that_share_tiles_are_widened_unless_they_are_of_one_type() -> None:
    assert format_for(["Q8_0", "Q8_0"]).type.name == "Q8_0"
    assert format_for(["Q8_0", "F32"]).type.name == "BF16"
    assert format_for(["Q4_K"]).type.name == "BF16"


@pytest.mark.parametrize("stored", ["Q5_0", "IQ4_NL"])
def test_smaller_integers_with_a_scale_are_held_exactly(stored: str) -> None:
    random = np.random.default_rng(0)
    rows = random.integers(0, 256, (7, TYPES[stored].row_bytes(96)), dtype=np.uint8)
    rows.reshape(-1).view(LAYOUTS[stored])["d"] = random.standard_normal(7 * 3)
    held = format_for([stored])
    assert held.type.name == "Q8_0"
    converted = held.convert(TYPES[stored], rows)
    np.testing.assert_array_equal(dequantize(held.type, converted), dequantize(TYPES[stored], rows))


def test_a_q8_0_file_streams_its_own_bytes() -> None:
    """34 bytes for 32 weights, and no more than the padding of whole row tiles."""
    stored = dict.fromkeys(expected_shapes(MODEL), "Q8_0")
    layout = Layout(MODEL, 132, stored)
    weights = sum(math.prod(s) for n, s in expected_shapes(MODEL).items() if n not in layout.schedule.vectors())
    assert weights * 34 // 32 <= layout.stream.bytes < weights * 34 // 32 * 1.002
    assert {held.format.type.name for held in layout.stream.parts} == {"Q8_0"}


def test_gates_stored_apart_cost_no_other_weights_their_type() -> None:
    """Files that keep beta and alpha in F32 stream everything else as Q8_0."""
    stored = {n: "F32" if "ssm_beta" in n or "ssm_alpha" in n else "Q8_0" for n in expected_shapes(MODEL)}
    layout = Layout(MODEL, 132, stored)
    assert "#define LAYER_FORMATS 8, 8, 30, 8, 8, 8, 8" in layout.stream.header()
    widened = {p.tensor for held in layout.stream.parts if held.format.type.name == "BF16" for p in held.part.pieces}
    assert widened == {n for n, kind in stored.items() if kind == "F32"}


@settings(max_examples=30, deadline=None)
@given(sms=st.integers(1, 200), kinds=st.lists(st.sampled_from(["BF16", "Q8_0", "Q6_K"]), min_size=9, max_size=9))
def test_every_row_tile_has_a_place_of_its_own(sms: int, kinds: list[str]) -> None:
    """An SM's row tiles follow each other in its stream, whatever their types: the producer does not look."""
    names = [n for n, s in expected_shapes(SIZES["tiny"]).items() if len(s) == 2]
    layout = Layout(SIZES["tiny"], sms, {name: kinds[i % len(kinds)] for i, name in enumerate(names)})
    stream = layout.stream
    at = stream.start.copy()
    for number, held in enumerate(stream.parts):
        stage, part = held.stage, held.part
        first = stream.first_tiles[stage.names[-1]]
        each = chunks_of(stage.k) * 8 * stage.tile_rows * {"Q8_0": 34, "BF16": 64}[held.format.type.name]
        assert held.tile_bytes == each
        for sm in range(sms):
            assert stream.part_start[number][sm] == at[sm]
            low, high = max(first[sm], part.first_tile), min(first[sm + 1], part.first_tile + part.tiles)
            at[sm] += max(0, high - low) * each
    assert at.tolist() == [*stream.start[1:].tolist(), stream.bytes]


@settings(max_examples=100, deadline=None)
@given(sms=st.integers(1, 200), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=600))
def test_work_is_dealt_by_bytes(sms: int, sizes: list[int]) -> None:
    bounds = deal(np.array(sizes), sms)
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    counts = np.diff(bounds)
    assert (counts >= (len(sizes) >= sms)).all()
    shares = np.add.reduceat([*sizes, 0], bounds[:-1].clip(max=len(sizes))) * (counts > 0)
    assert shares.max() <= sum(sizes) / sms + 2 * max(sizes)
    equal = deal(np.full(len(sizes), 7), sms)
    assert equal.tolist() == [len(sizes) * sm // sms for sm in range(sms + 1)]  # as the kernels do without a table


def test_larger_row_tiles_are_shared_by_more_sms() -> None:
    """Where k and v are in BF16 beside a q in Q8_0, no SM has much more to read than the mean."""
    stored = dict.fromkeys(expected_shapes(MODEL), "Q8_0")
    stored |= {name: "BF16" for name in stored if "attn_k.weight" in name or "attn_v.weight" in name}
    layout = Layout(MODEL, 132, stored)
    numbers = [i for i, held in enumerate(layout.stream.parts) if held.stage.names[-1] == "attention_in.3"]
    shares = layout.stream.part_bytes[numbers].sum(axis=0)
    assert shares.max() < 1.35 * shares.mean()  # 320 row tiles for 132 SMs: one tile is up to 0.6 of a share
    assert "DEALT_TILES" in layout.stream.header()


@settings(max_examples=60, deadline=None)
@given(context=st.integers(2, 262_144), share=st.floats(0, 1.2))
def test_what_does_not_fit_is_refused_with_what_would(context: int, share: float) -> None:
    layout = Layout(MODEL, sms=82)

    def needed(tokens: int) -> int:
        return sum(part.nbytes for part in memory_parts(layout, tokens))

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
        return sum(part.nbytes for part in memory_parts(layout, tokens))

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
        CudaBackend(config, model.tensors, context=256, memory_limit=limit)


# -- no usable GPU -----------------------------------------------------------------------------------------------------


def fake_driver(init: int = 0, devices: int = 1, capability: tuple[int, int] = (9, 0)) -> Any:
    """As much of NVIDIA's bindings as finding out about a device needs."""
    attributes = {"MAJOR": capability[0], "MINOR": capability[1]}
    names = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="MAJOR",
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="MINOR",
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="SMS",
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="SHARED",
    )
    return SimpleNamespace(
        cuInit=lambda flags: (init,),
        cuDeviceGetCount=lambda: (0, devices),
        cuDeviceGet=lambda ordinal: (0, ordinal),
        cuDeviceGetName=lambda size, device: (0, b"NVIDIA Something\0\0"),
        cuDeviceGetAttribute=lambda which, device: (0, attributes.get(which, 50)),
        CUdevice_attribute=names,
    )


@pytest.mark.parametrize(
    ("bindings", "words"),
    [
        (fake_driver(init=100), "No NVIDIA GPU is visible"),
        (fake_driver(devices=0), "No NVIDIA GPU is visible"),
        (fake_driver(init=999), r"does not start \(error 999\)"),
        (fake_driver(capability=(7, 5)), "NVIDIA Something has compute capability 7.5, and the kernels need 8.0"),
    ],
)
def test_it_says_why_a_gpu_cannot_be_used(bindings: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_bindings", lambda: bindings)
    with pytest.raises(NoDevice, match=words) as refused:
        driver.Device()
    assert refused.value.exit_code == 4
    assert "--device cpu" in refused.value.fix


def test_the_command_exits_4_where_no_gpu_can_be_used() -> None:
    command = [sys.executable, "-m", "warpsmith.cli", "run", "--device", "cuda", "-p", "x"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, capture_output=True, text=True, env=hidden, timeout=60)
    assert result.returncode == 4
    assert re.match(r"error: (There is no NVIDIA driver|No NVIDIA GPU|The CUDA bindings)", result.stderr)
    assert not result.stdout


def test_shapes_the_kernels_do_not_take() -> None:
    check_shape(MODEL)
    check_shape(read_config(open_checkpoint(WISP)))
    check_shape(SIZES["9B"])
    with pytest.raises(NoDevice, match="shape"):
        check_shape(SIZES["27B"])  # a unit of its rows is more than the registers hold
