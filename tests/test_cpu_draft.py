"""DFlash inside the CPU engine against the same network in numpy: every shape, weight type and thread count."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draft_cases import OneBlock
from random_drafts import FORMATS, draft_config, draft_in_memory, fill_holes, random_weights, write_holes
from random_models import random_tensors, small_config
from warpsmith.backend.base import Want
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.cpu.draft import CpuDraft
from warpsmith.backend.reference.dflash import NumpyDraft
from warpsmith.backend.rows import HostRows
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig, DraftFile, open_draft
from warpsmith.checkpoint.quantize import quantize
from warpsmith.draft.dflash import DFlash
from warpsmith.model.config import SIZES
from warpsmith.model.dflash import check_fits

TARGET = small_config(vocab=100)
WIDE = small_config(vocab=100, hidden=256)
TOP = Want(tokens="top", top=7, hidden=True)


@cache
def backend(wide: bool = False, threads: int = 2) -> CpuBackend:
    target = WIDE if wide else TARGET
    return CpuBackend(target, random_tensors(target), threads=threads)


def shaped(target: Any = TARGET, **changes: Any) -> DFlashConfig:
    return draft_config(target, **({"head_dim": 32, "ffn": 80} | changes))


SHAPES = {
    "full": shaped(),
    "sliding and full": shaped(layers=3, windows=(7, None, 20), causal=(True, False, True)),
    "sliding, not causal": shaped(windows=(5, 9), causal=(False, False)),
    "causal": shaped(causal=(True, True)),
    "one feature, one layer, one key head": shaped(layers=1, target_layers=(2,), kv_heads=1),
    "a window shorter than the block": shaped(windows=(3, None), causal=(True, False)),
    "a long block": shaped(block=40, windows=(12, None)),
    "the first tokens only": shaped(speaks=70),
    "an LM head of its own": shaped(own_head=True),
    "an LM head of its own for the first tokens": shaped(speaks=70, own_head=True),
}


def features_of(count: int, config: DFlashConfig, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, len(config.target_layers) * config.hidden)).astype(np.float32) * 2


def both(file: DraftFile, rows: int = 50, wide: bool = False, threads: int = 2) -> tuple[OneBlock, OneBlock]:
    on, config = backend(wide, threads), file.config
    capacity = [rows if window is None else min(window, rows) for window in config.windows]
    native = on.block_draft(config, file.tensors, capacity)
    assert isinstance(native, CpuDraft)
    return OneBlock(native), OneBlock(NumpyDraft(file, on, capacity))


def check_same(native: OneBlock, numpy: OneBlock, root: int, position: int, rows: int, tolerance: float) -> None:
    ours, expected = native.fill(root, position, rows, TOP), numpy.fill(root, position, rows, TOP)
    assert distance(ours.hidden.numpy(), expected.hidden.numpy()) < tolerance
    assert distance(ours.top_logits, expected.top_logits) < tolerance
    assert distance(ours.logsumexp, expected.logsumexp) < tolerance
    assert ours.top_ids is not None
    assert np.array_equal(ours.argmax, ours.top_ids[:, 0])  # type: ignore[arg-type]


def distance(a: np.ndarray | None, b: np.ndarray | None) -> float:
    assert a is not None
    assert b is not None
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_the_engine_s_network_equals_numpy_s(config: DFlashConfig) -> None:
    """Caches that fill up and wrap, rows in pieces of every size, gaps, and blocks that are cut short."""
    native, numpy = both(draft_in_memory(config))
    check_same(native, numpy, 5, 0, config.block - 1, 1e-3)
    position = 0
    for count, gap in ((1, 0), (7, 0), (64, 0), (65, 3), (2, 0), (130, 9), (16, 0)):
        position += gap
        features = features_of(count, config, position)
        for draft in (native, numpy):
            draft.append(HostRows(features), position)
        position += count
        for rows in (config.block - 1, 2):
            check_same(native, numpy, position % 90, position, rows, 1e-3)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("F32", 1e-3), ("F16", 1e-3), ("BF16", 1e-3), ("Q8_0", 0.12), ("Q4_K", 0.12), ("Q5_0", 0.12)],
)
def test_every_weight_type_is_computed(kind: str, tolerance: float) -> None:
    """Quantised weights meet activations of eight bits here, and whole ones in numpy."""
    config = shaped(WIDE, ffn=256, heads=8)
    tensors = {}
    for name, values in random_weights(config).items():
        stored = TYPES[kind if values.ndim == 2 else "F32"]
        rows = values.reshape(-1, values.shape[-1])
        raw = quantize(stored, rows)
        tensors[name] = Tensor(name, stored, values.shape, lambda raw=raw: raw)
    native, numpy = both(DraftFile(config, tensors), wide=True)
    features = features_of(30, config)
    for draft in (native, numpy):
        draft.append(HostRows(features), 0)
    check_same(native, numpy, 5, 30, config.block - 1, tolerance)


def test_threads_change_nothing() -> None:
    config = SHAPES["sliding and full"]
    features = features_of(90, config)
    outputs = []
    for threads in (1, 2, 3):
        native, _ = both(draft_in_memory(config), threads=threads)
        native.append(HostRows(features), 0)
        outputs.append(native.fill(3, 90, config.block - 1, TOP))
    for output in outputs[1:]:
        assert np.array_equal(output.hidden.numpy(), outputs[0].hidden.numpy())
        assert np.array_equal(output.top_logits, outputs[0].top_logits)


def test_a_block_leaves_nothing_behind() -> None:
    config = SHAPES["sliding and full"]
    native, _ = both(draft_in_memory(config))
    features = features_of(40, config)
    native.append(HostRows(features[:20]), 0)
    once = native.fill(3, 20, config.block - 1, TOP)
    again = native.fill(3, 20, config.block - 1, TOP)
    assert np.array_equal(once.hidden.numpy(), again.hidden.numpy())
    native.append(HostRows(features[20:]), 20)
    fresh, _ = both(draft_in_memory(config))
    fresh.append(HostRows(features), 0)
    assert np.array_equal(
        native.fill(3, 40, 4, TOP).hidden.numpy(),  # type: ignore[arg-type]
        fresh.fill(3, 40, 4, TOP).hidden.numpy(),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("count", [0, 10, 49, 50, 51, 130])
def test_snapshots_bring_the_caches_back(count: int) -> None:
    """Before they are full, when they just are, and after they wrapped."""
    config = SHAPES["sliding and full"]
    native, _ = both(draft_in_memory(config))
    if count:
        native.append(HostRows(features_of(count, config)), 0)
    saved = native.snapshot()
    expected = native.fill(3, count, 4, TOP).hidden.numpy()
    native.append(HostRows(features_of(70, config, 1)), count)
    assert not np.array_equal(native.fill(3, count + 70, 4, TOP).hidden.numpy(), expected)  # type: ignore[arg-type]
    native.restore(saved)
    assert np.array_equal(native.fill(3, count, 4, TOP).hidden.numpy(), expected)  # type: ignore[arg-type]
    native.forget()
    empty, _ = both(draft_in_memory(config))
    assert np.array_equal(native.fill(3, 0, 4, TOP).hidden.numpy(), empty.fill(3, 0, 4, TOP).hidden.numpy())  # type: ignore[arg-type]


def test_two_sequences_share_weights_and_nothing_else() -> None:
    """Rows come by turns, and caches wrap while the other's are still empty."""
    config = SHAPES["sliding and full"]
    native, numpy = both(draft_in_memory(config))
    second, expected = OneBlock(native.network), OneBlock(numpy.network)
    for start, count in ((0, 30), (30, 1), (31, 64), (95, 7)):
        for draft in (native, numpy):
            draft.append(HostRows(features_of(count, config, start)), start)
        if start:
            for draft in (second, expected):
                draft.append(HostRows(features_of(count + 3, config, start + 1)), start)
        check_same(native, numpy, 5, start + count, config.block - 1, 1e-3)
        check_same(second, expected, 7, start + count + 3, config.block - 1, 1e-3)
    native.forget()
    check_same(second, expected, 7, 105, config.block - 1, 1e-3)


