"""DFlash drafts: every file format gives the same network, and the network is the one in the paper."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_cases import Alone, OneBlock
from random_drafts import (
    FORMATS,
    draft_config,
    draft_in_memory,
    gguf_metadata,
    gguf_name,
    random_weights,
    write_draft,
    write_holes,
)
from random_models import SMALL, random_tensors
from warpsmith.backend.base import Output, Want
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.backend.reference.dflash import NumpyDraft, NumpyMemory
from warpsmith.backend.rows import HostRows
from warpsmith.checkpoint.dflash import DFlashConfig, expected_shapes, is_draft, open_draft
from warpsmith.checkpoint.gguf_writer import write_gguf
from warpsmith.draft.base import Context
from warpsmith.draft.dflash import DFlash
from warpsmith.errors import BadFile, BadRequest
from warpsmith.model.config import SIZES
from warpsmith.model.dflash import block_plan, check_fits, context_plan

BACKEND = ReferenceBackend(SMALL, random_tensors(SMALL))
CONFIG = draft_config(SMALL)
FIVE = draft_config(SMALL, layers=3, windows=(7, None, 7), causal=(True, False, True))


def features_of(count: int, seed: int = 0, config: DFlashConfig = CONFIG) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, len(config.target_layers) * config.hidden)).astype(np.float32) * 2


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, FIVE], ids=["full", "sliding"])
@pytest.mark.parametrize("format", FORMATS)
def test_all_formats_hold_the_same_draft(format: str, config: DFlashConfig, tmp_path: Path) -> None:
    weights = random_weights(config)
    path = write_draft(tmp_path / "draft", format, config, weights)
    assert is_draft(path)
    opened = open_draft(path)
    known = {} if format == "safetensors" else {"vocab": None, "target_depth": None}
    expected = dataclasses.replace(config, source=opened.config.source, **known)
    assert opened.config == expected
    assert opened.config.source.startswith(str(path))
    assert opened.tensors.keys() == weights.keys()
    for name, values in weights.items():
        assert np.array_equal(opened.tensors[name].float32(), values), name


def test_a_draft_is_found_by_its_directory_or_its_file(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    directory = write_draft(tmp_path / "a", "safetensors", CONFIG, weights)
    assert open_draft(directory / "model.safetensors").config.layers == 2
    (tmp_path / "b").mkdir()
    write_draft(tmp_path / "b" / "draft", "lucebox", CONFIG, weights)
    assert open_draft(tmp_path / "b").config.layers == 2
    with pytest.raises(BadFile, match="no config"):
        open_draft(tmp_path)
    assert not is_draft(tmp_path)


def test_names_that_older_converters_gave_are_understood(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    names = {
        "fc": "dflash_fc",
        "hidden_norm": "dflash_hidden_norm",
        "norm": "output_norm",
        "post_attention_layernorm": "post_attention_norm",
    }
    tensors: dict[str, Any] = {}
    for name, values in weights.items():
        stem = name.removesuffix(".weight")
        stored = (
            names[stem] + ".weight"
            if stem in names
            else gguf_name(name, "lucebox").replace("ffn_norm", "post_attention_norm")
        )
        tensors[stored] = ("F32", values)
    write_gguf(tmp_path / "old.gguf", gguf_metadata(CONFIG, "lucebox"), tensors)
    assert np.array_equal(open_draft(tmp_path / "old.gguf").tensors["fc.weight"].float32(), weights["fc.weight"])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("said", [None, True, False])
def test_causal_is_what_the_file_says_or_sliding_layers_only(format: str, said: bool | None, tmp_path: Path) -> None:
    path = write_draft(tmp_path / "draft", format, FIVE, random_weights(FIVE), said_causal=said)
    assert open_draft(path).config.causal == ((True, False, True) if said is None else (said,) * 3)


def test_causal_may_stand_in_the_inner_configuration(tmp_path: Path) -> None:
    inner = {"mask_token_id": 1, "target_layer_ids": [0, 2, 3], "causal": False}
    path = write_draft(tmp_path / "d", "safetensors", FIVE, random_weights(FIVE), metadata={"dflash_config": inner})
    assert open_draft(path).config.causal == (False,) * 3


@pytest.mark.parametrize(("pattern", "slides"), [(0, "111"), (1, "000"), (2, "101"), (3, "110"), (None, "111")])
def test_patterns_of_sliding_layers_may_be_numbers(pattern: int | None, slides: str, tmp_path: Path) -> None:
    changes = {"dflash.attention.sliding_window_pattern": pattern}
    path = write_draft(tmp_path / "d", "llama.cpp", FIVE, random_weights(FIVE), metadata=changes)
    assert "".join("01"[w is not None] for w in open_draft(path).config.windows) == slides


def test_rope_base_is_found_where_new_configurations_keep_it(tmp_path: Path) -> None:
    changes = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}}
    path = write_draft(tmp_path / "d", "safetensors", CONFIG, random_weights(CONFIG), metadata=changes)
    assert open_draft(path).config.rope_theta == 5e6


@pytest.mark.parametrize(
    ("format", "changes", "words"),
    [
        ("safetensors", {"rope_theta": None}, "rope_theta is missing"),
        ("lucebox", {"qwen35-dflash-draft.rope.freq_base": None}, "rope.freq_base is missing"),
        ("llama.cpp", {"dflash.rope.freq_base": None}, "rope.freq_base is missing"),
        ("llama.cpp", {"dflash.rope.freq_base": 0.0}, "freq_base is 0.0"),
        ("safetensors", {"rope_scaling": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ("safetensors", {"block_size": 1}, "block_size is 1"),
        ("safetensors", {"block_size": True}, "block_size"),
        ("safetensors", {"layer_types": ["full_attention"]}, "layer_types"),
        ("safetensors", {"layer_types": ["full_attention", "mamba"]}, "mamba"),
        ("safetensors", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
        ("safetensors", {"dflash_config": None}, "dflash_config is missing"),
        ("safetensors", {"dflash_config": {"mask_token_id": 1}}, "target_layer_ids is missing"),
        ("safetensors", {"dflash_config": {"target_layer_ids": [0, 2, 3]}}, "dflash_config.mask_token_id is missing"),
        ("safetensors", {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, -2, 3]}}, "target_layer_ids"),
        ("safetensors", {"num_hidden_layers": 3, "layer_types": None}, "lacks the tensor layers.2"),
        ("safetensors", {"hidden_size": 128}, "shape"),
        ("safetensors", {"num_attention_heads": 3}, "do not divide"),
        ("lucebox", {"qwen35-dflash-draft.block_count": 3}, "lacks the tensor"),
        ("lucebox", {"qwen35-dflash-draft.dflash.mask_token_id": None}, "mask_token_id is missing"),
        ("lucebox", {"qwen35-dflash-draft.dflash.target_layer_ids": [0, 1]}, "shape"),
        ("llama.cpp", {"dflash.target_layers": [0, 2, 3]}, "layers from 1"),
        ("llama.cpp", {"tokenizer.ggml.mask_token_id": None}, "mask_token_id is missing"),
        ("llama.cpp", {"general.architecture": "llama"}, "no DFlash draft"),
    ],
)
def test_a_file_that_cannot_be_a_draft_is_refused(
    format: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = write_draft(tmp_path / "draft", format, CONFIG, random_weights(CONFIG), metadata=changes)
    with pytest.raises(BadFile, match=words) as caught:
        open_draft(path)
    assert caught.value.fix
    assert caught.value.problem.count(". ") == 0, "one sentence"


@pytest.mark.parametrize("extra", ["layers.0.attention_conv.base_kernel", "d2t", "dspark.markov.w1.weight"])
def test_other_networks_are_not_mistaken_for_plain_dflash(extra: str, tmp_path: Path) -> None:
    weights = random_weights(CONFIG) | {extra: np.ones((2, 2), np.float32)}
    path = write_draft(tmp_path / "draft", "safetensors", CONFIG, weights)
    with pytest.raises(BadFile, match="plain DFlash"):
        open_draft(path)
    copy = random_weights(CONFIG) | {"embed_tokens.weight": np.ones((SMALL.vocab, SMALL.hidden), np.float32)}
    assert open_draft(write_draft(tmp_path / "own", "safetensors", CONFIG, copy)).config.layers == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 128}, "hidden size of 128, and the model of 64"),
        ({"vocab": 999}, "vocabulary of 999"),
        ({"vocab": None, "mask_token": SMALL.vocab}, "outside the model's vocabulary"),
        ({"target_depth": 8}, "8 layers"),
        ({"target_depth": None, "target_layers": (0, 2, 4)}, "reads layer 4, and the model's last is 3"),
    ],
)
def test_a_draft_of_another_model_is_refused_in_one_sentence(changes: dict[str, Any], words: str) -> None:
    config = draft_config(SMALL, **changes)
    with pytest.raises(BadRequest, match=words) as caught:
        check_fits(config, SMALL)
    assert caught.value.problem.count(".") == 1
    with pytest.raises(BadRequest, match=words):
        DFlash(draft_in_memory(config), BACKEND)
    check_fits(CONFIG, SMALL)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden": 128}, "hidden size of 128, and the model of 64"),
        ({"vocab": 999}, "vocabulary of 999 tokens, and the model of"),
        ({"target_layers": (0, 2, 7), "target_depth": None}, "reads layer 7, and the model's last is 3"),
    ],
)
def test_so_are_files_of_every_format(format: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = draft_config(SMALL, **changes)
    architecture = {"lucebox": "qwen35-dflash-draft", "llama.cpp": "dflash"}.get(format)
    said = {f"{architecture}.vocab_size": config.vocab} if architecture else None
    path = write_draft(tmp_path / "draft", format, config, random_weights(config), metadata=said)
    with pytest.raises(BadRequest, match=words) as caught:
        DFlash(open_draft(path), BACKEND)
    sentence = caught.value.problem.replace(str(path), "file")
    assert sentence.count(". ") == 0, "one sentence"
    assert sentence.endswith(".")


@pytest.mark.parametrize("format", FORMATS)
def test_drafts_of_the_27b_shape_open_in_every_format(format: str, tmp_path: Path) -> None:
    """The released drafts' shape, every layer of it, in a file of holes: opening reads no weights."""
    target, layers = SIZES["27B"], 5
    config = draft_config(
        target, layers=layers, ffn=17408, heads=32, kv_heads=8, head_dim=128, rope_theta=1e7, block=16,
        mask_token=248_070, target_layers=(1, 16, 31, 46, 61), windows=(2048,) * 4 + (None,),
        causal=(True,) * 4 + (False,),
    )  # fmt: skip
    path = write_holes(tmp_path / "draft", format, config)
    opened = open_draft(path)
    check_fits(opened.config, target)
    assert opened.config.target_layers == (1, 16, 31, 46, 61)
    assert opened.config.windows == config.windows
    assert opened.tensors["layers.4.self_attn.k_norm.weight"].float32().shape == (128,)
    with pytest.raises(BadRequest, match="hidden size of 5120, and the model of 64"):
        check_fits(opened.config, SMALL)


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [CONFIG, FIVE], ids=["two layers", "five"])
def test_the_plans_name_every_tensor_and_no_other(config: DFlashConfig) -> None:
    stages = [*context_plan(config), *block_plan(config)]
    assert {name for stage in stages for name in stage.weights.values()} == set(expected_shapes(config))
    known = {"tokens", "features"}
    for stage in stages:
        assert set(stage.reads) <= known, stage.name
        known |= set(stage.writes)


