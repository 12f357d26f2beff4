"""Quantisers: the simple ones against the `gguf` package, the K ones by their error; and the recipes."""

from __future__ import annotations

import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from warpsmith.checkpoint.blocks import LAYOUTS, TYPES, dequantize, unpack_k_scales
from warpsmith.checkpoint.quantize import RECIPES, pack_k_scales, quantize, recipe_type

SIMPLE = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
K_TYPES = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
LINES = {"Q2_K": (16, 3, 15), "Q4_K": (32, 15, 63), "Q5_K": (32, 31, 63)}  # sub-block, largest level, largest scale
CENTRED = {"Q3_K": (4, 32), "Q6_K": (32, 128)}  # levels, scales: from minus this to one less


def weights(kind: str, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    draw = {
        "normal": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "student": lambda: rng.standard_t(4, size=n),
        "uniform": lambda: rng.uniform(-1, 1, size=n),
        "positive": lambda: rng.uniform(0.5, 1, size=n),
    }[kind]
    return (0.02 * draw()).astype(np.float32).reshape(-1, 1024)


def reread(name: str, x: np.ndarray) -> np.ndarray:
    return dequantize(TYPES[name], quantize(TYPES[name], x))


def rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


# ---- the formats that leave no choice


@pytest.mark.parametrize("name", SIMPLE)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_simple_formats_equal_the_package(name: str, data: st.DataObject) -> None:
    # Up to 1000, so that no scale leaves the range of a half; down to the least normal numbers of it.
    floats = st.floats(-1000, 1000, width=32).map(lambda v: 0.0 if abs(v) < 1e-4 else v)
    x = data.draw(hnp.arrays(np.float32, (3, 64), elements=floats))
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(quantize(TYPES[name], x), theirs.view(np.uint8))


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize("kind", ["normal", "student", "positive"])
def test_simple_formats_equal_the_package_on_weights(name: str, kind: str) -> None:
    x = weights(kind, 1 << 17)
    theirs = gguf.quants.quantize(x, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(quantize(TYPES[name], x), theirs.view(np.uint8))


def test_halves_between_levels_round_away_from_zero_in_q8_0() -> None:
    x = np.zeros((1, 32), np.float32)
    x[0, :6] = [127, 0.5, -0.5, 1.5, 0.49999997, -2.5]
    stored = quantize(TYPES["Q8_0"], x).view(LAYOUTS["Q8_0"])["qs"][0, 0]
    assert stored[:6].tolist() == [127, 1, -1, 2, 0, -3]


def test_bf16_rounds_to_even_and_keeps_nan_and_infinity() -> None:
    bits = np.array(
        [0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFFFFFFFF, 0x7F800000, 0xFF800000, 0x80000000], np.uint32
    )
    stored = quantize(TYPES["BF16"], bits.view(np.float32)).view("<u2")
    assert stored.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0xFFFF, 0x7F80, 0xFF80, 0x8000]


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_every_stored_number_survives(name: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    raw = (patterns.astype(np.uint32) << 16 if name == "F32" else patterns).view(np.uint8)
    values = dequantize(TYPES[name], raw)
    again = dequantize(TYPES[name], quantize(TYPES[name], values))
    np.testing.assert_array_equal(again, values)  # NaN equals NaN here
    finite = np.isfinite(values)
    np.testing.assert_array_equal(np.signbit(again[finite]), np.signbit(values[finite]))


# ---- the K formats


def nearest_levels(name: str, x: np.ndarray) -> np.ndarray:
    """The obvious encoder: scales from minimum and maximum, rounded to their bits, weights to the nearest level."""
    if name in CENTRED:
        half, most = CENTRED[name]
        sub = x.reshape(-1, 16, 16)
        scale = np.abs(sub).max(axis=2) / (half - 1)
        d = (scale.max(axis=1, keepdims=True) / (most - 1)).astype(np.float16).astype(np.float32)
        step = (d * np.clip(np.rint(scale / d), 1, most - 1))[:, :, None]
        return (np.clip(np.rint(sub / step), -half, half - 1) * step).reshape(x.shape)
    width, top, most = LINES[name]
    sub = x.reshape(-1, 256 // width, width)
    low = np.minimum(sub.min(axis=2), 0)
    scale = (sub.max(axis=2) - low) / top
    d = (scale.max(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    dmin = (-low.min(axis=1, keepdims=True) / most).astype(np.float16).astype(np.float32)
    step = (d * np.clip(np.rint(scale / d), 1, most))[:, :, None]
    offset = (dmin * np.rint(-low / np.where(dmin == 0, 1, dmin)))[:, :, None]
    return (np.clip(np.rint((sub + offset) / step), 0, top) * step - offset).reshape(x.shape)


# For normal weights the step is about (range of a sub-block) / levels and the error step / sqrt(12): 32 normal
# weights span 4.1 sigma, 16 of them 3.5; the largest of 16 is 1.9 sigma.
EXPECTED_ERROR = {
    "Q2_K": 3.5 / 3 / 12**0.5,
    "Q3_K": 1.9 / 3.5 / 12**0.5,
    "Q4_K": 4.1 / 15 / 12**0.5,
    "Q5_K": 4.1 / 31 / 12**0.5,
    "Q6_K": 1.9 / 32 / 12**0.5,
}


@pytest.mark.parametrize("name", K_TYPES)
def test_k_error_is_what_the_bits_allow(name: str) -> None:
    x = weights("normal", 1 << 19)
    assert rms(reread(name, x) - x) < EXPECTED_ERROR[name] * rms(x)


@pytest.mark.parametrize("name", K_TYPES)
@pytest.mark.parametrize("kind", ["normal", "laplace", "student", "uniform", "positive"])
def test_k_error_is_below_rounding_to_nearest(name: str, kind: str) -> None:
    x = weights(kind, 1 << 18)
    # Uniform weights fill their range: nothing is to be won there, and nothing may be lost.
    gain = 1.0 if kind in ("uniform", "positive") else 0.985
    assert rms(reread(name, x) - x) < gain * rms(nearest_levels(name, x) - x)


@pytest.mark.parametrize("name", K_TYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_k_error_is_bounded_on_any_weights(name: str, data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from([1e-3, 1.0, 1e4]))
    elements = st.floats(-1, 1, width=32) | st.sampled_from([-1.0, 0.0, 1.0])
    x = np.float32(scale) * data.draw(hnp.arrays(np.float32, (2, 256), elements=elements))
    y = reread(name, x)
    half_step = {"Q2_K": 1 / 3, "Q3_K": 1 / 7, "Q4_K": 1 / 15, "Q5_K": 1 / 31, "Q6_K": 1 / 63}[name]
    # d is a half, at best exact to 2^-25; largest scale times largest level multiply that.
    rounding = 2**-25 * {"Q2_K": 15 * 3, "Q3_K": 32 * 4, "Q4_K": 63 * 15, "Q5_K": 63 * 31, "Q6_K": 128 * 32}[name]
    for before, after in zip(x, y, strict=True):
        assert rms(after - before) <= half_step * np.abs(before).max() + rounding


@pytest.mark.parametrize("name", LINES)
def test_k_weights_on_a_grid_stay_there(name: str) -> None:
    rng = np.random.default_rng(3)
    width, top, most = LINES[name]
    q = rng.integers(0, top + 1, size=(50, 256 // width, width))
    q[:, :, 5], q[:, :, 12] = 0, top  # every sub-block uses its whole range, and one the largest scale and min
    scales, mins = rng.integers(most // 3, most + 1, size=(2, 50, 256 // width, 1))
    scales[:, 2], mins[:, 6] = most, most
    d, dmin = rng.uniform(0.001, 0.01, size=(2, 50, 1, 1)).astype(np.float16).astype(np.float32)
    x = ((d * scales) * q.astype(np.float32) - dmin * mins).reshape(50, 256).astype(np.float32)
    np.testing.assert_array_equal(reread(name, x), x)


@pytest.mark.parametrize("name", CENTRED)
def test_centred_k_weights_on_a_grid_stay_there(name: str) -> None:
    rng = np.random.default_rng(3)
    half, most = CENTRED[name]
    q = rng.integers(-half, half, size=(50, 16, 16))
    q[:, :, 5] = -half
    scales = rng.integers(1 - most, most, size=(50, 16, 1))
    scales[:, 7] = -most
    d = rng.uniform(0.001, 0.01, size=(50, 1, 1)).astype(np.float16).astype(np.float32)
    x = ((d * scales) * q.astype(np.float32)).reshape(50, 256).astype(np.float32)
    np.testing.assert_array_equal(reread(name, x), x)


@pytest.mark.parametrize("name", K_TYPES)
def test_k_quantising_twice_changes_next_to_nothing(name: str) -> None:
    x = weights("normal", 1 << 17)
    once = reread(name, x)
    assert rms(reread(name, once) - once) < 0.02 * rms(once - x)


@pytest.mark.parametrize("name", [*SIMPLE, *K_TYPES])
def test_zeros_and_specks_become_zeros(name: str) -> None:
    for value in (0.0, -0.0, 1e-42, 1e-30):
        x = np.full((2, 512), value, np.float32)
        assert np.abs(reread(name, x)).max() <= abs(value)


def test_k_scales_survive_packing() -> None:
    scales, mins = np.random.default_rng(0).integers(0, 64, size=(2, 4096, 8), dtype=np.uint8)
    packed = pack_k_scales(scales, mins)
    assert packed.shape == (4096, 12)
    for ours, theirs in zip(unpack_k_scales(packed), (scales, mins), strict=True):
        np.testing.assert_array_equal(ours, theirs)


# ---- all of them


@pytest.mark.parametrize("name", [*SIMPLE, *K_TYPES])
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    x = weights("student", 1 << 17)
    whole = quantize(TYPES[name], x)
    assert whole.dtype == np.uint8
    assert whole.shape == (len(x), TYPES[name].row_bytes(1024))
    for i in (0, 1, 63, 64, 100, len(x) - 1):
        np.testing.assert_array_equal(quantize(TYPES[name], x[i]), whole[i])
    np.testing.assert_array_equal(quantize(TYPES[name], x[3:90:7]), whole[3:90:7])
    np.testing.assert_array_equal(quantize(TYPES[name], x.reshape(2, -1, 1024)), whole.reshape(2, -1, whole.shape[1]))
    assert quantize(TYPES[name], x[:0]).shape == (0, whole.shape[1])


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_TYPES])
def test_what_cannot_be_stored_is_refused(name: str) -> None:
    x = weights("normal", 1024)
    for bad in (np.nan, np.inf, -np.inf, 1e30):
        spoilt = x.copy()
        spoilt[0, 700] = bad
        with pytest.raises(ValueError, match=name):
            quantize(TYPES[name], spoilt)


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="F16"):
        quantize(TYPES["F16"], np.array([1.0, 70000.0], np.float32))
    with pytest.raises(ValueError, match="Q4_K blocks"):
        quantize(TYPES["Q4_K"], np.zeros((2, 128), np.float32))
    with pytest.raises(ValueError, match="float64"):
        quantize(TYPES["Q8_0"], np.zeros((2, 32)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="IQ4_XS"):
        quantize(TYPES["IQ4_XS"], np.zeros((2, 256), np.float32))


@pytest.mark.parametrize("name", [*SIMPLE, *K_TYPES])
def test_memory_stays_near_the_result(name: str) -> None:
    x = weights("normal", 1 << 20)
    tracemalloc.start()
    out = quantize(TYPES[name], x)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < out.nbytes + (4 << 20)


# ---- recipes


def matrix(recipe: str, name: str, layer: int | None = None, n_layers: int = 64, tied: bool = False) -> str:
    return recipe_type(recipe, name, layer, n_layers, tied, (5120, 5120))


# Layers of a 64-layer model that llama.cpp gives more bits to.
MORE_OF_64 = {*range(8), *range(10, 56, 3), *range(56, 64)}


def test_q4_k_m_of_the_27b_model() -> None:
    assert len(MORE_OF_64) == 32
    for layer in range(64):
        expected = "Q6_K" if layer in MORE_OF_64 else "Q4_K"
        for name in ("attn_v", "attn_qkv", "ffn_down"):
            assert matrix("q4_k_m", f"blk.{layer}.{name}.weight", layer) == expected
        for name in ("attn_q", "attn_k", "attn_output", "attn_gate", "ssm_out", "ssm_alpha", "ssm_beta", "ffn_up"):
            assert matrix("q4_k_m", f"blk.{layer}.{name}.weight", layer) == "Q4_K"
    full_attention = [i for i in range(3, 64, 4) if matrix("q4_k_m", f"blk.{i}.attn_v.weight", i) == "Q6_K"]
    assert full_attention == [3, 7, 19, 31, 43, 55, 59, 63]
    assert matrix("q4_k_m", "blk.64.ffn_down.weight", 64, n_layers=65) == "Q6_K"
    assert matrix("q4_k_m", "blk.64.nextn.eh_proj.weight", 64, n_layers=65) == "Q4_K"


@pytest.mark.parametrize(
    ("recipe", "plain", "better", "output"),
    [
        ("f32", "F32", "F32", "F32"),
        ("f16", "F16", "F16", "F16"),
        ("bf16", "BF16", "BF16", "BF16"),
        ("q8_0", "Q8_0", "Q8_0", "Q8_0"),
        ("q4_0", "Q4_0", "Q4_0", "Q6_K"),
        ("q4_k_m", "Q4_K", "Q6_K", "Q6_K"),
        ("q5_k_m", "Q5_K", "Q6_K", "Q6_K"),
        ("q6_k", "Q6_K", "Q6_K", "Q6_K"),
    ],
)
def test_each_recipe(recipe: str, plain: str, better: str, output: str) -> None:
    assert matrix(recipe, "blk.0.ffn_up.weight", 0) == plain
    assert matrix(recipe, "blk.0.ffn_down.weight", 0) == better
    assert matrix(recipe, "blk.8.ffn_down.weight", 8) == plain
    assert matrix(recipe, "output.weight") == output
    assert matrix(recipe, "token_embd.weight") == plain
    assert matrix(recipe, "token_embd.weight", tied=True) == output
    for name, shape in {
        "output_norm.weight": (5120,),
        "blk.0.attn_norm.weight": (5120,),
        "blk.0.ssm_a": (48,),
        "blk.0.ssm_dt.bias": (48,),
        "blk.0.ssm_conv1d.weight": (10240, 4),
        "blk.0.ssm_norm.weight": (128,),
        "blk.64.nextn.enorm.weight": (5120,),
    }.items():
        assert recipe_type(recipe, name, 0, 64, False, shape) == "F32"


def test_every_recipe_fits_every_row_length() -> None:
    fallbacks = {"q4_k_m": "Q5_0", "q5_k_m": "Q5_1", "q6_k": "Q8_0", "q4_0": "Q4_0", "q8_0": "Q8_0"}
    for recipe in RECIPES:
        for n in (256, 128, 96, 100, 7):
            chosen = recipe_type(recipe, "blk.9.attn_q.weight", 9, 64, False, (64, n))
            assert n % TYPES[chosen].elems == 0
            if recipe in fallbacks and n in (128, 96):
                assert chosen == fallbacks[recipe]
            if recipe in fallbacks and n in (100, 7):
                assert chosen == "F16"
    assert recipe_type("q4_k_m", "output.weight", None, 64, False, (64, 128)) == "Q8_0"


def test_unknown_recipes_are_refused() -> None:
    with pytest.raises(ValueError, match="q4_k_m"):
        matrix("q3_k_s", "output.weight")
