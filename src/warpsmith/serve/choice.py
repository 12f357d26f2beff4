"""One answer on its way: events of the engine in, parts for the client out, and all that is counted about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from warpsmith.engine.stats import Stats
from warpsmith.model.tokenizer import Tokenizer
from warpsmith.serve.answer import AnswerParser, CallArguments, CallStart, Content, Part, Reasoning
from warpsmith.serve.job import End, Event, Logprob, Run
from warpsmith.serve.reasoning import CLOSE, OPEN


@dataclass
class Call:
    name: str
    arguments: str = ""

    def input(self) -> dict[str, Any]:
        """The arguments as an object; none of them if the call broke off before they were complete."""
        try:
            value = json.loads(self.arguments or "{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}


@dataclass
class Choice:
    """Text, thoughts and calls so far. `feed` returns what an event adds to them."""

    tokenizer: Tokenizer
    thinking: bool
    tools: Mapping[str, Any] | None = None
    raw: bool = False  # the text as it is, thoughts and calls unparsed
    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reasoning_tokens: int = 0
    end: End | None = None

    def __post_init__(self) -> None:
        self._parser = None if self.raw else AnswerParser(self.thinking, self.tools)
        self._marks = self.tokenizer.token_id(OPEN), self.tokenizer.token_id(CLOSE)

    def feed(self, event: Event) -> list[Part]:
        parts: list[Part] = []
        if isinstance(event, Run):
            self.logprobs += event.logprobs
            self._count(event.tokens)
        if event.text:
            parts += self._parser.push(event.text) if self._parser else [Content(event.text)]
        if isinstance(event, End):
            self.end = event
            parts += self._parser.finish() if self._parser else []
        for part in parts:
            self._add(part)
        return parts

    @property
    def stats(self) -> Stats:
        assert self.end is not None
        return self.end.stats

    @property
    def finish_reason(self) -> str:
        """As OpenAI calls it."""
        assert self.end is not None
        return "tool_calls" if self.calls and self.end.reason == "stop" else self.end.reason

    def _add(self, part: Part) -> None:
        if isinstance(part, Reasoning):
            self.reasoning += part.text
        elif isinstance(part, Content):
            self.content += part.text
        elif isinstance(part, CallStart):
            self.calls.append(Call(part.name))
        elif isinstance(part, CallArguments):
            self.calls[part.index].arguments += part.text

    def _count(self, tokens: Sequence[int]) -> None:
        """Tokens within a block of thoughts, the marks of it included."""
        if self.raw:
            return
        opens, closes = self._marks
        for token in tokens:
            self.thinking = self.thinking or token == opens
            self.reasoning_tokens += self.thinking
            if token == closes:
                self.thinking = False


def usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """OpenAI's account. The prompt of several choices is one prompt."""
    prompt = choices[0].stats.prompt_tokens
    completion = sum(choice.stats.generated_tokens for choice in choices)
    accepted = sum(choice.stats.accepted_tokens for choice in choices)
    drafted = sum(choice.stats.drafted_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": choices[0].stats.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def timings(stats: Stats) -> dict[str, Any]:
    """llama.cpp's account of one answer, and how it was made."""
    computed = stats.prompt_tokens - stats.cached_tokens
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": stats.prefill_seconds * 1e3,
        "prompt_per_second": stats.prefill_rate,
        "predicted_n": stats.generated_tokens,
        "predicted_ms": stats.decode_seconds * 1e3,
        "predicted_per_second": stats.decode_rate,
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        "mode": stats.mode,
        "speculation_off": stats.speculation_off,
        "left_out": stats.left_out,
        "acceptance_length": stats.acceptance_length,
        "seed": stats.seed,
    }
