"""Every table of wisp's card, docs/wisp.md, measured with warpsmith itself on the files that ship.

python -m train.card --humaneval FILE.jsonl --heldout carry/heldout.npz

Held-out code is `heldout_prompts.jsonl` beside this file. Without --heldout (which `python -m train.data pack` writes)
bits a byte are those of its excerpts alone; without --humaneval its columns are left out. Needs no torch. What is
counted here does not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, count
from pathlib import Path
from typing import Any

import numpy as np

import warpsmith
from train.data import KINDS, PROMPT_FILE
from warpsmith.backend.base import Backend, Output, Want
from warpsmith.backend.block_draft import BlockDraft, BlockMemory
from warpsmith.checkpoint.dflash import open_draft
from warpsmith.draft.base import Proposer
from warpsmith.draft.dflash import DFlash
from warpsmith.draft.mtp import MTP
from warpsmith.llm import LLM
from warpsmith.measure.prompts import read_prompts
from warpsmith.measure.speculation import Comparison, compare
from warpsmith.wisp import WISP, WISP_DRAFT

TABLES = ("bits", "chain", "tree", "mtp", "repeats")
WINDOW = 1024  # tokens scored together: as long as in training
TREE_BUDGETS = (8, 16, 22, 32)
MTP_BUDGETS = (1, 2, 3, 4)
REPEAT_BUDGET, GRAM = 22, 8  # nodes; tokens that count as repeated when they occur again
REPEAT_BANDS = {"under 10%": (0.0, 0.1), "10 to 50%": (0.1, 0.5), "50% and more": (0.5, 1.01)}


class TopOne:
    """A draft's network that names the likeliest token of each position alone, so that its best tree is a chain."""

    def __init__(self, network: BlockDraft) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(self._network, name)

    def fill(self, memory: BlockMemory, root: int, position: int, rows: int, want: Want) -> Output:
        return self._network.fill(memory, root, position, rows, replace(want, top=1))


def losses(llm: LLM, ids: Sequence[int]) -> np.ndarray:
    """Nats of every token but the first."""
    logits = llm.score(ids[:-1]).astype(np.float64)
    peak = logits.max(axis=1)
    total = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
    return total - logits[np.arange(len(logits)), ids[1:]]


def excerpt_bits(llm: LLM, path: Path) -> float:
    """Bits a byte of how the excerpts go on, given their prompts."""
    nats, size = 0.0, 0
    for row in map(json.loads, path.read_text().splitlines()):
        prompt, rest = llm.tokenizer.encode(row["prompt"]), llm.tokenizer.encode(row["continuation"])
        nats += float(losses(llm, prompt + rest)[len(prompt) - 1 :].sum())
        size += len(row["continuation"].encode())
    return nats / math.log(2) / size


def split_bits(llm: LLM, path: Path, progress: Callable[[str], object]) -> dict[str, float]:
    """Bits a byte of the whole held-out split and of each kind of text in it, in windows as training packs them."""
    with np.load(path) as archive:
        tokens, lengths, sizes, kinds = (archive[k] for k in ("tokens", "lengths", "bytes", "kind"))
    kind_of = np.repeat(kinds, lengths)
    windows = (len(tokens) - 1) // WINDOW
    nats = np.empty(windows * WINDOW)
    for i in range(windows):
        progress(f"held-out split: window {i + 1} of {windows}")
        start = i * WINDOW
        nats[start : start + WINDOW] = losses(llm, tokens[start : start + WINDOW + 1].tolist())
    predicted = kind_of[1 : len(nats) + 1]
    result = {"all": nats.mean() / math.log(2) * lengths.sum() / sizes.sum()}
    for i, name in enumerate(KINDS):
        here = kinds == i
        if not (predicted == i).any():
            continue
        result[name] = nats[predicted == i].mean() / math.log(2) * lengths[here].sum() / sizes[here].sum()
    return {name: float(bits) for name, bits in result.items()}


def drafts(table: str, backend: Backend, chosen: Path) -> dict[Any, Proposer]:
    """What a table compares, by budget. A block of 16 guesses 15 tokens: its first is known."""
    if table == "mtp":
        return {n: MTP(backend, n) for n in MTP_BUDGETS}
    file = open_draft(chosen)
    if table == "chain":
        chain = DFlash(file, backend, file.config.block - 1)
        chain.network = TopOne(chain.network)  # type: ignore[assignment]
        return {chain.nodes: chain}
    return {n: DFlash(file, backend, n) for n in TREE_BUDGETS}


def reached(comparison: Comparison) -> list[float]:
    """For each position of a chain the share of steps in which it and all before it were right."""
    counts = np.zeros(int(comparison.budget) + 1)
    for stats in comparison.drafted:
        counts[: len(stats.histogram)] += stats.histogram
    at_least = list(accumulate(counts[::-1]))[::-1]
    return [n / at_least[0] for n in at_least[1:]]


