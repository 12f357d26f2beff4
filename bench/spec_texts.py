"""Are texts with drafts plain texts? Every draft and budget, greedy and sampled, on as many prompts as time allows.

PYTHONPATH=src python bench/spec_texts.py PROMPTS.jsonl... [--device cuda] [-n 128] [--seconds 100] [--jobs 12]
    [--drafts dflash mtp ngram auto] [--budgets 8 22 63 auto] [--temperatures 0 0.8] [--skip 151]
    [--record cpu.json | --beside cpu.json]

Prompts are taken from the files in turn, by one process or several (`--jobs`). Each goes through plain decoding once
for a temperature, then through every draft and budget. `auto` with a number is the model's own draft with that number:
such texts are made once. The table says of how many prompts the tokens were those of plain decoding, and how many a
step decided. `--record` keeps the tokens and steps of every prompt, and whether its text was the same: a run that was
ended early goes on from there, by the same command. `--beside` prints those of another device for the same prompts.
Several processes on one GPU take turns with it, and are no faster than one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, product, zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from warpsmith.backend.sampling import Sampling
from warpsmith.checkpoint.atomic import whole_file
from warpsmith.checkpoint.dflash import open_draft
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
from warpsmith.wisp import WISP_DRAFT

CONTEXT = 2048
OWN = "dflash"  # the draft that comes with wisp, which `auto` prefers

Combination = tuple[str, str]  # draft and budget
Setting = tuple[Combination, float]  # and temperature


class Outcome(NamedTuple):
    """Of one prompt with one draft, budget and temperature."""

    tokens: int  # after the first
    steps: int
    same: bool


@dataclass
class Tally:
    """Of a draft with one budget and one temperature."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)  # by ids of prompts

    def rate(self, prompts: Iterable[str]) -> float:
        tokens, steps = (sum(self.outcomes[each][i] for each in prompts) for i in (0, 1))
        return tokens / steps if steps else 0.0

    @property
    def different(self) -> list[str]:
        return [each for each, outcome in self.outcomes.items() if not outcome.same]


def prompts_of(files: list[Path]) -> Iterator[tuple[str, str]]:
    """(id, text), one of each file in turn."""
    read = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return ((each["id"], each["prompt"]) for each in chain.from_iterable(zip_longest(*read)) if each is not None)


def made_as(draft: str, budget: str) -> Combination:
    return (OWN if draft == "auto" and budget != "auto" else draft), budget


