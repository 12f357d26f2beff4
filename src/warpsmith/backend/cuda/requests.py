"""What a launch of either forward pass is told."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from warpsmith.backend.base import State, Want
from warpsmith.backend.cuda.structures import Draw
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


@dataclass(frozen=True)
class Asked:
    """Of a launch, besides its nodes and what is wanted of them."""

    steps: int = 0  # tokens to decode
    stop: Sequence[int] = ()  # ids that end that
    draw: Draw | None = None  # how they are drawn
    row: int = 0  # of all that is computed together, where the first node's outputs go
    after: int = 0  # tokens of a commit that is queued already: it begins with what the state will be


ONE_PASS = Asked()


def fill_request(request: Any, state: State, tree: Tree | TreeOnDevice, want: Want, asked: Asked) -> None:
    """What a request of either forward pass says."""
    request.nodes, request.length, request.steps = len(tree), state.length + asked.after, asked.steps
    request.stops, request.features, request.want_hidden = len(asked.stop), len(want.features), want.hidden
    request.want_logits = want.tokens in ("top", "logits")
    if isinstance(tree, TreeOnDevice):
        request.made = tree.pointer
    else:
        request.tokens[: len(tree)] = tree.tokens.tolist()
        request.parents[: len(tree)] = tree.parents.tolist()
    request.stop_ids[: len(asked.stop)] = list(asked.stop)
    request.feature_layers[: len(want.features)] = list(want.features)
