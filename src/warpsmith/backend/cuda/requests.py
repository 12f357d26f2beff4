"""What a launch of either forward pass is told."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeVar

from warpsmith.backend.base import Want
from warpsmith.backend.cuda.tree import TreeOnDevice
from warpsmith.backend.tree import Tree
from warpsmith.model.config import Config

ParamsOf = TypeVar("ParamsOf", bound=ctypes.Structure)


def at_row(params: ParamsOf, row: int, config: Config, want: Want) -> ParamsOf:
    """A kernel's arguments with its outputs from so many rows on."""
    if not row:
        return params
    moved = type(params).from_buffer_copy(params)
    sizes = {"tokens": 1, "logits": config.vocab, "hidden": config.hidden}
    sizes["features"] = config.hidden * len(want.features)
    for name, size in sizes.items():
        setattr(moved, f"out_{name}", getattr(moved, f"out_{name}") + 4 * row * size)
    return moved


def fill_request(request: Any, tree: Tree | TreeOnDevice, stop: Sequence[int], want: Want) -> None:
    """The arrays of a request of either forward pass."""
    if isinstance(tree, TreeOnDevice):
        request.made = tree.pointer
    else:
        request.tokens[: len(tree)] = tree.tokens.tolist()
        request.parents[: len(tree)] = tree.parents.tolist()
    request.stop_ids[: len(stop)] = list(stop)
    request.feature_layers[: len(want.features)] = list(want.features)
