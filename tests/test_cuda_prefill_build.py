"""The kernels of a prompt: built without a GPU, and what the host says of them."""

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

import kernel_claims
from prefill_layout import from_slab_tiles, from_tiles, stream_places, to_slab_tiles, to_tiles
from test_cuda_build import usage
from warpsmith.backend.base import PREFILL_CHUNK
from warpsmith.backend.cuda.build.compiler import compile_source, sources, target
from warpsmith.backend.cuda.large.layout import LargeLayout
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.prefill import plan, products, structures
from warpsmith.backend.cuda.prefill.streams import SLOTS, PromptStream, RowTiles, SlabStream
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.errors import NoDevice
from warpsmith.model.config import SIZES
from warpsmith.model.weights import expected_shapes


def stored_in(size: str, recipe: str) -> dict[str, str]:
    config = SIZES[size]
    shapes = expected_shapes(config)
    return {n: tensor_type(recipe, n, shape, config.layers, config.tied).name for n, shape in shapes.items()}


def slabs_of(size: str, recipe: str, caches: tuple[str, str] = ("f16", "f16")) -> SlabStream:
    return SlabStream(LargeLayout(SIZES[size], 132, stored_in(size, recipe), caches))


def rows_of(size: str, recipe: str) -> RowTiles:
    return RowTiles(Layout(SIZES[size], 132, stored_in(size, recipe)))


LAYOUT = Layout(SIZES["0.8B"], 132)
ROW_TILES, Q4_K_M, Q8_0 = RowTiles(LAYOUT), slabs_of("27B", "q4_k_m"), slabs_of("4B", "q8_0")
THREADS = {"gemm": 384, "slab_gemm": 384, "head": 512, "attention_rows": 128, "embed": 128}  # else 256, or as below

# Bytes: numbers put aside once, or (flash) some for every tile of 64 keys.
MAY_SPILL = {"attention_flash": 24, "delta_prep": 16, "delta_short": 32, "gemm": 16}


@pytest.fixture(autouse=True)
def _nvrtc() -> None:
    try:
        target((9, 0))
    except NoDevice as error:
        pytest.skip(str(error))


def compiled(stream: PromptStream, name: str, extra: Mapping[str, object]) -> str:
    source, constants = sources()[f"prefill/{name}.cu"], plan.header(stream) | dict(extra)
    return compile_source(source, f"{name}.cu", "sm_90a", constants, ("--ptxas-options=-v",))[1]


def check_claims(
    name: str, extra: Mapping[str, object], claims: Iterable[str], stream: PromptStream | None = None
) -> None:
    constants = plan.header(stream or ROW_TILES) | dict(extra)
    kernel_claims.check_claims(sources()[f"prefill/{name}.cu"], claims, "compute_90a", constants)


KERNELS = plan.kernels_of(ROW_TILES)
BUILDS = [(ROW_TILES, *kernel) for kernel in KERNELS] + [(Q4_K_M, *kernel) for kernel in plan.kernels_of(Q4_K_M)]
BUILDS += [(Q8_0, n, e) for n, e in plan.kernels_of(Q8_0) if n == "slab_gemm"][:4]
SCALED = [rows_of("0.8B", recipe) for recipe in ("q8_0", "q4_0")]
BUILDS += [(s, n, e) for s in SCALED for n, e in plan.kernels_of(s) if n in ("gemm", "head", "embed")]
CACHED = [slabs_of("27B", "q4_k_m", caches) for caches in (("q8_0", "q4_0"), ("q4_0", "q8_0"), ("f16", "q8_0"))]
BUILDS += [(s, n, e) for s in CACHED for n, e in plan.kernels_of(s) if n in ("attention_flash", "attention_rows")]
NAMES = [
    f"{s.config.name} {s.key_rows.name} {s.value_rows.name} {n} {' '.join(map(str, e.values()))}" for s, n, e in BUILDS
]


def every_fifth(builds: list[tuple[PromptStream, str, Mapping[str, object]]]) -> list[Any]:
    """There are many products; those between are among the slow tests. So are caches whose keys and whose values have
    types that are built among others, too."""
    products = [number for number, (_, name, _) in enumerate(builds) if name in ("gemm", "slab_gemm")]
    seldom = set(products) - set(products[::5])
    seldom |= {number for number, (stream, _, _) in enumerate(builds) if stream is CACHED[2]}
    return [
        pytest.param(*build, marks=[pytest.mark.slow] if number in seldom else [])
        for number, build in enumerate(builds)
    ]


@pytest.mark.parametrize(("stream", "name", "extra"), every_fifth(BUILDS), ids=NAMES)
def test_a_kernel_builds_without_spills(stream: PromptStream, name: str, extra: Mapping[str, object]) -> None:
    log = compiled(stream, name, extra)
    assert "C75" not in log, log  # wgmma serialised, or registers not given
    used = usage(log)
    assert max(used.spill_stores, used.spill_loads) <= MAY_SPILL.get(name, 0), log
    threads = stream.config.heads * 32 if name == "attention_merge" else THREADS.get(name, 256)
    if name == "gemm" and str(extra["GEMM_VARIANT"]).split(",")[1] == "0":
        threads = 2 * 256  # two launches side by side
    assert used.registers * threads <= 65536