class Worker:
    """A model, and a scheduler for every draft and budget; drafts of one kind share their weights."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.llm = load(given.model, device=given.device, context=CONTEXT, threads=given.threads)
        self.backend = backend = self.llm.backend
        wanted = dict.fromkeys(made_as(*each) for each in product(given.drafts, given.budgets))
        kinds = {kind for kind, _ in wanted} | ({OWN} if ("auto", "auto") in wanted else set())
        self._drafts: dict[str, Draft] = {"ngram": NGram()}
        if "dflash" in kinds:
            self._drafts["dflash"] = DFlash(open_draft(given.dflash), backend)
        if "mtp" in kinds:
            self._drafts["mtp"] = MTP(backend)
        self._plain = Scheduler(backend, CONTEXT, cache_bytes=0)
        self._drafting = {each: Scheduler(backend, CONTEXT, self._proposer(*each), cache_bytes=0) for each in wanted}

    def _proposer(self, kind: str, budget: str) -> Proposer:
        def of(kind: str) -> Draft:
            made = copy(self._drafts[kind])
            made.nodes = self.backend.largest_tree - 1 if budget == "auto" else int(budget)
            return made

        if kind == "auto":
            costs = costs_of(self.backend, self._drafts[OWN].wants)
            return Cascade([Budgeted(of("ngram"), costs), Budgeted(of(OWN), costs)])
        draft = of(kind)
        return Budgeted(draft, costs_of(self.backend, draft.wants)) if budget == "auto" else draft

    def outcomes(self, prompt: str) -> dict[Setting, Outcome]:
        ids = self.llm.tokenizer.encode(prompt)[-(CONTEXT - self.given.n - 1) :]
        found = {}
        for temperature in self.given.temperatures:
            expected, _ = self._text(self._plain, ids, temperature)
            for each, scheduler in self._drafting.items():
                got, stats = self._text(scheduler, ids, temperature)
                found[each, temperature] = Outcome(stats.generated_tokens - 1, stats.steps, got == expected)
        return found

    def _text(self, scheduler: Scheduler, ids: list[int], temperature: float):
        sampling = Sampling(temperature=temperature, top_k=20, top_p=0.95, seed=7)
        generation = Generation(scheduler, ids, sampling, max_tokens=self.given.n)
        return [token for piece in generation for token in piece], generation.stats


def name_of(key: Setting) -> str:
    (draft, budget), temperature = key
    return f"{draft} {budget} {temperature}"


def recorded(path: Path) -> dict[str, Tally]:
    """By names of settings."""
    return {
        name: Tally({prompt: Outcome(*of) for prompt, of in outcomes.items()})
        for name, outcomes in json.loads(path.read_text()).items()
    }


worker: Worker  # of this process


def prepare(given: argparse.Namespace) -> None:
    global worker
    worker = Worker(given)


def outcomes(prompt: str, until: float):
    """Of a prompt, unless it is too late."""
    return worker.outcomes(prompt) if time.monotonic() < until else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="PROMPTS.jsonl")
    parser.add_argument("-m", "--model")
    parser.add_argument("--dflash", type=Path, default=WISP_DRAFT, help="a draft (default: wisp's)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--threads", type=int, help="of each process on the cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=100.0, help="no prompt begins after so many")
    parser.add_argument("--prompts", type=int, help="at most")
    parser.add_argument("--skip", type=int, default=0, help="so many prompts, which were done before")
    parser.add_argument("--drafts", nargs="+", default=["dflash", "mtp", "ngram", "auto"])
    parser.add_argument("--budgets", nargs="+", default=["8", "22", "63", "auto"])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--record", type=Path)
    parser.add_argument("--beside", type=Path)
    given = parser.parse_args()
    began = time.monotonic()
    until, prompts = began + given.seconds, list(prompts_of(given.files))[given.skip :][: given.prompts]
    keys = list(product(product(given.drafts, given.budgets), given.temperatures))
    before = recorded(given.record) if given.record and given.record.exists() else {}
    tallies = {key: before.get(name_of(key), Tally()) for key in keys}
    to_do = [each for each in prompts if not all(each[0] in tally.outcomes for tally in tallies.values())]
    with ProcessPoolExecutor(given.jobs, get_context("spawn"), prepare, (given,)) as processes:
        found = [processes.submit(outcomes, prompt, until) for _, prompt in to_do[:1]]
        for first in found:
            first.result()  # its process measures costs, which the others find: nothing else may run beside it
        found += [processes.submit(outcomes, prompt, until) for _, prompt in to_do[1:]]
        for (name, _), made in zip(to_do, found, strict=True):
            if (of := made.result()) is None:
                continue
            for (each, temperature), tally in tallies.items():
                tally.outcomes[name] = of[made_as(*each), temperature]
            if given.record:  # who is ended early has what was done by then
                with whole_file(given.record) as file:
                    file.write(json.dumps({name_of(k): tally.outcomes for k, tally in tallies.items()}).encode())
            wrong = [name_of(key) for key, tally in tallies.items() if not tally.outcomes[name].same]
            done = len(tallies[keys[0]].outcomes)
            print(
                f"{time.monotonic() - began:.0f} s, {done}: {name}", *(wrong or ["same"]), file=sys.stderr, flush=True
            )
    other = recorded(given.beside) if given.beside else {}
    done, seconds = len(tallies[keys[0]].outcomes), time.monotonic() - began
    print(f"{done} of {len(prompts)} prompts x {given.n} tokens in {seconds:.0f} s on {given.device}")
    print("| draft | budget | temperature | same text | tokens a step | the other device's, of as many prompts |")
    print("|---|---|---|---|---|---|")
    for key, tally in tallies.items():
        (draft, budget), temperature = key
        beside = "-"
        if known := other.get(name_of(key)):
            both = [each for each in tally.outcomes if each in known.outcomes]
            here, there = tally.rate(both), known.rate(both)
            beside = f"{there:.3f} ({here / there - 1:+.2%} here, {len(both)})" if both else "-"
        same = f"{len(tally.outcomes) - len(tally.different)} of {len(tally.outcomes)}"
        rate = f"{tally.rate(tally.outcomes):.3f}"
        print(f"| {draft} | {budget} | {temperature} | {same} | {rate} | {beside} |")
    differ = {key: tally.different for key, tally in tallies.items() if tally.different}
    for key, names in differ.items():
        print(name_of(key), "differs on", *names[:8])
    sys.exit(1 if differ or done < len(prompts) else 0)


if __name__ == "__main__":
    main()