def test_drafts_of_the_27b_shape_run_in_every_format(tmp_path: Path) -> None:
    """Every width of the released drafts, one layer of them: files of half a billion weights, most of them zero."""
    target = SIZES["27B"]
    config = draft_config(
        target, layers=1, ffn=17408, heads=32, kv_heads=8, head_dim=128, rope_theta=1e7, block=16,
        mask_token=248_070, target_layers=(1, 16, 31, 46, 61), windows=(2048,), causal=(True,),
    )  # fmt: skip
    small = small_config(vocab=48, hidden=target.hidden, layers=1, recurrent=(False,))
    on = CpuBackend(small, random_tensors(small), threads=2)
    features = features_of(20, config)
    outputs = []
    for number, format in enumerate(FORMATS):
        path = write_holes(tmp_path / f"draft{number}", format, config)
        fill_holes(path, 192)
        file = open_draft(path)
        check_fits(file.config, target)
        runnable = dataclasses.replace(file.config, mask_token=7)  # of the target's few tokens
        native = on.block_draft(runnable, file.tensors, [2048])
        assert native is not None
        one = OneBlock(native)
        one.append(HostRows(features), 0)
        outputs.append(one.fill(3, 20, 15, TOP))
        del native, one
    assert outputs[0].hidden is not None
    assert outputs[0].hidden.numpy().std() > 0.1
    assert all(np.array_equal(output.hidden.numpy(), outputs[0].hidden.numpy()) for output in outputs[1:])


def test_the_engine_is_used_where_it_can() -> None:
    assert isinstance(DFlash(draft_in_memory(shaped()), backend()).network, CpuDraft)
    narrow = shaped(head_dim=16)
    assert isinstance(DFlash(draft_in_memory(narrow), backend()).network, NumpyDraft), "kernels work on whole vectors"
