"""Random DFlash drafts of the released shape: to measure what a draft costs without a download. None is ever right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from warpsmith.checkpoint.convert import write_pieces
from warpsmith.checkpoint.dflash import DFlashConfig
from warpsmith.checkpoint.dflash_writer import planned, planned_bytes, to_gguf_metadata
from warpsmith.model.config import Config
from warpsmith.model.synthetic import counted, weight_bytes

LAYERS, FEATURES = 5, 5
MASK_TOKEN = 248_070  # of the family's vocabulary


def draft_of(target: Config) -> DFlashConfig:
    """Of the shape that drafts for 27B targets were released in, beside a target of any size."""
    last = max(1, target.layers - 3)
    features = sorted({1 + (last - 1) * i // (FEATURES - 1) for i in range(FEATURES)})
    return DFlashConfig(
        source="random", layers=LAYERS, hidden=target.hidden, ffn=target.ffn, heads=32, kv_heads=8, head_dim=128,
        rope_theta=1e7, block=16, mask_token=min(MASK_TOKEN, target.vocab - 1), target_layers=tuple(features),
        windows=(None,) * LAYERS, causal=(False,) * LAYERS, vocab=target.vocab,
    )  # fmt: skip


def synthesize_draft(
    target: Config, path: str | Path, recipe: str = "bf16", seed: int = 0,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:  # fmt: skip
    """Write a random draft for models of this shape as a GGUF file. `progress` hears of bytes made."""
    draft = draft_of(target)
    pieces = [(*tensor, counted(weight_bytes(seed, *tensor), progress)) for tensor in planned(draft, recipe)]
    write_pieces(path, to_gguf_metadata(draft), pieces)


def planned_draft_bytes(target: Config, recipe: str) -> int:
    """How much weight data `synthesize_draft` will write."""
    return planned_bytes(draft_of(target), recipe)
