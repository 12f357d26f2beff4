"""What callers pass, checked before it is used: wrong kinds of things are refused by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from warpsmith.errors import BadRequest


def whole_number(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise BadRequest(f"{name} must be a whole number, not {value!r}.", "Leave it out for its default.")
    return int(value)


def stop_strings(stop: Any) -> tuple[str, ...]:
    """One string, a list of them, or None for none."""
    if stop is None:
        return ()
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) for each in stops):
        raise BadRequest(f"stop must be a string or a list of strings, not {stop!r}.", "Token ids go to stop_ids.")
    return tuple(stops)


def stop_tokens(stop_ids: Any) -> frozenset[int]:
    if isinstance(stop_ids, str) or not isinstance(stop_ids, Iterable):
        raise BadRequest(f"stop_ids must be a list of token ids, not {stop_ids!r}.", "Strings go to stop.")
    return frozenset(whole_number("a stop id", each) for each in stop_ids)


def biases(logit_bias: Any) -> dict[int, float]:
    if logit_bias is not None and not isinstance(logit_bias, Mapping):
        raise BadRequest(f"logit_bias must map token ids to numbers, not be {logit_bias!r}.", "Pass {id: number}.")
    return dict(logit_bias or {})
