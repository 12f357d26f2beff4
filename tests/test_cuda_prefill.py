"""Prompts through their own kernels against the reference, on a GPU that has them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from device_checks import plain_run, same_state
from prefill_layout import from_bf16, from_tiles
from test_cuda import SHAPE, bf16_tensors
from warpsmith.backend.base import ARGMAX, LOGITS, Want
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.memory.caches import CACHE_ROWS
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.backend.reference import ReferenceBackend, ops
from warpsmith.backend.reference.backend import ReferenceState
from warpsmith.backend.reference.mixers import ChunkMixer
from warpsmith.backend.tree import Tree
from warpsmith.errors import NoDevice
from warpsmith.model.config import Config

pytestmark = pytest.mark.gpu

EVERY = Want("logits", every_row=True)


# Relative errors in the 2-norm. Rounding x to bf16 leaves an error of at most half a unit in the last place of 8 bits,
# evenly spread: of variance (2^-8 |x|)^2 / 3 at most, which is where |x| is a power of two. Errors of many values are
# independent, so they add up in squares: a vector that is rounded is off by at most 2^-8 / sqrt(3) of its length, and a
# matrix with no preferred directions passes that on. So n roundings one after another leave 2^-8 sqrt(n / 3).
def rounded(times: float) -> float:
    return 2**-8 * (times / 3) ** 0.5


ONE_PRODUCT = rounded(2)  # its operand and its result: 3.2e-3
KEPT_SUMS = rounded(1)  # of a result in f32
# Of a DeltaNet: its operand, what is projected (q, k, v and z), the convolution, the scaled inverse, U and W, P, Q^ and
# O0, K~, N and B, the state, and y: 12, however often each is done, as those of one kind reach the result side by side.
# Attention has fewer: its operand, q, k, v, the gate and y (what is fp16 is eight times finer).
MIXER = 12
ONE_MIXER = rounded(MIXER)  # 7.8e-3
# The residual stream is a sum of what mixers and MLPs add, all of about the same size (the embedding is exact, and left
# out). What such a part reads, it passes on twice: v times silu(z) or a gate, silu(gate) times up; and it adds its own
# roundings, an MLP those of its two operands. Then the head's operand.
MLP = 2


def after_layers(count: int) -> float:
    """Of logits, keys and values after so many layers: 1.4e-2 after two, 1.9e-2 after four."""
    parts: list[float] = []
    for own in (MIXER, MLP) * count:
        parts.append(own + 2 * (sum(parts) / len(parts) if parts else 0.0))
    return rounded(sum(parts) / len(parts) + 1)


def scatter(tokens: int, width: int) -> float:
    """That is what is to be expected. The root mean square of n errors is off by one part in sqrt(2 n), and here it may
    be by three times that: 7% of one token of the 0.8B, nothing of many."""
    return 1 + 3 / (2 * tokens * width) ** 0.5


SOME_LAYERS = after_layers(4)


def error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def load(config: Config, seed: int = 1):
    from warpsmith.backend.cuda.weights_first import WeightsFirstBackend

    tensors = bf16_tensors(config, seed)
    profile = dataclasses.replace(load_profiles()["h200"], largest_tree=1)  # one forward kernel to build
    try:
        cuda = WeightsFirstBackend(config, tensors, context=4096, profile=profile)
    except NoDevice as error:
        pytest.skip(str(error))
    return cuda, ReferenceBackend(config, tensors), {name: t.float32() for name, t in tensors.items()}


@pytest.fixture(scope="module")
def pair():
    return load(SHAPE)[:2]


def ids(seed: int, count: int, vocab: int = SHAPE.vocab) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def one_layer(recurrent: bool) -> Config:
    return dataclasses.replace(SHAPE, layers=1, recurrent=(recurrent,))


def tiles(cuda, name: str, rows: int, tokens: int, chunks: int = 0) -> np.ndarray:
    prompts = cuda._prompts
    words = prompts.buffers[name].read(np.uint16, (rows // 32, prompts.capacity, 256))
    return from_tiles(from_bf16(words[:, : -(-tokens // 8)]), chunks)[:tokens]


def rest_of_layer(w, x: np.ndarray, y: np.ndarray, out: str) -> tuple[np.ndarray, np.ndarray]:
    x = x + y @ w[out].T
    h = ops.rms_norm(x, w["blk.0.post_attention_norm.weight"], SHAPE.eps)
    h = ops.silu(h @ w["blk.0.ffn_gate.weight"].T) * (h @ w["blk.0.ffn_up.weight"].T)
    return h, x + h @ w["blk.0.ffn_down.weight"].T


@pytest.mark.parametrize("count", [1, 63, 200])
def test_a_deltanet_layer_op_by_op(count: int) -> None:
    cuda, reference, w = load(one_layer(True), 3)
    c, state, mixed, prompt = cuda.config, cuda.new_state(512), reference.new_state(512), ids(5, count)
    features = cuda.prefill(state, prompt, Want("none", features=(0,))).features.numpy()
    x = w["token_embd.weight"][prompt]
    normed = ops.rms_norm(x, w["blk.0.attn_norm.weight"], c.eps)
    roles = {"qkv": "attn_qkv", "z": "attn_gate", "beta": "ssm_beta", "alpha": "ssm_alpha"}
    made = {role: normed @ w[f"blk.0.{name}.weight"].T for role, name in roles.items()}
    raw = np.concatenate([made["qkv"], made["z"]], axis=1)
    assert error(tiles(cuda, "raw", raw.shape[1], count), raw) < ONE_PRODUCT

    gates = (
        cuda._prompts.buffers["gates"].read(np.float32, (2 * c.value_heads, cuda._prompts.capacity * 8))[:, :count].T
    )
    assert error(gates, np.concatenate([made["beta"], made["alpha"]], axis=1)) < KEPT_SUMS

    names = {"conv": "ssm_conv1d.weight", "dt": "ssm_dt.bias", "a": "ssm_a", "norm": "ssm_norm.weight"}
    weights = {role: w[f"blk.0.{name}"] for role, name in names.items()}
    y = np.concatenate(
        [
            ChunkMixer(c, mixed.layers, s, min(64, count - s)).delta(
                0, {n: b[s : s + 64] for n, b in made.items()}, weights
            )
            for s in range(0, count, 64)
        ]
    )
    assert error(tiles(cuda, "y", c.value_dim, count, c.value_dim // 256), y) < ONE_MIXER
    got = state.delta.read(np.float32, (c.value_heads, 128, 128)).transpose(0, 2, 1)
    assert error(got, mixed.layers[0].delta) < ONE_MIXER
    history = state.history.read(np.float32, (4, c.conv_channels))
    kept = range(max(0, count - 3), count)
    assert error(history[[i % 4 for i in kept]], made["qkv"][list(kept)]) < ONE_PRODUCT

    h, x = rest_of_layer(w, x, y, "blk.0.ssm_out.weight")
    assert error(tiles(cuda, "h", c.ffn, count, c.ffn // 256), h) < ONE_MIXER
    assert error(features, x) < ONE_MIXER


@pytest.mark.parametrize("count", [1, 63, 200])
def test_an_attention_layer_op_by_op(count: int) -> None:
    cuda, reference, w = load(one_layer(False), 3)
    c, state, mixed, prompt = cuda.config, cuda.new_state(512), reference.new_state(512), ids(5, count)
    features = cuda.prefill(state, prompt, Want("none", features=(0,))).features.numpy()
    x = w["token_embd.weight"][prompt]
    normed = ops.rms_norm(x, w["blk.0.attn_norm.weight"], c.eps)
    made = {role: normed @ w[f"blk.0.attn_{role}.weight"].T for role in "qkv"}
    raw = np.concatenate(list(made.values()), axis=1)
    assert error(tiles(cuda, "raw", raw.shape[1], count), raw) < ONE_PRODUCT
    norms = {n: w[f"blk.0.attn_{n}.weight"] for n in ("q_norm", "k_norm")}
    y = ChunkMixer(c, mixed.layers, 0, count).attention(0, made, norms)
    for name in ("keys", "values"):
        got = getattr(state, name).read(np.float16, (c.kv_heads, 512, c.head_dim))[:, :count].transpose(1, 0, 2)
        assert error(got.astype(np.float32), getattr(mixed.layers[0], name)[:count]) < ONE_PRODUCT
    assert error(tiles(cuda, "y", y.shape[1], count, y.shape[1] // 256), y) < ONE_MIXER
    h, x = rest_of_layer(w, x, y, "blk.0.attn_output.weight")
    assert error(tiles(cuda, "h", c.ffn, count, c.ffn // 256), h) < ONE_MIXER
    assert error(features, x) < ONE_MIXER


def check_model(cuda, reference, count: int, bound: float = SOME_LAYERS) -> None:
    state, expected = cuda.new_state(4096), reference.new_state(4096)
    prompt = ids(2, count, cuda.config.vocab)
    got, wanted = (b.prefill(s, prompt, EVERY).logits.numpy() for b, s in ((cuda, state), (reference, expected)))
    agreement = float((got.argmax(axis=1) == wanted.argmax(axis=1)).mean())
    errors = {"logits": error(got, wanted), **state_errors(cuda, state, expected)}
    print(f"{count} tokens: { ({n: round(e, 5) for n, e in errors.items()}) }, top-1 agreement {agreement:.4f}")
    assert agreement > 0.9
    check_errors(cuda, errors, bound, count)


def state_on_device(cuda, state) -> dict[str, np.ndarray]:
    """All that a prompt leaves, as the reference has it: [layers] of DeltaNet states, last inputs of the convolution
    (oldest first), keys and values."""
    c, count = cuda.config, state.length
    delta = state.delta.read(np.float32, (len(c.recurrent_layers), c.value_heads, 128, 128)).transpose(0, 1, 3, 2)
    history = state.history.read(np.float32, (len(c.recurrent_layers), 4, c.conv_channels))
    found = {"delta": delta, "conv": history[:, [i % 4 for i in range(max(0, count - 3), count)]]}
    for name, kind in zip(("keys", "values"), cuda.cache_types, strict=True):
        cached = CACHE_ROWS[kind]
        shape = (len(c.attention_layers), c.kv_heads, state.context, cached.row_bytes)
        rows = getattr(state, name).read(np.uint8, shape)[:, :, :count]
        found[name] = cached.decode(rows).transpose(0, 2, 1, 3)
    return found


def state_errors(cuda, state, expected) -> dict[str, float]:
    errors = {}
    for name, got in state_on_device(cuda, state).items():
        known = np.stack([getattr(expected.layers[i], name) for i in layers_with(cuda.config, name)])
        if name == "conv":
            known = known[:, -got.shape[1] :]
        elif name != "delta":
            known = known[:, : state.length]
        errors[name] = error(got, known)
    return errors


def layers_with(config: Config, name: str) -> list[int]:
    return list(config.recurrent_layers if name in ("delta", "conv") else config.attention_layers)


def handed_over(cuda, state, reference) -> ReferenceState:
    """A state of the reference that goes on where the device's is."""
    other = reference.new_state(state.context)
    other.length = state.length
    for name, rows in state_on_device(cuda, state).items():
        for layer, one in zip(layers_with(cuda.config, name), rows, strict=True):
            getattr(other.layers[layer], name)[: len(one)] = one
    return other


