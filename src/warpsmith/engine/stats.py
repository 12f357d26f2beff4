"""What a completion cost and how it was made. Every completion carries one; nothing here is estimated."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PLAIN = "plain"


@dataclass
class Stats:
    """Counts and seconds of one request.

    A *step* is one forward pass of the decode loop. It decides one token plus as many as the draft got right;
    `histogram[d]` counts the steps in which d drafted tokens were used. The first token comes out of the prefill.
    """

    device: str = ""
    mode: str = PLAIN  # "plain", or the name of the draft
    speculation_off: str | None = None  # why nothing is drafted: at all, or any more by the end
    left_out: list[str] = field(default_factory=list)  # drafts that would have been preferred, each with why not
    seed: int | None = None  # of a sampled completion, so that it can be repeated
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt: taken from an earlier request, not computed again
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0  # from the first token to the last; the consumer's own time is not counted
    steps: int = 0
    drafted_steps: int = 0  # steps in which a draft was verified; the others decided one token each
    drafted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # from the draft to the walk's end
    forward_seconds: float = 0.0  # of these, the forward passes
    commit_seconds: float = 0.0

    def count_step(self, drafted: int, decided: int, times: int = 1) -> None:
        """One forward pass over `drafted` tokens besides the root decided `decided` tokens; so many times."""
        self.steps += times
        self.drafted_steps += times * (drafted > 0)
        self.drafted_tokens += times * drafted
        self.histogram.extend([0] * (decided - len(self.histogram)))
        self.histogram[decided - 1] += times

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that became text."""
        return sum(depth * count for depth, count in enumerate(self.histogram))

    @property
    def acceptance_length(self) -> float:
        """Tokens committed a step, the root included: 1 for plain decoding."""
        return 1 + self.accepted_tokens / self.steps if self.steps else 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens a second, of those that were computed."""
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first."""
        return _rate(self.generated_tokens - 1, self.decode_seconds)

    def to_dict(self) -> dict[str, Any]:
        """Everything, the derived numbers too, ready for JSON."""
        return asdict(self) | {
            "accepted_tokens": self.accepted_tokens,
            "acceptance_length": self.acceptance_length,
            "prefill_tokens_per_second": self.prefill_rate,
            "decode_tokens_per_second": self.decode_rate,
        }

    def summary(self) -> str:
        """One line for people."""
        cached = f", {self.cached_tokens} cached" if self.cached_tokens else ""
        parts = [
            f"prompt {self.prompt_tokens} tokens{cached} ({self.prefill_rate:.1f} tok/s)",
            f"generated {self.generated_tokens} tokens ({self.decode_rate:.1f} tok/s)",
        ]
        if self.mode == PLAIN:
            parts.append(f"plain ({self.speculation_off})" if self.speculation_off else PLAIN)
        else:
            parts.append(f"{self.mode}, {self.acceptance_length:.2f} tokens a step")
            if self.speculation_off:
                parts.append(f"drafted in {self.drafted_steps} of {self.steps} steps: {self.speculation_off}")
        if self.left_out:
            parts.append(f"left out: {', '.join(self.left_out)}")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        if self.device:
            parts.append(self.device)
        return " | ".join(parts)


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if tokens > 0 and seconds > 0 else 0.0