class Seen(Alone):
    """A draft that says what its last layer holds."""

    def hidden(self, root: int, position: int) -> np.ndarray:
        assert isinstance(self.proposer, DFlash)
        return self.proposer.hidden(self.memory, root, position)


def hidden_after(draft: Seen, features: np.ndarray, pieces: list[int]) -> np.ndarray:
    """Rows of a block on top of features that came in pieces."""
    start = 0
    for count in pieces:
        draft.observe([1] * count, start, HostRows(features[start : start + count]), None)
        draft.catch_up(BACKEND.new_state(8)) if count % 2 else None
        start += count
    draft.catch_up(BACKEND.new_state(8))
    return draft.hidden(5, start)


SHAPES = {
    "full": CONFIG,
    "sliding and full": FIVE,
    "sliding, not causal": draft_config(SMALL, windows=(5, 9), causal=(False, False)),
    "causal": draft_config(SMALL, causal=(True, True)),
    "one feature, one layer": draft_config(SMALL, layers=1, target_layers=(2,)),
    "window shorter than the block": draft_config(SMALL, windows=(3, None), causal=(True, False)),
}


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_context_in_pieces_equals_context_at_once(config: DFlashConfig) -> None:
    features = features_of(40, config=config)
    file = draft_in_memory(config)
    whole = hidden_after(Seen(DFlash(file, BACKEND)), features, [40])
    for pieces in ([1] * 40, [13, 1, 1, 25], [39, 1]):
        assert hidden_after(Seen(DFlash(file, BACKEND)), features, pieces) == pytest.approx(whole, abs=2e-5)
    shorter = hidden_after(Seen(DFlash(file, BACKEND)), features[:39], [39])
    assert np.abs(shorter - whole).max() > 1e-3


