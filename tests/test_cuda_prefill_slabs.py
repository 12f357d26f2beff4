"""Prompts over slabs (K-quants and their like) against the reference, on a GPU that has the kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from device_checks import plain_run, same_state
from large_cases import CACHES, MIXED, SHAPE, rounded_caches, tensors_of
from prefill_layout import from_bf16, from_slab_tiles
from test_cuda_prefill import (
    KEPT_SUMS,
    ONE_MIXER,
    STEPS,
    after_layers,
    check_model,
    error,
    rest_of_layer,
    rounded,
    scatter,
    tiles,
)
from warpsmith.backend.base import ARGMAX, LOGITS, Want
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.prefill import streams
from warpsmith.backend.reference import ReferenceBackend, ops
from warpsmith.backend.reference.mixers import ChunkMixer
from warpsmith.errors import NoDevice
from warpsmith.model.config import Config

pytestmark = pytest.mark.gpu

LONG = dataclasses.replace(SHAPE, context=4096)
ONE_PRODUCT = rounded(3)  # its operand, its weights and its result: 3.9e-3
SOME_LAYERS = after_layers(SHAPE.layers) * 1.5**0.5  # three roundings a product instead of two
# Attention is one of six parts of what the last layer reads, and sees keys and values that are a step off.
STEPS_OFF = (SOME_LAYERS**2 + SOME_LAYERS * max(STEPS.values()) / 6) ** 0.5
TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "BF16", "F16")
OTHER = dict.fromkeys(("attn_q.", "attn_k.", "ssm_", "ffn_up"), "F16") | {"attn_gate": "Q6_K", "ffn_down": "Q5_K"}


def load(
    config: Config, types: dict[str, str], caches: tuple[str, str] = ("f16", "f16")
) -> tuple[LargeBackend, ReferenceBackend, dict[str, np.ndarray]]:
    tensors = tensors_of(config, types)
    try:
        cuda = LargeBackend(
            config,
            tensors,
            cache_type_k=caches[0],
            cache_type_v=caches[1],
            options={"WATCHDOG_CYCLES": "2000000000ll"},
        )
    except NoDevice as error:
        pytest.skip(str(error))
    return cuda, ReferenceBackend(config, tensors), {name: t.float32() for name, t in tensors.items()}


@pytest.fixture(scope="module")
def pair() -> tuple[LargeBackend, ReferenceBackend]:
    return load(LONG, MIXED)[:2]


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, SHAPE.vocab, count)


def operands(cuda: LargeBackend, name: str, rows: int, tokens: int) -> np.ndarray:
    prompts = cuda._prompts
    words = prompts.buffers[name].read(np.uint16, (rows // 32, prompts.capacity, 256))
    return from_slab_tiles(from_bf16(words[:, : -(-tokens // 8)]))[:tokens]


@pytest.mark.parametrize("kind", TYPES)
def test_a_deltanet_layer_op_by_op(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SLAB_TILES", streams.SLAB_TILES[1:2])  # few builds
    config = dataclasses.replace(LONG, layers=1, recurrent=(True,))
    cuda, reference, w = load(config, {"": kind})
    c, count = config, 200
    state, mixed, prompt = cuda.new_state(512), reference.new_state(512), ids(5, count)
    features = cuda.prefill(state, prompt, Want("none", features=(0,))).features.numpy()
    x = w["token_embd.weight"][prompt]
    normed = ops.rms_norm(x, w["blk.0.attn_norm.weight"], c.eps)
    roles = {"qkv": "attn_qkv", "z": "attn_gate", "beta": "ssm_beta", "alpha": "ssm_alpha"}
    made = {role: normed @ w[f"blk.0.{name}.weight"].T for role, name in roles.items()}
    raw = np.concatenate([made["qkv"], made["z"]], axis=1)
    of_product = error(tiles(cuda, "raw", raw.shape[1], count), raw)
    gates = cuda._prompts.buffers["gates"].read(np.float32, (2 * c.value_heads, cuda._prompts.capacity * 8))
    of_gates = error(gates[:, :count].T, np.concatenate([made["beta"], made["alpha"]], axis=1))
    names = {"conv": "ssm_conv1d.weight", "dt": "ssm_dt.bias", "a": "ssm_a", "norm": "ssm_norm.weight"}
    weights = {role: w[f"blk.0.{name}"] for role, name in names.items()}
    chunks = [(s, {n: b[s : s + 64] for n, b in made.items()}) for s in range(0, count, 64)]
    y = np.concatenate(
        [ChunkMixer(c, mixed.layers, s, min(64, count - s)).delta(0, part, weights) for s, part in chunks]
    )
    of_mixer = error(operands(cuda, "y", c.value_dim, count), y)
    h, x = rest_of_layer(w, x, y, "blk.0.ssm_out.weight")
    of_h, of_layer = error(operands(cuda, "h", c.ffn, count), h), error(features, x)
    print(f"{kind}: product {of_product:.5f} gates {of_gates:.5f} y {of_mixer:.5f} h {of_h:.5f} layer {of_layer:.5f}")
    assert of_product < ONE_PRODUCT
    assert of_gates < KEPT_SUMS * 2**0.5
    assert max(of_mixer, of_h, of_layer) < ONE_MIXER * 1.5**0.5  # three roundings a product instead of two


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 520, 2048])
def test_every_position_matches_the_reference(pair: tuple[LargeBackend, ReferenceBackend], count: int) -> None:
    check_model(*pair, count, SOME_LAYERS)


@pytest.fixture(scope="module", params=CACHES[1:], ids=" ".join)
def loaded_quantised(request: pytest.FixtureRequest) -> tuple[LargeBackend, ReferenceBackend]:
    return load(LONG, MIXED, request.param)[:2]


@pytest.fixture
def quantised(
    loaded_quantised: tuple[LargeBackend, ReferenceBackend],
) -> Iterator[tuple[LargeBackend, ReferenceBackend]]:
    with rounded_caches(loaded_quantised[0].cache_types):  # in this test alone
        yield loaded_quantised


@pytest.mark.parametrize("count", [1, 64, 127, 520, 2048])
def test_caches_of_blocks(quantised: tuple[LargeBackend, ReferenceBackend], count: int) -> None:
    check_model(*quantised, count, STEPS_OFF)


def test_caches_of_blocks_keep_the_bits_at_cuts(quantised: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = quantised
    for count, cuts in ((129, [64]), (600, [64, 320]), (2500, [1024, 2048])):
        whole, cut, prompt = cuda.new_state(4096), cuda.new_state(4096), ids(3, count)
        logits = cuda.prefill(whole, prompt, LOGITS).logits.numpy()
        for low, high in zip([0, *cuts], [*cuts, count], strict=True):
            last = cuda.prefill(cut, prompt[low:high], LOGITS).logits.numpy()
        np.testing.assert_array_equal(last, logits)
        assert same_state(SHAPE, whole, cut)


def test_decoding_goes_on_with_caches_of_blocks(quantised: tuple[LargeBackend, ReferenceBackend]) -> None:
    logits = []
    for backend in quantised:
        state = backend.new_state(512)
        backend.prefill(state, ids(6, 90))
        logits.append(np.stack(plain_run(backend, state, ids(8, 9))))
    assert error(*logits) < STEPS_OFF


@pytest.mark.parametrize("ratio", [1, 2])
def test_other_ratios_of_heads(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "SLAB_TILES", streams.SLAB_TILES[1:2])
    cuda, reference, _ = load(dataclasses.replace(LONG, key_heads=4, value_heads=4 * ratio, heads=8), OTHER)
    check_model(cuda, reference, 300, SOME_LAYERS)


def test_any_cut_at_multiples_of_64_gives_the_same_bits(pair: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = pair
    rng = np.random.default_rng(7)
    for count in [65, 128, 129, 257, 520, 600, 2500, *rng.integers(66, 600, 12).tolist()]:
        prompt = ids(3, count)
        whole, cut = cuda.new_state(4096), cuda.new_state(4096)
        logits = cuda.prefill(whole, prompt, LOGITS).logits.numpy()
        cuts = sorted(set((rng.integers(1, (count - 1) // 64 + 1, int(rng.integers(1, 4))) * 64).tolist()))
        for low, high in zip([0, *cuts], [*cuts, count], strict=True):
            last = cuda.prefill(cut, prompt[low:high], LOGITS).logits.numpy()
        np.testing.assert_array_equal(last, logits, err_msg=f"{count} tokens cut at {cuts}")
        assert same_state(SHAPE, whole, cut), (count, cuts)


def test_the_last_row_is_the_same_whatever_else_is_wanted(pair: tuple[LargeBackend, ReferenceBackend]) -> None:
    cuda, _ = pair
    rows = cuda.prefill(cuda.new_state(512), ids(5, 200), Want("logits", every_row=True)).logits.numpy()
    np.testing.assert_array_equal(cuda.prefill(cuda.new_state(512), ids(5, 200), LOGITS).logits.numpy()[0], rows[-1])
    assert int(cuda.prefill(cuda.new_state(512), ids(5, 200), ARGMAX).argmax[-1]) == int(rows[-1].argmax())


@pytest.mark.parametrize(("before", "count"), [(1, 1), (2, 70), (100, 77), (1000, 600)])
def test_a_prompt_goes_on_where_another_ended(
    pair: tuple[LargeBackend, ReferenceBackend], before: int, count: int
) -> None:
    logits = []
    for backend in pair:
        state = backend.new_state(4096)
        backend.prefill(state, ids(6, before))
        logits.append(backend.prefill(state, ids(7, count), LOGITS).logits.numpy())
    assert error(*logits) < SOME_LAYERS * scatter(1, SHAPE.hidden)


def test_decoding_goes_on_after_a_prompt_and_a_prompt_after_decoding(
    pair: tuple[LargeBackend, ReferenceBackend],
) -> None:
    logits = []
    for backend in pair:
        state = backend.new_state(512)
        backend.prefill(state, ids(6, 90))
        rows = plain_run(backend, state, ids(8, 9))
        assert int(state.length) == 99
        logits.append((rows, backend.prefill(state, ids(7, 120), LOGITS).logits.numpy()))
    assert error(np.stack(logits[0][0]), np.stack(logits[1][0])) < SOME_LAYERS
    assert error(logits[0][1], logits[1][1]) < SOME_LAYERS


def test_features_and_hidden_of_every_position(pair: tuple[LargeBackend, ReferenceBackend]) -> None:
    want = Want("argmax", features=(2, 0), hidden=True)
    outputs = [b.prefill(b.new_state(512), ids(5, 170), want) for b in pair]
    assert error(outputs[0].features.numpy(), outputs[1].features.numpy()) < SOME_LAYERS
    assert error(outputs[0].hidden.numpy(), outputs[1].hidden.numpy()) < SOME_LAYERS
    assert outputs[0].argmax.shape == (1,)
