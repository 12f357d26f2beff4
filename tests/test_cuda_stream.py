"""The stream of weights, without a GPU: every weight once, in the type it is held in, dealt to SMs by bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpsmith.backend.cuda.build import profiles
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.memory.plan import weights_first_parts
from warpsmith.backend.cuda.schedule import deal
from warpsmith.backend.cuda.shape import chunks_of
from warpsmith.backend.cuda.weights.formats import format_for
from warpsmith.checkpoint.blocks import LAYOUTS, TYPES, dequantize
from warpsmith.model.config import SIZES
from warpsmith.model.weights import expected_shapes

MODEL = SIZES["0.8B"]


@pytest.mark.parametrize("profile", load_profiles().values(), ids=load_profiles())
def test_the_stream_holds_every_weight_once(profile: profiles.Profile) -> None:
    """Rows are padded to whole row tiles and columns to whole chunks, which the 0.8B's are but for a few."""
    layout = Layout(MODEL, profile.sms)
    names = [piece.tensor for held in layout.stream.parts for piece in held.part.pieces]
    shapes = {name: shape for name, shape in expected_shapes(MODEL).items() if name not in layout.schedule.vectors()}
    assert sorted(names) == sorted(shapes)
    stored = sum(2 * math.prod(shape) for shape in shapes.values())
    assert stored <= layout.stream.bytes < 1.01 * stored
    assert (
        sum(p.nbytes for p in weights_first_parts(layout, MODEL.context)) < 24 << 30
    )  # a 24 GB card takes the whole context


def test_embeddings_of_their_own_are_counted() -> None:
    tied, untied = (Layout(replace(MODEL, tied=tied), 132, {"token_embd.weight": "Q8_0"}) for tied in (True, False))
    extra = weights_first_parts(untied, 1024)[0].nbytes - weights_first_parts(tied, 1024)[0].nbytes
    table = MODEL.vocab * MODEL.hidden * 34 // 32
    assert untied.stream.embedding_bytes == table
    assert tied.stream.embedding_bytes == 0
    assert extra == table + (untied.stream.bytes - tied.stream.bytes)  # the untied head is BF16 here, the tied one Q8_0


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