def test_a_rolling_cache_forgets_what_its_window_hides() -> None:
    """Memory is bounded by the window, and nothing that is visible is missing."""
    config = draft_config(SMALL, windows=(9, 5), causal=(True, True))
    file, features = draft_in_memory(config), features_of(300, config=config)
    draft = Seen(DFlash(file, BACKEND))
    assert isinstance(draft.memory.network, NumpyMemory)
    assert [cache.keys.shape[1] for cache in draft.memory.network.caches] == [9, 5]
    far = hidden_after(draft, features, [100, 3, 1, 196])
    near = Seen(DFlash(file, BACKEND))
    near.observe([1] * 8, 292, HostRows(features[292:]), None)
    near.catch_up(BACKEND.new_state(8))
    assert near.hidden(5, 300) == pytest.approx(far, abs=2e-5)


def test_full_layers_see_as_far_as_their_cache() -> None:
    file, features = draft_in_memory(CONFIG), features_of(90)
    draft = Seen(DFlash(file, BACKEND, context_rows=32))
    bounded = hidden_after(draft, features, [50, 1, 7, 32])
    near = Seen(DFlash(file, BACKEND))
    near.observe([1] * 32, 58, HostRows(features[58:]), None)
    near.catch_up(BACKEND.new_state(8))
    assert near.hidden(5, 90) == pytest.approx(bounded, abs=2e-5)
    assert sum(len(rows) for _, rows in draft.memory.waiting) == 0


