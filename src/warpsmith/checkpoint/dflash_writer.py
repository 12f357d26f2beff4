"""DFlash drafts as GGUF files, in llama.cpp's dialect."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from warpsmith.checkpoint.blocks import BlockType
from warpsmith.checkpoint.convert import converted, recipe_metadata, target_type, tensor_type, write_pieces
from warpsmith.checkpoint.dflash import GGUF_LAYER, HEAD, LLAMA_CPP, DFlashConfig, DraftFile, expected_shapes
from warpsmith.checkpoint.gguf_writer import Typed


def to_gguf_name(name: str) -> str:
    """The name of z-lab's tensor in llama.cpp's dialect."""
    stem = name.removesuffix(".weight")
    if stem.startswith("layers."):
        _, layer, rest = stem.split(".", 2)
        return f"blk.{layer}.{next(ours for ours, theirs in GGUF_LAYER.items() if theirs == rest)}.weight"
    return {"hidden_norm": "enc.output_norm", "norm": "output_norm"}.get(stem, stem) + ".weight"


def to_gguf_metadata(config: DFlashConfig) -> dict[str, Any]:
    """What a file says of a draft's shape."""
    c = config
    values: dict[str, Any] = {
        "embedding_length": c.hidden,
        "block_count": c.layers,
        "feed_forward_length": c.ffn,
        "attention.head_count": c.heads,
        "attention.head_count_kv": c.kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "attention.layer_norm_rms_epsilon": c.eps,
        "rope.freq_base": c.rope_theta,
        "block_size": c.block,
        "target_layers": [layer + 1 for layer in c.target_layers],  # each the one that reads the feature
    }
    slides = [window is not None for window in c.windows]
    if any(slides):
        values["attention.sliding_window"] = next(window for window in c.windows if window is not None)
        values["attention.sliding_window_pattern"] = Typed("bool", slides)
    if list(c.causal) != slides:  # which is what readers take where nothing is said
        values["attention.causal"] = c.causal[0]
    if c.vocab is not None:
        values["vocab_size"] = c.vocab
    if c.speaks is not None:
        values["draft_vocab_size"] = c.speaks
    stored = {f"{LLAMA_CPP}.{key}": value for key, value in values.items()}
    return {"general.architecture": LLAMA_CPP, **stored, "tokenizer.ggml.mask_token_id": c.mask_token}


def planned(config: DFlashConfig, recipe: str) -> list[tuple[str, BlockType, tuple[int, ...]]]:
    """Name, type and shape of every tensor of a file that a recipe makes."""
    shapes = {to_gguf_name(name): shape for name, shape in expected_shapes(config).items()}
    return [
        (name, tensor_type(recipe, name, shape, config.layers, tied=False), shape) for name, shape in shapes.items()
    ]


def planned_bytes(config: DFlashConfig, recipe: str) -> int:
    return sum(math.prod(shape) // kind.elems * kind.bytes for _, kind, shape in planned(config, recipe))


def write_draft(
    file: DraftFile,
    path: str | Path,
    recipe: str | None = None,
    progress: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write a draft as GGUF; without a recipe every tensor keeps its type. `progress` hears of bytes read."""
    types = {} if recipe is None else {name: kind for name, kind, _ in planned(file.config, recipe)}
    pieces = []
    for name, tensor in file.tensors.items():
        stored = to_gguf_name(name)
        kind = types.get(stored, tensor.type)
        if name != HEAD:  # a copy of its target's, of whom there may be no other file; no draft changes a text
            kind = target_type(tensor, kind, file.config.source)
        pieces.append((stored, kind, tensor.shape, converted(tensor, kind, progress)))
    metadata = {**file.general, **to_gguf_metadata(file.config)} | (recipe_metadata(recipe) if recipe else {})
    write_pieces(path, metadata, pieces)
