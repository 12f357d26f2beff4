"""Where exchanged activations lie, without a GPU: the host's places are the kernel's, and nothing shares a word."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from test_cuda import SHAPE
from warpsmith.backend.cuda.build.compiler import compile_source, target
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.builds import build_constants
from warpsmith.backend.cuda.memory import exchange as host
from warpsmith.backend.cuda.memory.driver import Chip
from warpsmith.backend.cuda.memory.exchange import NOT_YET, Area, Exchange
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.backend.tree import MAX_NODES
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.errors import NoDevice, WarpsmithError
from warpsmith.model.config import SIZES, Config
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

MODELS = {name: SIZES[name] for name in ("tiny", "0.8B", "2B", "4B", "9B")} | {
    "wisp": read_config(open_checkpoint(WISP)),
    "test": SHAPE,
}


def words_of(exchange: Exchange, nodes: int = MAX_NODES) -> np.ndarray:
    """A copy for so many nodes in which every word is its own place."""
    return np.arange(-(-nodes // 8) * exchange.tile_words, dtype=np.uint32)


def value_halves(exchange: Exchange, name: str, nodes: int = MAX_NODES) -> np.ndarray:
    """Where each value is read from, in half words: [nodes, k]. Half a word holds only half of such a place."""
    places = np.arange(2 * len(words_of(exchange, nodes)), dtype=np.uint32)
    low, high = (
        exchange.values((places >> shift).astype(np.uint16).view(np.uint32), name, nodes).view(np.uint32) >> 16
        for shift in (0, 16)
    )
    return low + (high << 16)


# -- the kernel's places -----------------------------------------------------------------------------------------------

# What the kernel calls them (shape.cuh): where it begins and how many words, or values, of a node.
ROWS = {
    "delta_in": ("DELTA_IN_AT", "DELTA_IN_TILES * WIDE"),
    "attention_in": ("ATTENTION_IN_AT", "ATTENTION_IN_TILES * WIDE"),
    "stats": ("STATS_AT", "HEADS * SPLITS * 2"),
    "attention_rows": ("ATTENTION_ROWS_AT", "ATTENTION_ROWS * HEAD_DIM / 2"),
    "best": ("BEST_AT", "SMS * 2"),
}
SQUARES = {
    "x": ("Residual", "X_SQUARES_AT", "HIDDEN_TILES"),
    "mid": ("Residual", "MID_SQUARES_AT", "HIDDEN_TILES"),
    "h": ("Inner", "H_SQUARES_AT", "SMS"),
    "delta": ("DeltaOutput", "DELTA_SQUARES_AT", "BLOCKS"),
}
VALUES = {
    "x": ("Residual", "X_VALUES_AT", "HIDDEN"),
    "mid": ("Residual", "MID_VALUES_AT", "HIDDEN"),
    "h": ("Inner", "H_VALUES_AT", "FFN"),
    "delta": ("DeltaOutput", "DELTA_VALUES_AT", "VALUE_DIM"),
    "attention": ("AttentionOutput", "ATTENTION_VALUES_AT", "ATTENTION_DIM"),
}
NODES = (0, 3, 7, 8, 45)


def host_places(exchange: Exchange) -> dict[str, int]:
    """Expressions of the kernel's, addresses as block.cuh computes them, and what the host has for each."""
    words = words_of(exchange)
    places = {
        "NOT_YET": host.NOT_YET,
        "NODE_WORDS": exchange.node_words,
        "NODE_TILE_WORDS": exchange.tile_words,
        "COPY_WORDS": exchange.bytes // 8,
    }
    for name, (at, count) in ROWS.items():
        row = exchange.row(words, name, MAX_NODES)
        places |= {at: int(row[0, 0]), count: row.shape[1]}
        for node in NODES:
            places[f"{node} / 8 * NODE_TILE_WORDS + {node} % 8 * NODE_WORDS + {at}"] = int(row[node, 0])
    for name, (kind, at, count) in SQUARES.items():
        row = exchange.squares(words, name, MAX_NODES)
        places |= {at: int(row[0, 0]), count: row.shape[1]}
        for node in NODES:
            for i in (0, row.shape[1] - 1):
                places[f"{node} / 8 * NODE_TILE_WORDS + {at} + {kind}::square({node}, {i})"] = int(row[node, i])
    for name, (kind, at, count) in VALUES.items():
        halves = value_halves(exchange, name)
        k_all = halves.shape[1]
        places |= {at: int(halves[0, 0]) // 2, count: k_all}
        for i, k in enumerate(sorted({*range(0, k_all, k_all // 16 + 1), k_all - 1})):
            node = NODES[i % len(NODES)]
            address = f"{node} / 8 * NODE_TILE_WORDS + {at} + {kind}::value({node}, {k})"
            places[f"2 * ({address}) + {k % 2}"] = int(halves[node, k])
    return places


def layout_of(model: Config) -> Layout:
    return Layout(model, min(load_profiles()["h200"].sms, busy_sms(model)))


def kernel_constants(layout: Layout, nodes: int) -> dict[str, object]:
    profile = load_profiles()["h200"]
    chip = Chip(profile.name, profile.capability, profile.sms, profile.shared_memory)
    return build_constants(layout, chip, profile, nodes)


def refused(places: Mapping[str, int], constants: Mapping[str, object]) -> set[str]:
    """The expressions of which the kernel's headers make another number."""
    claims = (f'static_assert({kernel} == {number}u, "{kernel}");' for kernel, number in places.items())
    try:
        compile_source("\n".join(['#include "forward/params.cuh"', *claims]), "places.cu", target((9, 0)), constants)
    except NoDevice as error:
        pytest.skip(str(error))
    except WarpsmithError as error:
        wrong = set(re.findall(r'static assertion failed with "(.*?)"', error.problem))
        if not wrong:
            raise
        return wrong
    return set()


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("name", MODELS)
def test_the_host_s_places_are_the_kernel_s(name: str, nodes: int) -> None:
    layout = layout_of(MODELS[name])
    assert refused(host_places(layout.exchange), kernel_constants(layout, nodes)) == set()


def test_another_place_is_noticed() -> None:
    layout = layout_of(SIZES["tiny"])
    constants, places = kernel_constants(layout, 1), host_places(layout.exchange)
    for first in (0, 1):  # half of them at a time: the compiler gives up after a hundred errors
        changed = {kernel: places[kernel] ^ 1 for kernel in list(places)[first::2]}
        assert refused(places | changed, constants) == set(changed)


@pytest.mark.parametrize(("constant", "other"), [("CHAIN", 2), ("CHUNK_WORDS", 256), ("WARPS", 16)])
def test_another_arrangement_is_noticed(constant: str, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    constants = kernel_constants(layout_of(SIZES["0.8B"]), 1)
    monkeypatch.setattr(host, constant, other)
    places = host_places(layout_of(SIZES["0.8B"]).exchange)
    assert any("::value(" in place for place in refused(places, constants))


# -- any sizes ---------------------------------------------------------------------------------------------------------


@st.composite
def exchanges(draw: st.DrawFn) -> Exchange:
    """Rows and areas of any size: whole and broken lines, chunks and chains."""
    rows = draw(st.lists(st.integers(1, 200), max_size=3))
    area = st.builds(lambda quarters, squares: Area(4 * quarters, squares), st.integers(1, 900), st.integers(0, 100))
    areas = draw(st.lists(area, max_size=3))
    return Exchange({f"row {i}": r for i, r in enumerate(rows)}, {f"area {i}": a for i, a in enumerate(areas)})


@settings(max_examples=100, deadline=None)
@given(exchange=exchanges())
def test_nothing_shares_a_place(exchange: Exchange) -> None:
    """In half words, since two values share a word; and what is beyond a node tile belongs to the next."""
    words = words_of(exchange, 8)
    taken = [np.zeros(0, np.uint32)]
    for name in exchange.rows:
        row = exchange.row(words, name, 8)
        taken += [2 * row, 2 * row + 1]
    for name, area in exchange.areas.items():
        if area.squares:
            row = exchange.squares(words, name, 8)
            taken += [2 * row, 2 * row + 1]
        taken.append(value_halves(exchange, name, 8))
    halves = np.concatenate([each.reshape(-1) for each in taken])
    assert len(np.unique(halves)) == len(halves)
    assert (halves < 2 * exchange.tile_words).all()


def written(rows: list[np.ndarray], areas: list[tuple[np.ndarray, np.ndarray]], nodes: int) -> np.ndarray:
    """One copy, word after word as shape.cuh describes it: `rows` are [nodes, words], `areas` (squares, values)."""
    parts: list[np.ndarray] = []

    def put(array: np.ndarray, words: int) -> None:
        """As bits, padded with words that never came."""
        bits = np.ascontiguousarray(array).view(np.uint16)
        parts.extend([bits, np.full(2 * words - len(bits), NOT_YET & 0xFFFF, np.uint16)])

    def lines(count: int) -> int:
        return -(-count // 32) * 32

    for first in range(0, nodes, 8):
        tile = range(first, first + 8)
        for node in tile:
            for row in rows:
                put(row[node] if node < nodes else row[:0, 0], lines(row.shape[1]))
        for squares, values in areas:
            if count := squares.shape[1]:
                for node in tile:
                    put(squares[node] if node < nodes else squares[:0, 0], lines(count) + 16)
            chunks = -(-values.shape[1] // 256)
            for piece in range(0, chunks, 4):
                for warp in range(8):
                    for chunk in range(piece, min(piece + 4, chunks)):
                        k = (warp * chunks + chunk) * 32
                        for node in tile:
                            put(values[node, k : k + 32] if node < nodes else values[:0, 0], 16)
    return np.concatenate([np.zeros(0, np.uint16), *parts]).view(np.uint32)


@settings(max_examples=40, deadline=None)
@given(exchange=exchanges(), nodes=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_what_was_written_is_read_back(exchange: Exchange, nodes: int, seed: int) -> None:
    random = np.random.default_rng(seed)

    def bits(kind: type[np.unsignedinteger], count: int) -> np.ndarray:
        return random.integers(0, np.iinfo(kind).max, (nodes, count), dtype=kind, endpoint=True)

    rows = {name: bits(np.uint32, count) for name, count in exchange.rows.items()}
    areas = {name: (bits(np.uint32, area.squares), bits(np.uint16, area.k)) for name, area in exchange.areas.items()}
    copy = written(list(rows.values()), list(areas.values()), nodes)
    assert len(copy) == -(-nodes // 8) * exchange.tile_words
    for name, row in rows.items():
        np.testing.assert_array_equal(exchange.row(copy, name, nodes), row)
    for name, (squares, values) in areas.items():
        np.testing.assert_array_equal(exchange.squares(copy, name, nodes), squares)
        as_float32 = exchange.values(copy, name, nodes).view(np.uint32)
        np.testing.assert_array_equal(as_float32, values.astype(np.uint32) << 16)
