"""What a call of the engine is asked for, and where it writes that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from warpsmith.backend.base import Output, Want
from warpsmith.backend.cpu import _cpu
from warpsmith.backend.rows import HostRows, Rows
from warpsmith.model.config import Config

_WIDE = ("features", "hidden")  # of an output: a row for each token that was run
_TOKENS = {"none": 0, "argmax": 1, "top": 2, "logits": 3}


def output_for(config: Config, want: Want, rows: int, token_rows: int) -> Output:
    """Room for what is wanted: `rows` of features and hidden, `token_rows` of everything else."""
    output = Output()
    if want.tokens != "none":
        output.argmax = np.empty(token_rows, np.int32)
    if want.tokens == "top":
        output.top_ids = np.empty((token_rows, want.top), np.int32)
        output.top_logits = np.empty((token_rows, want.top), np.float32)
        output.logsumexp = np.empty(token_rows, np.float32)
    if want.tokens == "logits":
        output.logits = HostRows(np.empty((token_rows, config.vocab), np.float32))
    if want.features:
        output.features = HostRows(np.empty((rows, len(want.features) * config.hidden), np.float32))
    if want.hidden:
        output.hidden = HostRows(np.empty((rows, config.hidden), np.float32))
    return output


def token_rows_of(want: Want, start: int, end: int, length: int) -> tuple[Sequence[int], slice]:
    """Of a chain's piece: the rows whose tokens are wanted, and where they go."""
    if want.every_row:
        return range(end - start), slice(start, end)
    return ([end - start - 1], slice(0, 1)) if end == length else ([], slice(0, 0))


def native_want(want: Want, output: Output, token_rows: Sequence[int], tokens: slice, rows: slice) -> _cpu.Want:
    """One call's share of `output`: `tokens` are those of the call's `token_rows`, features are of all its rows."""
    share = {
        name: (value.numpy() if isinstance(value, Rows) else value)[rows if name in _WIDE else tokens]
        for name, value in vars(output).items()
        if value is not None
    }
    layers = list(want.features)
    return _cpu.Want(tokens=_TOKENS[want.tokens], top=want.top, rows=list(token_rows), layers=layers, **share)


def own_part(output: Output, rows: slice, tokens: slice) -> Output:
    """One sequence's part of an output of several, copied: who keeps it does not keep what the others' take."""
    own: dict[str, Any] = {}
    for name, value in vars(output).items():
        if value is not None:
            part = value[rows if name in _WIDE else tokens]
            own[name] = HostRows(part.numpy().copy()) if isinstance(part, Rows) else part
    return Output(**own)