STRUCTURES = {
    "embed": (structures.Embed, structures.Piece),
    "gemm": (structures.Gemm, structures.Span),
    "delta_scan": (structures.Delta,),
    "attention_merge": (structures.Attention, structures.Queries),
    "head": (structures.Head,),
    "rows": (structures.Rows,),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_arguments_have_every_field_where_the_kernel_has_it(name: str) -> None:
    claims = []
    for structure in STRUCTURES[name]:
        kernel = structure.__name__
        claims.append(f"sizeof({kernel}) == {ctypes.sizeof(structure)}")
        for field, *_ in structure._fields_:
            claims.append(f"__INTADDR__(&(({kernel}*)0)->{field}) == {getattr(structure, field).offset}")
    extra = next(e for n, e in KERNELS if n == name)
    check_claims(name, extra, claims)


NUMBERS = {
    "attention_merge": {
        **{name: getattr(plan, name) for name in ("SHORT", "SHORTS", "LONG")},
        "CHUNK": PREFILL_CHUNK,
    },
    "delta_prep": {"sizeof(Shared)": plan.PREP_SHARED},
    "delta_short": {"sizeof(Shared)": plan.SHORT_SHARED, "CTAS": plan.SHORT_CTAS},
    "delta_scan": {"SCAN_SHARED": plan.scan_shared(plan.FEW), "SLICE": plan.SLICE},
    "attention_rows": {"ROWS_A_CTA": plan.ROWS_A_CTA},
    "gemm": {n: getattr(products, n) for n in ("PLAIN", "SILU", "RESIDUAL", "LOGITS")},
}


@pytest.mark.parametrize("name", NUMBERS)
def test_the_host_has_the_kernels_numbers(name: str) -> None:
    extra = next(e for n, e in KERNELS if n == name)
    check_claims(name, extra, [f"{n} == {v}" for n, v in NUMBERS[name].items()])


@pytest.mark.parametrize("stream", [ROW_TILES, *CACHED])
def test_the_host_knows_what_attention_takes(stream: PromptStream) -> None:
    for groups in (1, 2):
        extra = {"GROUPS": groups, **plan.attention_constants(stream)}
        check_claims("attention_flash", extra, [f"SHARED_HERE == {plan.flash_shared(groups, stream)}"], stream)


Q8, Q4 = (TYPES[name].ggml_id for name in ("Q8_0", "Q4_0"))
PRODUCTS = [(t, e, products.BF16) for e in range(3) for t in (products.NARROW_TILES if e == 2 else products.WIDE_TILES)]
PRODUCTS += [
    (t, e, kind)
    for e, kind in ((0, Q8), (1, Q4), (2, Q8), (2, Q4))
    for t in (products.SCALED_NARROW_TILES if e == 2 else products.SCALED_WIDE_TILES)
]


@pytest.mark.parametrize(("tile", "ending", "kind"), PRODUCTS)
def test_the_host_knows_what_a_tile_takes(tile: products.Tile, ending: int, kind: int) -> None:
    shared = tile.shared(ending, kind)
    numbers = {"SHARED": shared, "THREADS": tile.threads, "ROWS": tile.rows(ending), "N": tile.tokens}
    check_claims("gemm", tile.constant(ending, kind) or {}, [f"Chosen::{n} == {v}" for n, v in numbers.items()])


# -- where things lie -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [256, 1024, 3584])
def test_tiles_are_an_order_of_all_values(k: int) -> None:
    rows = np.arange(16 * k).reshape(16, k)
    for chunks in (0, k // 256):
        np.testing.assert_array_equal(from_tiles(to_tiles(rows, chunks), chunks), rows)


@pytest.mark.parametrize("k", [256, 1024, 3584])
def test_tiles_meet_the_weights_of_the_stream(k: int) -> None:
    """A product step by step as the tensor core does it: operands as pack.cu writes them and as tiles lie."""
    chunks = k // 256
    rng = np.random.default_rng(k)
    weights, x = rng.standard_normal((16, k)), rng.standard_normal((8, k))
    unit = packed_unit(weights, chunks)
    tiles = to_tiles(x, chunks)[:, 0]  # [tile][octet of k][token][8]
    total = np.zeros((16, 8))
    for tile in range(k // 32):
        for step in range(2):
            a = operand(unit[tile, step])
            b = tiles[tile, 2 * step : 2 * step + 2].reshape(2, 8, 8).transpose(0, 2, 1).reshape(16, 8)
            total += a @ b
    np.testing.assert_allclose(total, weights @ x.T)


@pytest.mark.parametrize("k", [256, 5120])
def test_tiles_meet_the_weights_of_slabs(k: int) -> None:
    """The same over slabs: k = 16 q + 4 j + 2 h + i of a tile of 64 is place 2 q + i of half h in product j."""
    rng = np.random.default_rng(k)
    weights, x = rng.standard_normal((16, k)), rng.standard_normal((16, k))
    tiles = to_slab_tiles(x)
    np.testing.assert_array_equal(from_slab_tiles(tiles.reshape(k // 32, 2, 256)), x)
    total = np.zeros((16, 8))
    q, i = np.arange(4)[:, None], np.arange(2)
    for tile in range(k // 64):
        for j in range(4):
            a = [weights[:, (tile * 64 + 16 * q + 4 * j + 2 * h + i).reshape(-1)] for h in range(2)]
            octets = tiles[tile * 2 + j // 2, 1, j % 2 * 2 : j % 2 * 2 + 2]  # [half][token][8 places]
            b = octets.reshape(2, 8, 8).transpose(0, 2, 1).reshape(16, 8)
            total += np.concatenate(a, axis=1) @ b
    np.testing.assert_allclose(total, weights @ x[8:].T)


def test_the_tables_of_slabs_are_the_layouts() -> None:
    matrix = Q4_K_M.matrix("MIX_IN", 0)
    assert (matrix.row_tiles, matrix.second, matrix.third) == (258, 160, 256)
    assert matrix.part_types == 2 | 0 << 8 | 0 << 16  # Q6_K, then Q4_K
    np.testing.assert_array_equal(Q4_K_M.starts("MLP_OUT", 3).reshape(80, 68), Q4_K_M.layout.offsets(15))
    head = Q4_K_M.matrix("HEAD", 0)
    assert len(Q4_K_M.starts("HEAD", 0)) == head.row_tiles * head.k // 256


def packed_unit(weights: np.ndarray, chunks: int) -> np.ndarray:
    """A unit of 16 rows as `move_bf16` of pack.cu lays it: [tile][operand][lane][4 words][2]."""
    unit = np.zeros((weights.shape[1] // 32, 2, 32, 4, 2))
    for row in range(16):
        for k in range(0, weights.shape[1], 8):
            tile, lane, upper = k % (chunks * 32) // 32 * 8 + k // (chunks * 32), row % 8 * 4 + k % 32 // 8, row // 8
            words = weights[row, k : k + 8].reshape(4, 2)
            unit[tile, 0, lane, upper], unit[tile, 0, lane, upper + 2] = words[0], words[1]
            unit[tile, 1, lane, upper], unit[tile, 1, lane, upper + 2] = words[2], words[3]
    return unit


def operand(words: np.ndarray) -> np.ndarray:
    """A of m16n8k16 from the registers of its lanes [32][4][2]: [16 rows][16 k]."""
    a = np.zeros((16, 16))
    for lane in range(32):
        g, q = lane // 4, lane % 4
        for register, (row, k) in enumerate(((g, 2 * q), (g + 8, 2 * q), (g, 2 * q + 8), (g + 8, 2 * q + 8))):
            a[row, k : k + 2] = words[lane, register]
    return a


def test_the_order_of_the_stream_is_the_layouts() -> None:
    places = stream_places(112, 14)  # K = 3584
    assert sorted(places) == list(range(112))
    assert places[15] == 1 * 8 + 1  # the second eighth's second tile is in the second chunk


def test_the_tables_of_row_tiles_cover_the_stream() -> None:
    """Every byte of it belongs to one row tile."""
    ranges = []
    places = [*((slot, layer) for layer in range(LAYOUT.config.layers) for slot in SLOTS), ("HEAD", 0)]
    for stage, place in zip(LAYOUT.schedule.weight_stages, places, strict=True):
        starts = ROW_TILES.starts(*place)
        assert len(starts) == stage.tiles
        ranges += [(int(start), int(start) + stage.tile_rows * stage.k * 2) for start in starts]
    ranges.sort()
    assert ranges[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(ranges))
    assert ranges[-1][1] == LAYOUT.stream.bytes


# -- choices ----------------------------------------------------------------------------------------------------------


def test_every_number_of_tokens_has_a_tile() -> None:
    for ending, tiles, rows in (
        (products.PLAIN, products.WIDE_TILES, 8192),
        (products.RESIDUAL, products.NARROW_TILES, 1024),
        (products.RESIDUAL, products.SLAB_TILES, 5120),
    ):
        for octets in (1, 8, 65, 256):
            best = min(tiles, key=lambda t, e=ending, r=rows, o=octets: products.tile_clocks(t, e, r, 1024, o, 132))
            count = products.tile_count(best, ending, rows, octets)
            assert count * best.rows(ending) * best.tokens >= rows * octets * 8


def test_only_models_that_fit_the_steps_suit() -> None:
    assert ROW_TILES.suits()
    assert rows_of("0.8B", "q8_0").suits()
    stored = {"blk.0.attn_qkv.weight": "Q8_0"}  # beside BF16 in one matrix
    assert not RowTiles(Layout(SIZES["0.8B"], 132, stored)).suits()


def test_variants_are_numbers() -> None:
    for tile in (*products.WIDE_TILES, *products.NARROW_TILES):
        constant = tile.constant(products.PLAIN, products.BF16)
        assert constant is not None
        assert re.fullmatch(r"(\d+,){7}\d+", str(constant["GEMM_VARIANT"]))