def repeated(ids: Sequence[int]) -> float:
    """The share of runs of `GRAM` tokens that occurred before: near 1 for a text that goes in circles."""
    grams = [tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def repeat_rows(llm: LLM, sets: Mapping[str, Sequence[str]], draft: Path, options: dict[str, Any]) -> list[list[str]]:
    """Tokens a step of one tree size, apart for texts that repeat themselves little and much."""
    proposer = DFlash(open_draft(draft), llm.backend, REPEAT_BUDGET)
    model = LLM(llm.backend, llm.checkpoint, llm.context, proposer)
    answers = {name: [model.generate(p, **options) for p in prompts] for name, prompts in sets.items()}
    rows = []
    for band, (low, high) in REPEAT_BANDS.items():
        row = [band]
        for found in answers.values():
            stats = [a.stats for a in found if low <= repeated(a.token_ids) < high]
            steps = sum(s.steps for s in stats)
            length = f"{sum(s.generated_tokens - 1 for s in stats) / steps:.2f}" if steps else "-"
            row.append(f"{length} ({len(stats)} texts)")
        rows.append(row)
    return rows


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LABELS: Mapping[str, Callable[[Comparison], str]] = {
    "chain": lambda c: f"DFlash, greedy chain of {c.budget} (block of {int(c.budget) + 1})",
    "tree": lambda c: f"DFlash, DDTree of {c.budget} nodes",
    "mtp": lambda c: f"MTP, {c.budget} token{'s' if c.budget != 1 else ''}",
}


def length_rows(table: str, comparisons: Sequence[Comparison], sets: Sequence[str]) -> list[list[str]]:
    """A row a budget: tokens a step in each set, and in how many answers the tokens were plain decoding's."""
    rows = []
    for budget in dict.fromkeys(c.budget for c in comparisons):
        mine = {c.prompts: c for c in comparisons if c.budget == budget}
        lengths = [f"{mine[name].acceptance_length:.2f}" for name in sets]
        same = sum(c.same for c in mine.values())
        rows.append([LABELS[table](mine[sets[0]]), *lengths, f"{same} of {sum(len(c.plain) for c in mine.values())}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WISP)
    parser.add_argument("--draft", type=Path, default=WISP_DRAFT)
    parser.add_argument("--humaneval", type=Path, help="JSONL with a `prompt` a line")
    parser.add_argument("--heldout", type=Path, help="heldout.npz: score the whole held-out split too")
    parser.add_argument("--samples", type=int, default=1000, help="prompts of each set, at most (all)")
    parser.add_argument("-n", "--tokens", type=int, default=128, help="tokens generated for each prompt (128)")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="print only these")
    args = parser.parse_args()

    calls = count()

    def progress(line: str) -> None:
        if next(calls) % 20 == 0:  # enough to see that it goes on, few enough for a log
            print(line, file=sys.stderr, flush=True)

    files = {"held-out code": PROMPT_FILE} | ({"HumanEval": args.humaneval} if args.humaneval else {})
    sets = {name: read_prompts(str(path), args.samples) for name, path in files.items()}
    names = list(sets)
    options = {"max_tokens": args.tokens, "temperature": 0.0}
    with warpsmith.load(args.model, draft="none") as llm:
        if "bits" in args.tables:
            rows = [[f"{PROMPT_FILE.name}, continuations", f"{excerpt_bits(llm, PROMPT_FILE):.3f}"]]
            if args.heldout:
                scores = split_bits(llm, args.heldout, progress)
                rows += [[f"held-out split, {name}", f"{bits:.3f}"] for name, bits in scores.items()]
            print(markdown(["held out", "bits a byte"], rows) + "\n", flush=True)
        lengths = []
        for table in (t for t in LABELS if t in args.tables):
            proposers = drafts(table, llm.backend, args.draft)
            comparisons = compare(llm, sets, proposers, options, lambda line, table=table: progress(f"{table}: {line}"))
            lengths += length_rows(table, comparisons, names)
            if table == "chain":
                header = ["position", *map(str, range(1, int(comparisons[0].budget) + 1))]
                rows = [[c.prompts, *(f"{share:.2f}" for share in reached(c))] for c in comparisons]
                print(markdown(header, rows) + "\n", flush=True)
        if lengths:
            print(markdown(["tokens a step", *names, "same text"], lengths) + "\n", flush=True)
        if "repeats" in args.tables:
            header = [f"text repeated, DDTree of {REPEAT_BUDGET} nodes", *names]
            print(markdown(header, repeat_rows(llm, sets, args.draft, options)))


if __name__ == "__main__":
    main()