# An error of e of a value moves a quant to the next step s with a probability of e / s, which makes a root mean square
# of sqrt(e s). A usual value is a third of its block's largest: a step of Q8_0 is 3 / 127 of it, of Q4_0 3 / 8.
STEPS = {"f16": 0.0, "q8_0": 3 / 127, "q4_0": 3 / 8}


def check_errors(cuda, errors: dict[str, float], bound: float, tokens: int) -> None:
    bound *= scatter(tokens, cuda.config.hidden)
    for name, kind in zip(("keys", "values"), cuda.cache_types, strict=True):
        assert errors.pop(name) < max(bound, (bound * STEPS[kind]) ** 0.5), (name, kind)
    assert errors.pop("delta") < bound * 2**0.5  # made of products of k and v, each of which has gone through all
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 520, 2048])
def test_every_position_matches_the_reference(pair, count: int) -> None:
    check_model(*pair, count)


@pytest.mark.parametrize("ratio", [1, 3])
def test_other_ratios_of_heads(ratio: int) -> None:
    cuda, reference, _ = load(dataclasses.replace(SHAPE, key_heads=4, value_heads=4 * ratio), 4)
    check_model(cuda, reference, 300)


def test_any_cut_at_multiples_of_64_gives_the_same_bits(pair) -> None:
    cuda, _ = pair
    rng = np.random.default_rng(7)
    for count in [65, 128, 129, 192, 257, 520, 600, *rng.integers(66, 600, 24).tolist()]:
        prompt = ids(3, count)
        whole, cut = cuda.new_state(1024), cuda.new_state(1024)
        logits = cuda.prefill(whole, prompt, LOGITS).logits.numpy()
        cuts = sorted(set((rng.integers(1, (count - 1) // 64 + 1, int(rng.integers(1, 4))) * 64).tolist()))
        for low, high in zip([0, *cuts], [*cuts, count], strict=True):
            last = cuda.prefill(cut, prompt[low:high], LOGITS).logits.numpy()
        np.testing.assert_array_equal(last, logits, err_msg=f"{count} tokens cut at {cuts}")
        assert same_state(SHAPE, whole, cut), (count, cuts)


@pytest.mark.slow
def test_every_cut_of_every_length_to_600_gives_the_same_bits(pair) -> None:
    """In two, and where states are the same too, so by induction in any number of parts."""
    cuda, _ = pair
    prompt, rest, begun = ids(3, 600), cuda.new_state(640), cuda.new_state(640)
    starts = {}
    for cut in range(64, 600, 64):
        cuda.prefill(begun, prompt[cut - 64 : cut])
        starts[cut] = cuda.snapshot(begun)
    for count in range(65, 601):
        whole = cuda.new_state(640)
        logits = cuda.prefill(whole, prompt[:count], LOGITS).logits.numpy()
        for cut in range(64, count, 64):
            cuda.restore(rest, starts[cut])
            got = cuda.prefill(rest, prompt[cut:count], LOGITS).logits.numpy()
            np.testing.assert_array_equal(got, logits, err_msg=f"{count} tokens cut at {cut}")
            assert count % 64 > 1 or same_state(SHAPE, whole, rest), (count, cut)


def test_pieces_give_the_same_bits_as_one(pair) -> None:
    """4,000 tokens take two pieces; three prompts take others."""
    cuda, _ = pair
    prompt = ids(4, 4000)
    whole, cut = cuda.new_state(4096), cuda.new_state(4096)
    logits = cuda.prefill(whole, prompt, LOGITS).logits.numpy()
    for low, high in ((0, 1024), (1024, 1600), (1600, 4000)):
        last = cuda.prefill(cut, prompt[low:high], LOGITS).logits.numpy()
    np.testing.assert_array_equal(last, logits)
    assert same_state(SHAPE, whole, cut)


def test_what_comes_again_has_the_same_bits(pair) -> None:
    """The first time launches are queued one by one, then as a graph, with other states and at other positions."""
    cuda, _ = pair
    turns = {}
    for again in range(3):
        for before, count in ((0, 64), (64, 64), (0, 20), (130, 3), (500, 7)):
            state, prompt = cuda.new_state(640), ids(3, before + count)
            if before:
                cuda.prefill(state, prompt[:before])
            logits = cuda.prefill(state, prompt[before:], LOGITS).logits.numpy()
            first, known = turns.setdefault((before, count), (logits, state))
            np.testing.assert_array_equal(logits, first, err_msg=f"{count} tokens after {before}, {again} times before")
            assert same_state(SHAPE, state, known)
    assert cuda._prompts._replays


def test_the_last_row_is_the_same_whatever_else_is_wanted(pair) -> None:
    cuda, _ = pair
    rows = cuda.prefill(cuda.new_state(512), ids(5, 200), EVERY).logits.numpy()
    np.testing.assert_array_equal(cuda.prefill(cuda.new_state(512), ids(5, 200), LOGITS).logits.numpy()[0], rows[-1])
    assert int(cuda.prefill(cuda.new_state(512), ids(5, 200), ARGMAX).argmax[-1]) == int(rows[-1].argmax())


@pytest.mark.parametrize(("before", "count"), [(1, 1), (2, 70), (100, 77), (1000, 600), (2100, 1500)])
def test_a_prompt_goes_on_where_another_ended(pair, before: int, count: int) -> None:
    logits = []
    for backend in pair:
        state = backend.new_state(4096)
        backend.prefill(state, ids(6, before))
        logits.append(backend.prefill(state, ids(7, count), LOGITS).logits.numpy())
    assert error(*logits) < SOME_LAYERS * scatter(1, SHAPE.hidden)


@pytest.mark.parametrize("steps", [8, 9])  # a commit leaves the state in other buffers
def test_a_prompt_goes_on_after_decoding(pair, steps: int) -> None:
    logits, states = [], []
    for backend in pair:
        state = backend.new_state(512)
        backend.prefill(state, ids(6, 90))
        plain_run(backend, state, ids(8, steps))
        logits.append(backend.prefill(state, ids(7, 12), LOGITS).logits.numpy())
        states.append(state)
    errors = {"logits": error(*logits), **state_errors(pair[0], *states)}
    check_errors(pair[0], errors, SOME_LAYERS, 12)


def test_decoding_goes_on_after_a_prompt(pair) -> None:
    """Each token's logits are near those after the same tokens one by one, and so is the choice where it is clear."""
    cuda, _ = pair
    prompt = ids(9, 150)
    state, twin = cuda.new_state(512), cuda.new_state(512)
    first = cuda.prefill(state, prompt, LOGITS).logits.numpy()[0]
    expected = plain_run(cuda, twin, prompt)[-1]
    for _ in range(20):
        assert error(first, expected) < SOME_LAYERS
        token = int(expected.argmax())
        best, second = np.sort(expected)[-1:-3:-1]
        assert int(first.argmax()) == token or best - second < 0.05 * abs(best)
        first, expected = (plain_run(cuda, s, [token])[-1] for s in (state, twin))


def test_features_and_hidden_of_every_position(pair) -> None:
    want = Want("argmax", features=(2, 0), hidden=True)
    outputs = [b.prefill(b.new_state(512), ids(5, 170), want) for b in pair]
    assert error(outputs[0].features.numpy(), outputs[1].features.numpy()) < SOME_LAYERS
    assert error(outputs[0].hidden.numpy(), outputs[1].hidden.numpy()) < SOME_LAYERS
    assert outputs[0].argmax.shape == (1,)


def test_features_and_hidden_stay_on_the_device(pair) -> None:
    """Those of several pieces in one handle, which later passes leave alone."""
    cuda, _ = pair
    want = Want("none", features=(2, 0), hidden=True)
    output = cuda.prefill(cuda.new_state(4096), ids(5, 2500), want)
    parts, state = [], cuda.new_state(4096)
    for low, high in ((0, 128), (128, 2500)):
        parts.append(cuda.prefill(state, ids(5, 2500)[low:high], want))
    for name in ("features", "hidden"):
        whole = getattr(output, name)
        assert isinstance(whole, CudaRows)
        assert whole.keep() is whole
        np.testing.assert_array_equal(whole.numpy(), np.concatenate([getattr(p, name).numpy() for p in parts]))
    later = output.features.groups([1], of=2)[-3:].numpy()
    np.testing.assert_array_equal(later, output.features.numpy()[-3:, SHAPE.hidden :])


def test_a_prompt_forgets_a_forward_that_was_not_committed(pair) -> None:
    from warpsmith.errors import BadRequest

    cuda, _ = pair
    state = cuda.new_state(128)
    cuda.forward([(state, Tree.chain([1]))])
    cuda.prefill(state, ids(1, 10))
    with pytest.raises(BadRequest, match="no forward pass to commit"):
        cuda.commit(state, [0])
