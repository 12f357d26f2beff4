"""The CPU engine against the reference: whole models of every weight type, and each part of the contract."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from random_models import random_rows, random_tensors, random_tree, small_config
from warpsmith.backend.base import ARGMAX, LOGITS, Want
from warpsmith.backend.cpu import CpuBackend, _cpu
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.errors import BadRequest, DoesNotFit
from warpsmith.model.config import SIZES, Config
from warpsmith.model.synthetic import random_checkpoint, weight_bytes
from warpsmith.model.weights import expected_shapes

# Every kind of kernels this processor can run.
KERNELS = [pytest.param(None, id="best"), pytest.param(["portable"], id="portable")]
if "avx512vnni" in _cpu.features():
    KERNELS.append(pytest.param(["avx2", "fma", "f16c"], id="avx2"))
if "i8mm" in _cpu.features():
    KERNELS.append(pytest.param(["neon", "dotprod"], id="neon"))
F32_CACHE = {"cache_type_k": "f32", "cache_type_v": "f32"}
TINY = dataclasses.replace(SIZES["tiny"], vocab=300)


@cache
def recipe_tensors(recipe: str) -> dict[str, Tensor]:
    return random_checkpoint(TINY, seed=3, recipe=recipe).tensors


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def pair(config: Config, tensors: dict[str, Tensor], **options: object) -> tuple[ReferenceBackend, CpuBackend]:
    return ReferenceBackend(config, tensors, np.float64), CpuBackend(config, tensors, threads=2, **options)


def compare(config: Config, tensors: dict[str, Tensor], bound: float, **options: object) -> None:
    """Prefill, a tree, a commit, another tree: logits of every row within a relative error."""
    reference, cpu = pair(config, tensors, **options)
    rng = np.random.default_rng(1)
    ids, tree = rng.integers(0, config.vocab, 70), random_tree(rng, 12, config.vocab)
    want = Want(tokens="logits", every_row=True, hidden=True, features=(1, 3))
    results = []
    for backend in (reference, cpu):
        state = backend.new_state(128)
        prompt = backend.prefill(state, ids, want)
        first = backend.forward([(state, tree)], LOGITS)
        backend.commit(state, tree.path(11))
        second = backend.forward([(state, tree)], LOGITS)
        assert state.length == 70 + len(tree.path(11))
        results.append(
            (
                prompt.logits.numpy(),
                prompt.hidden.numpy(),
                prompt.features.numpy(),
                first.logits.numpy(),
                second.logits.numpy(),
            )
        )
    for expected, found in zip(*results, strict=True):
        assert found.shape == expected.shape
        assert relative(found, expected) < bound


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_agrees_with_the_reference(ratio: int, kernels: list[str] | None) -> None:
    config = small_config(ratio)
    compare(config, random_tensors(config, seed=ratio), 3e-5, cpu_features=kernels, **F32_CACHE)


# What a layer adds to the residual stream, and by which projection of its own.
PARTS = {"delta": "ssm_out", "attention": "attn_output", "mlp": "ffn_down"}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_every_stage_agrees_with_the_reference(ratio: int, part: str, kernels: list[str] | None) -> None:
    """One part of every layer speaks, the others add nothing: an error shows at its own size, in the layer it is in."""
    config = small_config(ratio)
    tensors = random_tensors(config, seed=ratio)
    for name, tensor in tensors.items():
        if any(other in name for other in set(PARTS.values()) - {PARTS[part]}):
            silent = np.zeros_like(tensor.raw())
            tensors[name] = dataclasses.replace(tensor, read=lambda silent=silent: silent)
    rng = np.random.default_rng(4)
    ids, tree = rng.integers(0, config.vocab, 67), random_tree(rng, 20, config.vocab)
    want = Want(features=tuple(range(config.layers)), hidden=True)
    results = []
    for backend in pair(config, tensors, cpu_features=kernels, **F32_CACHE):
        state = backend.new_state(128)
        for tokens, output in (
            (ids, backend.prefill(state, ids, want)),
            (tree.tokens, backend.forward([(state, tree)], want)),
        ):
            stream = output.features.numpy().reshape(len(tokens), config.layers, config.hidden)
            before = np.concatenate([backend.embed(tokens)[:, None], stream[:, :-1]], axis=1)
            results.append([*np.moveaxis(stream - before, 1, 0), output.hidden.numpy()])
    speaking = {"delta": config.recurrent_layers, "attention": config.attention_layers, "mlp": range(config.layers)}
    for expected, found in ((results[0], results[2]), (results[1], results[3])):
        assert relative(found[-1], expected[-1]) < 1e-5
        for layer in range(config.layers):
            if layer in speaking[part]:
                assert relative(found[layer], expected[layer]) < 1e-5
            else:
                assert not found[layer].any()


# Layers as wide as the 0.8B model's, its heads, and value heads as in the larger ones.
@pytest.mark.parametrize(
    ("recipe", "ratio", "bound"),
    [("f32", 1, 5e-4), ("f16", 2, 5e-4), ("bf16", 3, 5e-4), ("q8_0", 1, 0.05), ("q4_0", 2, 0.05), ("q4_k_m", 3, 0.05),
     ("q5_k_m", 1, 0.05), ("q6_k", 2, 0.05)],
)  # fmt: skip
def test_true_shapes_agree_with_the_reference(recipe: str, ratio: int, bound: float) -> None:
    config = dataclasses.replace(
        SIZES["0.8B"], layers=2, recurrent=(True, False), vocab=320, value_heads=16 * ratio, context=128
    )
    tensors = {}
    for name, shape in expected_shapes(config).items():
        kind = tensor_type(recipe, name, shape, config.layers, config.tied)
        raw = np.concatenate(list(weight_bytes(7, name, kind, shape))).reshape(-1, kind.row_bytes(shape[-1]))
        tensors[name] = Tensor(name, kind, shape, lambda raw=raw: raw)
    rng = np.random.default_rng(8)
    ids, tree = rng.integers(0, config.vocab, 18), random_tree(rng, 5, config.vocab)
    logits = []
    for backend in (ReferenceBackend(config, tensors), CpuBackend(config, tensors, threads=2)):
        state = backend.new_state(32)
        prompt = backend.prefill(state, ids, Want("logits", every_row=True)).logits.numpy()
        logits.append(np.concatenate([prompt, backend.forward([(state, tree)], LOGITS).logits.numpy()]))
    assert relative(logits[1], logits[0]) < bound


def test_an_untied_head_is_used() -> None:
    config = small_config(2, tied=False)
    compare(config, random_tensors(config), 3e-5, **F32_CACHE)


# Weights are the same numbers on both sides. What differs: keys and values in 16 bits, and for quantised weights
# activations in 8 bits, whose error this small random network amplifies (test_cpu_kernels.py has the exact bounds).
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("recipe", "bound"),
    [("f32", 5e-4), ("f16", 5e-4), ("bf16", 5e-4), ("q8_0", 0.08), ("q4_0", 0.08), ("q4_k_m", 0.12)],
)
def test_every_recipe_agrees_with_the_reference(recipe: str, bound: float, kernels: list[str] | None) -> None:
    compare(TINY, recipe_tensors(recipe), bound, cpu_features=kernels)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K")])
def test_every_other_type_agrees_with_the_reference(kind: str) -> None:
    tensors = dict(recipe_tensors("f32"))
    for name, tensor in tensors.items():
        if name.endswith(".weight") and len(tensor.shape) == 2 and tensor.shape[1] % 256 == 0:
            raw = random_rows(kind, *tensor.shape, tensor.shape[1] ** -0.5)
            tensors[name] = dataclasses.replace(tensor, type=TYPES[kind], read=lambda raw=raw: raw)
    compare(TINY, tensors, 0.12)


@pytest.mark.parametrize(
    ("keys", "values", "bound"),
    [("f32", "f32", 3e-5), ("f16", "f16", 1e-3), ("q8_0", "q8_0", 0.03), ("q8_0", "f32", 0.03), ("f16", "q8_0", 0.03)],
)
def test_keys_and_values_in_every_type(keys: str, values: str, bound: float) -> None:
    config = small_config(2)
    compare(config, random_tensors(config), bound, cache_type_k=keys, cache_type_v=values)


def test_a_long_past_is_attended_to() -> None:
    config = small_config(1)
    reference, cpu = pair(config, random_tensors(config), **F32_CACHE)
    ids = np.random.default_rng(0).integers(0, config.vocab, 1100)
    found, expected = (
        backend.prefill(backend.new_state(1100), ids, Want("logits", every_row=True)).logits.numpy()
        for backend in (cpu, reference)
    )
    assert relative(found[1000:], expected[1000:]) < 1e-4


@pytest.mark.parametrize("kernels", KERNELS)
def test_mtp_agrees_with_the_reference(kernels: list[str] | None) -> None:
    config = small_config(2, mtp_layers=1)
    reference, cpu = pair(config, random_tensors(config), cpu_features=kernels, **F32_CACHE)
    rng = np.random.default_rng(2)
    ids, hidden = rng.integers(0, config.vocab, 70), rng.standard_normal((70, config.hidden)).astype(np.float32)
    want = Want("top", top=7, hidden=True, every_row=True)
    outputs = []
    for backend in (reference, cpu):
        state = backend.new_state(80)
        last = backend.mtp(state, ids, hidden, 0, Want("top", top=7))
        assert np.array_equal(last.top_ids, backend.mtp(state, ids, hidden, 0, want).top_ids[-1:])
        outputs.append(backend.mtp(state, ids[:2], hidden[:2], 40, want))  # over what was there
    expected, found = outputs
    assert relative(found.hidden.numpy(), expected.hidden.numpy()) < 3e-5
    assert relative(found.top_logits, expected.top_logits) < 3e-5
    assert (found.top_ids == expected.top_ids).all()
    with pytest.raises(BadRequest, match="outside a context"):
        cpu.mtp(state, ids, hidden, 20)


def test_top_is_the_best_of_the_logits_and_ties_go_to_the_lower_id() -> None:
    config = small_config(2)
    tensors = random_tensors(config)
    table = tensors["token_embd.weight"].float32().copy()
    table[40:80] = table[:40]  # every token below 40 has a twin
    raw = np.ascontiguousarray(table).view(np.uint8)
    tensors["token_embd.weight"] = dataclasses.replace(tensors["token_embd.weight"], read=lambda: raw)
    cpu = CpuBackend(config, tensors, threads=3)
    state, tree = cpu.new_state(64), random_tree(np.random.default_rng(1), 9, config.vocab)
    logits = cpu.forward([(state, tree)], LOGITS)
    top = cpu.forward([(state, tree)], Want("top", top=20))
    order = np.argsort(-logits.logits.numpy(), axis=1, kind="stable")
    assert (top.top_ids == order[:, :20]).all()
    assert (top.top_logits == np.take_along_axis(logits.logits.numpy(), order[:, :20], axis=1)).all()
    exact = np.log(np.exp(logits.logits.numpy().astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(top.logsumexp, exact, rtol=1e-6)
    for output in (logits, top, cpu.forward([(state, tree)], ARGMAX)):
        assert (output.argmax == order[:, 0]).all()


def test_snapshots_bring_the_past_back() -> None:
    config = small_config(2, mtp_layers=1)
    cpu = CpuBackend(config, random_tensors(config), threads=2)
    rng = np.random.default_rng(1)
    ids = rng.integers(0, config.vocab, 40)
    state, other = cpu.new_state(96), cpu.new_state(64)
    cpu.prefill(state, ids[:30])
    saved = cpu.snapshot(state)
    expected = cpu.prefill(state, ids[30:], Want("logits", every_row=True)).logits.numpy()
    assert saved.length == 30
    assert saved.nbytes == saved.data.nbytes == cpu.snapshot_bytes(30)
    for target in (state, other):  # over a longer past, and in a state of another size
        cpu.restore(target, saved)
        assert target.length == 30
        assert (cpu.prefill(target, ids[30:], Want("logits", every_row=True)).logits.numpy() == expected).all()
    with pytest.raises(BadRequest, match="does not fit"):
        cpu.restore(cpu.new_state(29), saved)


def test_what_cannot_be_done_is_refused() -> None:
    config = small_config(2)
    tensors = random_tensors(config)
    cpu = CpuBackend(config, tensors, threads=1)
    state = cpu.new_state(8)
    with pytest.raises(BadRequest, match="nothing to prefill"):
        cpu.prefill(state, [])
    with pytest.raises(BadRequest, match="do not fit"):
        cpu.prefill(state, [1] * 9)
    with pytest.raises(BadRequest, match="Token ids"):
        cpu.prefill(state, [config.vocab])
    with pytest.raises(BadRequest, match="no forward pass"):
        cpu.commit(state, [0])
    cpu.forward([(state, Tree.chain([1, 2, 3]))])
    for path in ([], [1], [0, 2], [0, 1, 2, 3], [-1]):
        with pytest.raises(BadRequest, match="not a path"):
            cpu.commit(state, path)
    cpu.commit(state, [0, 1])
    with pytest.raises(BadRequest, match="no forward pass"):
        cpu.commit(state, [0])
    for want in (Want("top", top=0), Want("top", top=config.vocab + 1), Want(features=(4,))):
        with pytest.raises(BadRequest):
            cpu.forward([(state, Tree.chain([1]))], want)
    with pytest.raises(BadRequest, match="MTP"):
        cpu.mtp(state, [1], np.zeros((1, config.hidden)), 0)
    with pytest.raises(BadRequest, match="no sse9"):
        CpuBackend(config, tensors, cpu_features=["sse9"])
    if features := _cpu.features():
        with pytest.raises(BadRequest, match="alone"):
            CpuBackend(config, tensors, cpu_features=features[:1])
    with pytest.raises(BadRequest, match="threads"):
        CpuBackend(config, tensors, threads=0)
    with pytest.raises(BadRequest, match="kept as"):
        CpuBackend(config, tensors, cache_type_v="q2")
    with pytest.raises(BadRequest, match="multiple of 16"):
        CpuBackend(small_config(2, hidden=40), tensors)
    with pytest.raises(DoesNotFit, match="A context of"):
        CpuBackend(SMALL_BUT_DEEP, random_tensors(SMALL_BUT_DEEP)).new_state(1 << 30)


SMALL_BUT_DEEP = small_config(1, layers=2, recurrent=(True, False), kv_heads=4, head_dim=256, rotary_dim=64)


def test_memory_counts_what_is_allocated() -> None:
    config = small_config(2)
    cpu = CpuBackend(config, random_tensors(config), threads=1)
    parts = {part.what: part.nbytes for part in cpu.memory(100)}
    assert parts["keys and values"] == 100 * 2 * 2 * 32 * 2  # one attention layer, keys and values, two heads, f16
    mixed = CpuBackend(config, random_tensors(config), threads=1, cache_type_k="q8_0", cache_type_v="f32")
    assert mixed.memory(100)[1].nbytes == 100 * 2 * (34 + 32 * 4)
    assert parts["DeltaNet states"] == 3 * 4 * (4 * (16 * 16 + 2 * (16 + 16 + 16)) + 3 * config.conv_channels)
    assert parts["weights"] > sum(t.nbytes for t in random_tensors(config).values())  # padded to whole panels


def test_loading_reports_progress() -> None:
    config = small_config(2)
    tensors, heard = random_tensors(config), []
    CpuBackend(config, tensors, threads=1, progress=lambda done, total: heard.append((done, total)))
    assert len(heard) == len(tensors)
    assert heard == sorted(heard)
    assert heard[-1] == (sum(t.nbytes for t in tensors.values()),) * 2


def test_the_best_kernels_are_chosen() -> None:
    config = small_config(2)
    tensors = random_tensors(config)
    here = _cpu.features()
    kinds = {"i8mm": "neon-i8mm", "dotprod": "neon", "avx512vnni": "avx512", "avx2": "avx2"}
    best = next((kernels for feature, kernels in kinds.items() if feature in here), "portable")
    assert CpuBackend(config, tensors, threads=1).kernels == best
    assert CpuBackend(config, tensors, threads=1, cpu_features=["portable"]).kernels == "portable"


def test_embeddings_and_head_are_lent_as_the_reference_lends_them() -> None:
    config = small_config(2)
    reference, cpu = pair(config, random_tensors(config))
    tokens = [3, 9, 3]
    assert (cpu.embed(tokens) == reference.embed(tokens)).all()
    hidden = np.random.default_rng(0).standard_normal((5, config.hidden)).astype(np.float32)
    assert relative(cpu.head(hidden, LOGITS).logits.numpy(), reference.head(hidden, LOGITS).logits.numpy()) < 1e-5
    assert (cpu.head(hidden).argmax == reference.head(hidden).argmax).all()
    with pytest.raises(BadRequest, match="rows"):
        cpu.head(hidden[:, :-1])
