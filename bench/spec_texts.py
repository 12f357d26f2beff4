"""Are texts with drafts plain texts? Every draft and budget, greedy and sampled, on as many prompts as time allows.

PYTHONPATH=src python bench/spec_texts.py PROMPTS.jsonl... [--device cuda] [-n 128] [--seconds 100]
    [--drafts dflash mtp ngram auto] [--budgets 8 22 63 auto] [--temperatures 0 0.8]
    [--record cpu.json | --beside cpu.json]

Prompts are taken from the files in turn, and each goes through every draft and budget before the next one begins. The
table says of how many prompts the tokens were those of plain decoding, and how many a step decided. `--record` keeps
the tokens and steps of every prompt; `--beside` prints those of another device for the same prompts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from warpsmith.backend.base import Backend
from warpsmith.backend.sampling import Sampling
from warpsmith.draft.base import Draft, Proposer
from warpsmith.draft.budget import Budgeted
from warpsmith.draft.cascade import Cascade
from warpsmith.draft.costs import costs_of
from warpsmith.draft.dflash import DFlash
from warpsmith.draft.mtp import MTP
from warpsmith.draft.ngram import NGram
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler
from warpsmith.llm import load

CONTEXT = 2048


@dataclass
class Tally:
    """Of a draft with one budget and one temperature."""

    same: int = 0
    different: list[str] = field(default_factory=list)  # ids of prompts
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # tokens after the first and steps, by prompt

    def rate(self, prompts: Any) -> float:
        tokens, steps = (sum(self.counts[each][i] for each in prompts) for i in (0, 1))
        return tokens / steps if steps else 0.0


def prompts_of(files: list[Path]) -> Iterator[tuple[str, str]]:
    """(id, text), one of each file in turn."""
    read = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return ((each["id"], each["prompt"]) for each in chain.from_iterable(zip_longest(*read)) if each is not None)


def proposer(name: str, budget: str, backend: Backend, drafts: dict[str, Draft]) -> Proposer:
    """Drafts of one kind share their weights."""

    def of(kind: str) -> Draft:
        made = copy(drafts[kind])
        made.nodes = backend.largest_tree - 1 if budget == "auto" else int(budget)
        return made

    if name == "auto":
        own = next(kind for kind in ("dflash", "mtp", "ngram") if kind in drafts)
        if budget != "auto" or own == "ngram":
            name = own
        else:
            costs = costs_of(backend, drafts[own].wants)
            return Cascade([Budgeted(of("ngram"), costs), Budgeted(of(own), costs)])
    draft = of(name)
    return Budgeted(draft, costs_of(backend, draft.wants)) if budget == "auto" else draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="PROMPTS.jsonl")
    parser.add_argument("-m", "--model")
    parser.add_argument("--dflash", type=Path, help="a draft (default: wisp's)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=100.0, help="no prompt begins after so many")
    parser.add_argument("--prompts", type=int, help="at most")
    parser.add_argument("--drafts", nargs="+", default=["dflash", "mtp", "ngram", "auto"])
    parser.add_argument("--budgets", nargs="+", default=["8", "22", "63", "auto"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--beside", type=Path)
    given = parser.parse_args()
    llm = load(given.model, device=given.device, context=CONTEXT)
    backend = llm.backend
    kinds = {"ngram", *given.drafts} | ({"dflash", "mtp"} if "auto" in given.drafts else set())
    drafts: dict[str, Draft] = {"ngram": NGram()}
    if "dflash" in kinds:
        from warpsmith.checkpoint.dflash import open_draft
        from warpsmith.wisp import WISP_DRAFT

        drafts["dflash"] = DFlash(open_draft(given.dflash or WISP_DRAFT), backend)
    if "mtp" in kinds and backend.config.mtp_layers and backend.runs_mtp:
        drafts["mtp"] = MTP(backend)
    named = [(d, b) for d in given.drafts for b in given.budgets if d in drafts or d == "auto"]
    plain = Scheduler(backend, CONTEXT)
    schedulers = {each: Scheduler(backend, CONTEXT, proposer(*each, backend, drafts)) for each in named}
    tallies = {(*each, t): Tally() for each in named for t in given.temperatures}
    texts = 0

    def text(scheduler: Scheduler, ids: list[int], temperature: float) -> tuple[list[int], Generation]:
        sampling = Sampling(temperature=temperature, top_k=20, top_p=0.95, seed=7)
        generation = Generation(scheduler, ids, sampling, max_tokens=given.n)
        return [token for piece in generation for token in piece], generation

    began = time.perf_counter()
    for number, (name, prompt) in enumerate(prompts_of(given.files)):
        if time.perf_counter() - began > given.seconds or number == given.prompts:
            break
        ids = llm.tokenizer.encode(prompt)[-(CONTEXT - given.n - 1) :]
        for temperature in given.temperatures:
            expected, _ = text(plain, ids, temperature)
            for each, scheduler in schedulers.items():
                got, generation = text(scheduler, ids, temperature)
                tally = tallies[*each, temperature]
                tally.same += got == expected
                if got != expected:
                    tally.different.append(name)
                tally.counts[name] = (generation.stats.generated_tokens - 1, generation.stats.steps)
        texts = number + 1
    seconds = time.perf_counter() - began
    other = json.loads(given.beside.read_text()) if given.beside else {}
    print(f"{texts} prompts x {given.n} tokens in {seconds:.0f} s on {backend.name}")
    print("| draft | budget | temperature | same text | tokens a step | the other device's, of as many prompts |")
    print("|---|---|---|---|---|---|")
    for (draft, budget, temperature), tally in tallies.items():
        beside = "-"
        if known := other.get(f"{draft} {budget} {temperature}"):
            both = [each for each in tally.counts if each in known]
            theirs = Tally(counts={each: tuple(known[each]) for each in both})
            beside = f"{tally.rate(both):.3f} here, {theirs.rate(both):.3f} there, {len(both)}"
        print(
            f"| {draft} | {budget} | {temperature} | {tally.same} of {len(tally.counts)} "
            f"| {tally.rate(tally.counts):.3f} | {beside} |"
        )
    wrong = {key: tally.different for key, tally in tallies.items() if tally.different}
    for key, names in wrong.items():
        print(*key, "differs on", *names[:8])
    if given.record:
        given.record.write_text(json.dumps({" ".join(map(str, key)): tally.counts for key, tally in tallies.items()}))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
