"""A draft on CUDA against the same network in numpy: what its tests on a real and on an emulated GPU share."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np

from draft_cases import OneBlock
from large_cases import SHAPE
from random_drafts import draft_config, random_weights
from warpsmith.backend.base import Backend, Want
from warpsmith.backend.cuda import CudaBackend
from warpsmith.backend.cuda.draft.network import CudaDraft
from warpsmith.backend.reference.dflash import NumpyDraft
from warpsmith.backend.rows import HostRows
from warpsmith.checkpoint.blocks import TYPES
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.dflash import DFlashConfig, DraftFile
from warpsmith.checkpoint.quantize import quantize
from warpsmith.model.config import SIZES

TOP = Want(tokens="top", top=5, hidden=True)
CLOSE = 0.02  # activations are in bf16, and keys and values in fp16


def shaped(**changes: Any) -> DFlashConfig:
    settings = {"ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 128, "target_layers": (0, 2), "block": 7}
    return draft_config(SHAPE, **(settings | changes))


SHAPES = {
    "full": shaped(),
    "sliding and full": shaped(layers=3, windows=(7, None, 20), causal=(True, False, True)),
    "sliding, not causal": shaped(windows=(5, 9), causal=(False, False)),
    "one feature, one layer, one key head": shaped(layers=1, target_layers=(2,), kv_heads=1, block=16),
    "a window shorter than the block": shaped(windows=(3, None), causal=(True, False), block=16),
    "the first tokens only": shaped(layers=1, speaks=192),
    "an LM head of its own": shaped(layers=1, speaks=192, own_head=True),
}


def file_of(config: DFlashConfig, kinds: str = "Q8_0", seed: int = 0) -> DraftFile:
    """Matrices have these types by turns (A/B)."""
    tensors, turns = {}, cycle(kinds.split("/"))
    for name, values in random_weights(config, seed).items():
        stored = TYPES[next(turns) if values.ndim == 2 else "F32"]
        raw = quantize(stored, values.reshape(-1, values.shape[-1]))
        tensors[name] = Tensor(name, stored, values.shape, lambda raw=raw: raw)
    return DraftFile(config, tensors)


def both(
    cuda: CudaBackend, reference: Backend, file: DraftFile, rows: int = 100, held: str | None = "Q8_0"
) -> tuple[OneBlock, OneBlock]:
    capacity = [rows if window is None else min(window, rows) for window in file.config.windows]
    native = CudaDraft(cuda, file.config, file.tensors, capacity, held)
    return OneBlock(native), OneBlock(NumpyDraft(file, reference, capacity))


def features_of(count: int, config: DFlashConfig, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, len(config.target_layers) * config.hidden)).astype(np.float32) * 2
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)  # exact in bf16


def distance(a: np.ndarray | None, b: np.ndarray | None) -> float:
    assert a is not None
    assert b is not None
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def check_same(native: OneBlock, numpy: OneBlock, root: int, position: int, rows: int, bound: float = CLOSE) -> None:
    ours, expected = native.fill(root, position, rows, TOP), numpy.fill(root, position, rows, TOP)
    assert ours.hidden is not None
    assert expected.hidden is not None
    assert distance(ours.hidden.numpy(), expected.hidden.numpy()) < bound
    assert distance(ours.top_logits, expected.top_logits) < bound
    assert distance(ours.logsumexp, expected.logsumexp) < bound
    assert ours.top_ids is not None
    assert np.array_equal(ours.argmax, ours.top_ids[:, 0])  # type: ignore[arg-type]


def check_rings(native: OneBlock, numpy: OneBlock, pieces: list[tuple[int, int]]) -> None:
    """Rings that fill up and wrap, pieces of (rows, tokens left out before them), and blocks that are cut short."""
    config = numpy.network.config  # type: ignore[attr-defined]
    check_same(native, numpy, 5, 0, config.block - 1)
    position = 0
    for count, gap in pieces:
        position += gap
        features = features_of(count, config, position)
        for draft in (native, numpy):
            draft.append(HostRows(features), position)
        position += count
        check_same(native, numpy, position % 90, position, config.block - 1 if count > 1 else 2)


def draft_of_the_27b() -> DFlashConfig:
    c = SIZES["27B"]
    return DFlashConfig(
        "random", 5, c.hidden, 17408, 32, 8, 128, 1e7, 16, 248_070, (1, 16, 31, 46, 61), (None,) * 5, (False,) * 5
    )
