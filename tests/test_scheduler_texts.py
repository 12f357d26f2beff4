"""Many requests at a time: each has the text, and the logits, that it has alone."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warpsmith
from engine_cases import BACKEND, SAMPLED, Resting, Scripted, backend_of, guessing, prompt_of, tokens_of
from test_constraints_in_the_loop import Parity
from warpsmith.backend.base import Backend
from warpsmith.backend.sampling import Sampling
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Context, Proposer
from warpsmith.draft.ngram import NGram
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler

FOR_EVER = 1e9  # seconds


@dataclass
class Asked:
    """A request as a test draws it, and what it gets."""

    prompt: list[int]
    sampling: Sampling
    count: int
    arrives: int  # before which step
    leaves: int | None  # likewise, if it does
    constrained: bool = False
    watched: bool = False
    kept: int | None = None
    rows: list[bytes] = field(default_factory=list)

    def on(self, scheduler: Scheduler) -> Generation:
        self.rows = []
        return Generation(
            scheduler,
            self.prompt,
            self.sampling,
            max_tokens=self.count,
            kept=self.kept,
            constraint=Parity() if self.constrained else None,
            on_logits=(lambda row, token: self.rows.append(row.tobytes())) if self.watched else None,
        )


@st.composite
def requests(draw: st.DrawFn) -> list[Asked]:
    """Some of them begin alike, so that the prefix cache has work too."""
    shared = prompt_of(150, draw(st.integers(0, 3)))
    made = []
    for number in range(draw(st.integers(1, 7))):
        own = prompt_of(draw(st.integers(1, 60)), draw(st.integers(0, 5)))
        sampling = draw(st.sampled_from([Sampling(), Sampling(), SAMPLED, Sampling(temperature=1.0, seed=number)]))
        leaves = draw(st.none() | st.integers(0, 20))
        asked = Asked(shared[: draw(st.integers(0, 150))] + own, sampling, draw(st.integers(1, 12)), 0, leaves)
        asked.arrives = draw(st.integers(0, 15))
        asked.constrained, asked.watched = draw(st.booleans()), draw(st.booleans())
        asked.kept = draw(st.none() | st.integers(0, len(asked.prompt)))
        made.append(asked)
    return made


def serve(scheduler: Scheduler, asked: list[Asked]) -> list[list[int]]:
    """Requests come and go as they were drawn; returns what each has got."""
    texts: list[list[int]] = [[] for _ in asked]
    open_: dict[int, Generation] = {}
    step = 0
    while open_ or any(each.arrives >= step for each in asked):
        for number, each in enumerate(asked):
            if each.arrives == step:
                open_[number] = each.on(scheduler)
                scheduler.add(open_[number])
            if each.leaves is not None and each.arrives + each.leaves == step and number in open_:
                scheduler.cancel(open_.pop(number))
        scheduler.step()
        assert len(scheduler.running) + len(scheduler.prefilling) <= scheduler.parallel
        for number, generation in list(open_.items()):
            assert generation.error is None
            while generation.runs:
                texts[number] += generation.runs.popleft()
            if generation.finish_reason is not None:
                del open_[number]
        step += 1
    assert len(scheduler._states) == scheduler.parallel, "every state is given back"
    return texts


def check(backend: Backend, proposer: Proposer | None, asked: list[Asked], parallel: int, cache: int) -> None:
    alone = [tokens_of(each.on(Scheduler(backend, 256))) for each in asked]
    rows = [each.rows for each in asked]
    together = serve(Scheduler(backend, 256, proposer, parallel, cache), asked)
    for each, text, own, shown in zip(asked, together, alone, rows, strict=True):
        assert text == (own if each.leaves is None else own[: len(text)])
        assert each.rows == shown[: len(each.rows)], "and the same logits, to the bit"


def drafts(kind: str, asked: list[Asked]) -> Proposer | None:
    if kind == "plain":
        return None
    if kind == "ngram":
        return NGram(12)

    def rule(context: Context) -> Any:
        return guessing([], 0.0, 1 + len(context.ids) % MAX_NODES, len(context.ids))(context)

    return Resting(rule, seed=len(asked)) if kind == "resting" else Scripted(rule)


@settings(max_examples=40, deadline=None)
@given(
    requests(),
    st.integers(1, 5),
    st.sampled_from(["plain", "ngram", "scripted", "resting"]),
    st.sampled_from([0, 200_000, 1 << 30]),
    st.sampled_from([0.0, 0.0003, FOR_EVER]),
)
def test_every_text_is_its_text_alone(asked: list[Asked], parallel: int, draft: str, cache: int, unseen: float) -> None:
    """However many tokens are decoded in one call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warpsmith.engine.scheduler.UNSEEN_SECONDS", unseen)
        check(backend_of("cpu"), drafts(draft, asked), asked, parallel, cache)


@settings(max_examples=10, deadline=None)
@given(requests(), st.integers(1, 4), st.sampled_from(["plain", "scripted"]))
def test_so_it_is_on_the_reference(asked: list[Asked], parallel: int, draft: str) -> None:
    check(BACKEND, drafts(draft, asked), asked, parallel, 1 << 30)


def test_so_it_is_with_wisp_and_its_own_drafts() -> None:
    """Guesses that come true: code that repeats itself."""
    llm = warpsmith.load(context=512, draft="auto", parallel=4)
    texts = [
        "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
        "import os\nimport sys\n" * 6,
        "x = [1, 2, 3]\n" * 5,
    ]
    asked = [
        Asked(llm.tokenizer.encode(text), sampling, 40, arrives, None)
        for arrives, text in enumerate(texts)
        for sampling in (Sampling(), Sampling(temperature=0.7, seed=3))
    ]
    alone = [tokens_of(each.on(Scheduler(llm.backend, 512))) for each in asked]
    assert serve(llm.scheduler, asked) == alone