def test_waiting_features_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    file, features = draft_in_memory(CONFIG), features_of(400)
    expected = hidden_after(Seen(DFlash(file, BACKEND, context_rows=32)), features, [400])
    draft = Seen(DFlash(file, BACKEND, context_rows=32))
    for i in range(400):
        draft.observe([1], i, HostRows(features[i : i + 1]), None)
        assert sum(len(rows) for _, rows in draft.memory.waiting) <= 33
    draft.catch_up(BACKEND.new_state(8))
    assert draft.hidden(5, 400) == pytest.approx(expected, abs=2e-5)
    monkeypatch.setattr("warpsmith.draft.dflash.WAITING_BYTES", 10 * features[:1].nbytes)
    draft = Seen(DFlash(file, BACKEND, context_rows=32))
    for i in range(400):
        draft.observe([1], i, HostRows(features[i : i + 1]), None)
        assert sum(rows.nbytes for _, rows in draft.memory.waiting) <= 10 * features[:1].nbytes
    draft.catch_up(BACKEND.new_state(8))
    assert draft.hidden(5, 400) == pytest.approx(expected, abs=2e-5)


def test_after_a_gap_the_rows_before_it_still_stand_where_they_stood() -> None:
    file, features = draft_in_memory(FIVE), features_of(50, config=FIVE)
    draft, expected = Seen(DFlash(file, BACKEND)), OneBlock(NumpyDraft(file, BACKEND, [7, 4096, 7]))
    draft.observe([1] * 30, 0, HostRows(features[:30]), None)
    draft.observe([1] * 9, 30, None, None)
    draft.observe([1] * 20, 39, HostRows(features[30:]), None)
    draft.catch_up(BACKEND.new_state(8))
    expected.append(HostRows(features[:30]), 0)
    expected.append(HostRows(features[30:]), 39)
    rows = expected.fill(5, 59, FIVE.block - 1, Want("none", hidden=True)).hidden.numpy()
    assert draft.hidden(5, 59) == pytest.approx(rows, abs=2e-5)


def test_going_back_to_a_snapshot() -> None:
    file, features = draft_in_memory(FIVE), features_of(60, config=FIVE)
    draft = Seen(DFlash(file, BACKEND))
    draft.observe([1] * 30, 0, HostRows(features[:30]), None)
    before = draft.snapshot()
    expected = hidden_after(Seen(DFlash(file, BACKEND)), features, [30, 10])
    other = features_of(20, seed=9, config=FIVE)
    for _ in range(2):
        draft.observe([2] * 20, 30, HostRows(other), None)
        draft.catch_up(BACKEND.new_state(8))
        draft.hidden(5, 50)
        draft.restore(before)
        draft.observe([1] * 10, 30, HostRows(features[30:40]), None)
        draft.catch_up(BACKEND.new_state(8))
        assert draft.hidden(5, 40) == pytest.approx(expected, abs=2e-5)
        draft.restore(before)


