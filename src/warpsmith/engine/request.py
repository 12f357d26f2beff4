"""What a request can ask for: the one list. The command line makes its flags from it, the API its keywords, and both
what they refuse."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypedDict

from warpsmith.engine.arguments import biases
from warpsmith.errors import BadRequest

if TYPE_CHECKING:  # the command line's help should not wait for numpy
    from warpsmith.backend.sampling import Sampling
    from warpsmith.engine.loop import Step


@dataclass(frozen=True)
class Parameter:
    """A number that says how the next token is chosen."""

    name: str  # the API's keyword, and a field of `Sampling`
    kind: type[int] | type[float]
    default: float | None  # where neither the request nor the model's file says it; None: drawn for each request
    help: str
    low: float = -inf
    high: float = inf
    positive: bool = False
    neutral: str = ""  # which value does nothing, in a sentence
    declared: bool = False  # a model's file may have another default
    short: str | None = None  # llama.cpp's name of the flag, where it is another

    @property
    def flag(self) -> str:
        return "--" + (self.short or self.name).replace("_", "-")

    @property
    def usual(self) -> str:
        """Its default, in words."""
        value = "drawn" if self.default is None else f"{self.default:g}"
        return f"the model's, else {value}" if self.declared else value

    def check(self, value: object) -> None:
        kind = "a whole number" if self.kind is int else "a finite number"
        number = isinstance(value, Integral if self.kind is int else Real) and not isinstance(value, bool)
        if not number or not isfinite(value):  # type: ignore[arg-type]
            raise BadRequest(f"{self.name} must be {kind}, not {value!r}.", "Leave it out for its default.")
        fix = self.neutral or "Leave it out for its default."
        if self.positive and value <= 0:  # type: ignore[operator]
            raise BadRequest(f"{self.name} is {value}, and must be positive.", fix)
        if not self.low <= value <= self.high:  # type: ignore[operator]
            low, high = (f"{bound:g}" if abs(bound) < 1 << 32 else "2**64 - 1" for bound in (self.low, self.high))
            bounds = f"below {low}" if self.high == inf else f"outside [{low}, {high}]"
            raise BadRequest(f"{self.name} is {value}, {bounds}.", fix)


SAMPLING = (
    Parameter("temperature", float, 0.0, "how far to stray from the likeliest token; 0 is greedy",
              short="temp", declared=True),
    Parameter("top_k", int, 20, "keep the N likeliest tokens; 0 is all",
              low=0, neutral="0 turns it off.", declared=True),
    Parameter("top_p", float, 0.95, "keep the likeliest that sum to X",
              low=0, high=1, neutral="1 turns it off.", declared=True),
    Parameter("min_p", float, 0.0, "keep those at least X times as likely as the likeliest",
              low=0, high=1, neutral="0 turns it off.", declared=True),
    Parameter("seed", int, None, "makes sampling repeatable",
              low=0, high=2**64 - 1, neutral="Choose a seed in that range."),
    Parameter("repeat_penalty", float, 1.0, "divide logits of recent tokens; 1 is off",
              positive=True, neutral="1 turns it off."),
    Parameter("presence_penalty", float, 0.0, "subtract from logits of recent tokens"),
    Parameter("frequency_penalty", float, 0.0, "subtract for each recent use"),
    Parameter("repeat_last_n", int, 64, "tokens that count as recent; -1 is all",
              low=-1, neutral="-1 looks at all tokens, 0 turns penalties off."),
)  # fmt: skip


class Options(TypedDict, total=False):
    """The keywords of `LLM.stream` and `LLM.generate`; `LLM.stream` explains them."""

    max_tokens: int | None
    stop: str | Sequence[str] | None
    stop_ids: Iterable[int] | None
    enable_thinking: bool | None
    tools: list[dict[str, Any]] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    repeat_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repeat_last_n: int | None
    logit_bias: Mapping[int, float] | None
    on_step: Callable[[Step], None] | None


def check_options(options: Mapping[str, object]) -> None:
    """Refuse keywords that nobody reads, as Python does."""
    if unknown := [name for name in options if name not in Options.__annotations__]:
        raise TypeError(f"There is no keyword {unknown[0]!r}; there are {', '.join(Options.__annotations__)}.")


def sampling_for(options: Mapping[str, Any], declared: Mapping[str, float]) -> Sampling:
    """How to sample: as the request says, else as the model's file `declared`, else by default."""
    from warpsmith.backend.sampling import Sampling

    given = {p.name: value for p in SAMPLING if (value := options.get(p.name)) is not None}
    values: dict[str, Any] = {p.name: p.default for p in SAMPLING} | dict(declared) | given
    if values["seed"] is None:
        values["seed"] = secrets.randbits(32)
    return Sampling(**values, logit_bias=biases(options.get("logit_bias")))


def check_sampling(sampling: Sampling, vocab: int) -> None:
    """Refuse parameters that have no meaning, by name."""
    from warpsmith.backend.sampling import check_bias

    for parameter in SAMPLING:
        parameter.check(getattr(sampling, parameter.name))
    check_bias(sampling, vocab)
