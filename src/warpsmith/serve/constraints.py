"""What an answer may look like: grammars through llguidance, and thoughts that end when their budget does.

A constraint masks logits on the host (`engine.loop.Constraint`). Every token is decided in order, drafted or not, so
speculation changes nothing about it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from warpsmith.engine.choice import Constraint
from warpsmith.errors import BadRequest
from warpsmith.model.tokenizer import Tokenizer
from warpsmith.serve.reasoning import CLOSE

MAX_GRAMMAR = 256 << 10  # characters
WHITESPACE = r"[ \n]{0,16}"  # between the words of JSON: indented as one likes, but not for ever


class Grammars:
    """Grammars over one model's vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab

    def json_schema(self, schema: dict[str, Any] | None, name: str) -> Grammar:
        """JSON that fits the schema; any object without one. `name` is the parameter it came in."""
        from llguidance import LLMatcher

        text = json.dumps({"type": "object"} if schema is None else schema)
        self._check_size(text, name)
        return self._checked(LLMatcher.grammar_from_json_schema(text, {"whitespace_pattern": WHITESPACE}), name)

    def regex(self, regex: str, name: str) -> Grammar:
        from llguidance import LLMatcher

        self._check_size(regex, name)
        return self._checked(LLMatcher.grammar_from_regex(regex), name)

    def text(self, grammar: str, name: str) -> Grammar:
        """Lark, or GBNF as llama.cpp has it."""
        from llguidance import LLMatcher, grammar_from

        self._check_size(grammar, name)
        try:
            compiled = grammar_from("gbnf", grammar) if "::=" in grammar else LLMatcher.grammar_from_lark(grammar)
        except Exception as error:  # of the converter from GBNF, which raises what it likes
            raise BadRequest(f"{name} is no GBNF grammar ({_line(error)}).", "Correct it.") from None
        return self._checked(compiled, name)

    def _check_size(self, text: str, name: str) -> None:
        if len(text) > MAX_GRAMMAR:
            raise BadRequest(f"{name} has {len(text)} characters.", f"Keep it under {MAX_GRAMMAR}.")

    def _checked(self, grammar: str, name: str) -> Grammar:
        from llguidance import LLMatcher

        tokenizer = _llguidance_tokenizer(self._tokenizer, self._vocab)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise BadRequest(f"{name} cannot be used ({_line(matcher.get_error())}).", "Change it.")
        return Grammar(matcher, sorted(self._tokenizer.eos_ids), self._vocab)


@dataclass(frozen=True)
class Grammar:
    """A grammar that is known to be good. Calling it makes a constraint for one request."""

    matcher: Any
    ends: list[int]
    vocab: int

    def __call__(self) -> Constraint:
        return _Matched(self.matcher.deep_copy(), self.ends, self.vocab)


class _Matched:
    def __init__(self, matcher: Any, ends: list[int], vocab: int) -> None:
        self._matcher, self._ends, self._vocab = matcher, ends, vocab

    def allow(self, logits: np.ndarray) -> np.ndarray:
        allowed = np.full_like(logits, -np.inf)
        if self._matcher.is_stopped():
            if self._matcher.is_error():
                raise BadRequest(f"The grammar cannot go on ({_line(self._matcher.get_error())}).", "Simplify it.")
            allowed[self._ends] = logits[self._ends]
            return allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, bitorder="little")[: self._vocab].astype(bool)
        if not mask.any():
            raise BadRequest(f"The grammar cannot go on ({_line(self._matcher.get_error())}).", "Simplify it.")
        np.copyto(allowed[: len(mask)], logits[: len(mask)], where=mask)
        return allowed

    def took(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


@dataclass(frozen=True)
class Thoughts:
    """How a block of thoughts that the prompt opened goes on: at most `budget` tokens of it, then `then`."""

    ends: Sequence[int]  # end tokens: forbidden before an answer that has to fit something
    mark: int  # </think>
    closing: Sequence[int]  # what is said when the budget is spent, the mark among it
    gap: Sequence[int]  # what follows the mark
    budget: int | None = None
    then: Callable[[], Constraint] | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, budget: int | None, then: Callable[[], Constraint] | None) -> Thoughts:
        mark = tokenizer.token_id(CLOSE)
        if mark is None:
            raise BadRequest(
                "This model's vocabulary has no </think>, so thoughts cannot be limited.", "Turn them off."
            )
        closing = tokenizer.encode(f"\n{CLOSE}\n\n")
        return cls(sorted(tokenizer.eos_ids), mark, closing, tokenizer.encode("\n\n"), budget, then)

    def __call__(self) -> Constraint:
        return _Thinking(self)


class _Thinking:
    def __init__(self, plan: Thoughts) -> None:
        self._plan = plan
        self._left = plan.budget
        self._forced: list[int] = []  # comes next, in this order
        self._thinking = True
        self._then = plan.then() if plan.then else None
        self._spend()

    def allow(self, logits: np.ndarray) -> np.ndarray:
        if self._forced:
            allowed = np.full_like(logits, -np.inf)
            allowed[self._forced[0]] = 0
            return allowed
        if self._then is None:
            return logits
        if not self._thinking:
            return self._then.allow(logits)
        allowed = logits.copy()
        allowed[list(self._plan.ends)] = -np.inf
        return allowed

    def took(self, token: int) -> None:
        if self._forced:
            self._forced.pop(0)
            self._thinking = self._thinking and token != self._plan.mark
        elif not self._thinking:
            if self._then is not None:
                self._then.took(token)
        elif token == self._plan.mark:
            self._thinking = False
            self._forced = list(self._plan.gap) if self._then is not None else []
        else:
            self._left = None if self._left is None else self._left - 1
            self._spend()

    def _spend(self) -> None:
        if self._left is not None and self._left <= 0:
            self._forced = list(self._plan.closing)


@lru_cache(maxsize=1)
def _llguidance_tokenizer(tokenizer: Tokenizer, vocab: int) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    class Source:
        """What llguidance asks of a tokenizer."""

        eos_token_id = tokenizer.eos_id
        bos_token_id = None
        tokens = [tokenizer.token_bytes(id) for id in range(vocab)]  # noqa: RUF012
        special_token_ids = sorted(id for id in range(tokenizer.vocab_size) if tokenizer.is_added(id))

        def __call__(self, text: bytes) -> list[int]:
            return tokenizer.encode(text.decode("utf-8", "replace"), special=False)

    return LLTokenizer(TokenizerWrapper(Source()), n_vocab=vocab, eos_token=sorted(tokenizer.eos_ids))


def _line(error: object) -> str:
    return " ".join(str(error).split())[:200]