def test_guesses_are_the_head_s_on_the_masked_rows() -> None:
    draft = Seen(DFlash(draft_in_memory(CONFIG), BACKEND, nodes=20))
    state = BACKEND.new_state(64)
    ids = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    output = BACKEND.prefill(state, ids[:-1], draft.proposer.wants)
    assert output.features is not None
    draft.observe(ids[:-1], 0, output.features, None)
    tree = draft.propose(Context(ids, state, 100))
    assert tree is not None
    assert len(tree) == 21
    rows: Output = BACKEND.head(draft.hidden(5, 8)[1:], Want("logits"))
    assert rows.logits is not None
    shown = rows.logits.numpy() - np.log(np.exp(rows.logits.numpy().astype(np.float64)).sum(axis=1, keepdims=True))
    for node in range(1, len(tree)):
        path = tree.path(node)[1:]
        score = sum(shown[d, tree.tokens[n]] for d, n in enumerate(path))
        assert tree.scores[node] == pytest.approx(score, abs=1e-4)
    assert tree.tokens[1] == shown[0].argmax()
    assert draft.propose(Context(ids, state, 2)).depths().max() <= 2  # type: ignore[union-attr]


def test_the_order_of_target_layers_is_the_order_of_features() -> None:
    state = BACKEND.new_state(16)
    apart = [
        BACKEND.prefill(BACKEND.new_state(16), [1, 2, 3], Want("none", features=(i,))).features.numpy() for i in (3, 0)
    ]
    together = BACKEND.prefill(state, [1, 2, 3], Want("none", features=(3, 0))).features.numpy()
    assert together is not None
    assert np.array_equal(together, np.concatenate(apart, axis=1))  # type: ignore[arg-type]


# -- an oracle --------------------------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("length", [0, 1, 30])
def test_the_network_equals_one_written_in_torch(config: DFlashConfig, length: int) -> None:
    """The formulas once more, written apart: whole context at once, per head, in float64, with explicit masks."""
    torch = pytest.importorskip("torch")
    c = config
    weights = {name: torch.tensor(w, dtype=torch.float64) for name, w in random_weights(c).items()}
    features = features_of(length, config=c)
    embedded = torch.tensor(BACKEND.embed([5, *[c.mask_token] * (c.block - 1)]), dtype=torch.float64)

    def norm(x: Any, name: str) -> Any:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[name + ".weight"], eps=c.eps)

    def rotate(x: Any, positions: Any) -> Any:
        half = c.head_dim // 2
        angle = positions[:, None] * c.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.polar(torch.ones_like(angle), angle)
        turned = torch.complex(x[..., :half], x[..., half:]) * turn
        return torch.cat([turned.real, turned.imag], -1)

    block_at = torch.arange(length, length + c.block, dtype=torch.float64)
    all_at = torch.arange(length + c.block, dtype=torch.float64)
    context = norm(torch.tensor(features, dtype=torch.float64) @ weights["fc.weight"].T, "hidden_norm")
    x = embedded
    for i in range(c.layers):
        layer = f"layers.{i}."
        a = norm(x, layer + "input_layernorm")
        source = torch.cat([context, a])
        heads = []
        for h in range(c.heads):
            kv = h // (c.heads // c.kv_heads)
            rows, kv_rows = slice(h * c.head_dim, (h + 1) * c.head_dim), slice(kv * c.head_dim, (kv + 1) * c.head_dim)
            q = rotate(
                norm(a @ weights[layer + "self_attn.q_proj.weight"][rows].T, layer + "self_attn.q_norm"), block_at
            )
            k = norm(source @ weights[layer + "self_attn.k_proj.weight"][kv_rows].T, layer + "self_attn.k_norm")
            v = source @ weights[layer + "self_attn.v_proj.weight"][kv_rows].T
            scores = q @ rotate(k, all_at).T / c.head_dim**0.5
            for j in range(c.block):
                for p in range(length + c.block):
                    too_far = c.windows[i] is not None and p < length + j - (c.windows[i] - 1)
                    too_late = p >= length and c.causal[i] and p > length + j
                    other_side = c.windows[i] is not None and p > length + j + (c.windows[i] - 1)
                    if too_far or too_late or other_side:
                        scores[j, p] = -torch.inf
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ weights[layer + "self_attn.o_proj.weight"].T
        n = norm(x, layer + "post_attention_layernorm")
        gate = torch.nn.functional.silu(n @ weights[layer + "mlp.gate_proj.weight"].T)
        x = x + (gate * (n @ weights[layer + "mlp.up_proj.weight"].T)) @ weights[layer + "mlp.down_proj.weight"].T
    expected = norm(x, "norm").numpy()

    draft = Seen(DFlash(draft_in_memory(c), BACKEND))
    if length:
        draft.observe([1] * length, 0, HostRows(features), None)
        draft.catch_up(BACKEND.new_state(8))
    assert draft.hidden(5, length) == pytest.approx(expected, abs=2e-4)
