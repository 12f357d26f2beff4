"""Speculation against plain decoding on the same prompts: speed, acceptance, and that the text is the same.

Only decoding is timed: tokens after the first, over the seconds from the first to the last. Each prompt is run
plainly and then with every budget, one after the other, so that a machine that gets slower does so for all.

On random weights a draft is never right. There its acceptance can be assumed: the draft runs at its real cost, and the
tree that is verified is made of the text that plain decoding wrote, with misses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

from warpsmith.draft.base import Draft, Proposer
from warpsmith.engine.stats import Stats
from warpsmith.llm import LLM, Completion
from warpsmith.measure.assumed import Assumed

Budget = int | Literal["auto"]


@dataclass
class Comparison:
    """A draft with one budget on one set of prompts."""

    prompts: str
    draft: str
    budget: Budget
    plain: list[Stats] = field(default_factory=list)
    drafted: list[Stats] = field(default_factory=list)
    same: int = 0  # prompts whose tokens were the same
    tree_seconds: float = 0.0  # of the drafts' time: making trees of beliefs
    assumed: float | None = None  # tokens a step that drafts were made to reach

    @property
    def plain_rate(self) -> float:
        """Tokens a second, the median over the prompts."""
        return _median([s.decode_rate for s in self.plain])

    @property
    def drafted_rate(self) -> float:
        return _median([s.decode_rate for s in self.drafted])

    @property
    def speedup(self) -> float:
        """The median over the prompts of how much faster each was."""
        return _median([d.decode_rate / p.decode_rate for d, p in self._pairs()])

    @property
    def acceptance_length(self) -> float:
        """Tokens decided a step, over all prompts."""
        steps = sum(s.steps for s in self.drafted)
        return sum(s.generated_tokens - 1 for s in self.drafted) / steps if steps else 0.0

    @property
    def step_milliseconds(self) -> dict[str, float]:
        """Where the time of a step goes, the mean over all steps."""
        steps = sum(s.steps for s in self.drafted)
        spent = {
            "draft": sum(s.draft_seconds for s in self.drafted) - self.tree_seconds,
            "tree": self.tree_seconds,
            "forward": sum(s.forward_seconds for s in self.drafted),
            "commit": sum(s.commit_seconds for s in self.drafted),
            "host": sum(s.verify_seconds - s.forward_seconds for s in self.drafted),
        }
        return {name: 1e3 * seconds / steps if steps else 0.0 for name, seconds in spent.items()}

    def _pairs(self) -> list[tuple[Stats, Stats]]:
        pairs = zip(self.drafted, self.plain, strict=True)
        return [(d, p) for d, p in pairs if p.decode_rate and d.decode_rate]  # an answer of one token has no rate

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompts": self.prompts,
            "samples": len(self.plain),
            "draft": self.draft,
            "budget": self.budget,
            "plain_ts": self.plain_rate,
            "spec_ts": self.drafted_rate,
            "acceptance_length": self.acceptance_length,
            "assumed_acceptance_length": self.assumed,
            "step_ms": self.step_milliseconds,
            "speedup": self.speedup,
            "same": self.same,
            "plain_stats": [s.to_dict() for s in self.plain],
            "spec_stats": [s.to_dict() for s in self.drafted],
        }


def compare(
    llm: LLM,
    sets: Mapping[str, Sequence[Any]],
    proposers: Mapping[Budget, Proposer],
    options: dict[str, Any],
    progress: Callable[[str], object] = lambda line: None,
    assume: float | None = None,
) -> list[Comparison]:
    """Run every prompt of every set plainly and with each proposer, by the budget it stands for. With `assume`, drafts
    are made to be right so often that a step decides that many tokens in the mean."""
    vocab = llm.backend.config.vocab
    if assume is not None:
        drafts = {budget: p for budget, p in proposers.items() if isinstance(p, Draft)}  # all, of fixed budgets
        proposers = {budget: Assumed(draft, assume, vocab) for budget, draft in drafts.items()}
    plain = LLM(llm.backend, llm.checkpoint, llm.context)
    drafting = {budget: LLM(llm.backend, llm.checkpoint, llm.context, p) for budget, p in proposers.items()}
    comparisons: list[Comparison] = []
    for name, prompts in sets.items():
        # what the first run in a process pays for is nobody's fault
        for model in (plain, *drafting.values()):
            model.generate(prompts[0], **(options | {"max_tokens": 4}))
        results = {b: Comparison(name, p.name, b, assumed=assume) for b, p in proposers.items()}
        for number, prompt in enumerate(prompts, start=1):
            progress(f"{name} {number} of {len(prompts)} ...")
            expected = plain.generate(prompt, **options)
            for budget, model in drafting.items():
                proposer, result = proposers[budget], results[budget]
                if isinstance(proposer, Assumed):
                    proposer.expect(expected.stats.prompt_tokens, expected.token_ids)
                before = proposer.tree_seconds()
                _add(result, expected, model.generate(prompt, **options))
                result.tree_seconds += proposer.tree_seconds() - before
        comparisons += results.values()
    return comparisons


def _add(result: Comparison, expected: Completion, answer: Completion) -> None:
    result.plain.append(expected.stats)
    result.drafted.append(answer.stats)
    result.same += answer.token_ids == expected.token_ids


def comparison_table(comparisons: Sequence[Comparison]) -> str:
    """Markdown. AL is tokens a step; draft to host are milliseconds a step."""
    parts = ["draft", "tree", "forward", "commit", "host"]
    header = ["prompts", "n", "draft", "budget", "plain t/s", "spec t/s", "AL", *(f"{p} ms" for p in parts)]
    header += ["speedup", "same text"]
    rows = [
        [
            Path(c.prompts).name,
            str(len(c.plain)),
            c.draft,
            str(c.budget),
            f"{c.plain_rate:.2f}",
            f"{c.drafted_rate:.2f}",
            f"{c.acceptance_length:.2f}" + (" (assumed)" if c.assumed is not None else ""),
            *(f"{c.step_milliseconds[part]:.3f}" for part in parts),
            f"{c.speedup:.2f}x",
            f"{c.same} of {len(c.plain)}",
        ]
        for c in comparisons
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def _median(values: list[float]) -> float:
    return median(values) if values else 0.0
