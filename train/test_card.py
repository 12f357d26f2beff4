"""The command behind wisp's card, on the files that ship."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import warpsmith
from train import card
from train.card import drafts, excerpt_bits, reached, repeated, split_bits
from train.data import PROMPT_FILE, cut_excerpt
from warpsmith.engine.stats import Stats
from warpsmith.llm import LLM
from warpsmith.measure.speculation import Comparison
from warpsmith.wisp import WISP, WISP_DRAFT

ROOT = Path(__file__).parent.parent
PROMPT = 'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n'


@pytest.fixture(scope="module")
def wisp() -> LLM:
    return warpsmith.load(context=1200)


def test_files_are_small_enough_to_ship() -> None:
    assert WISP.stat().st_size <= 30e6
    assert WISP_DRAFT.stat().st_size <= 12e6
    assert PROMPT_FILE.stat().st_size <= 100e3


def test_excerpts_come_from_held_out_packages_whose_licence_is_named() -> None:
    table = (ROOT / "train" / "DATA.md").read_text().splitlines()
    licences = {name: licence for name, licence in map(held_out, table) if licence}
    packages = {json.loads(line)["package"] for line in PROMPT_FILE.read_text().splitlines()}
    assert packages
    assert packages <= licences.keys()


def held_out(line: str) -> tuple[str, str]:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    return (cells[0], cells[2]) if cells[-1] == "held out" else ("", "")


def test_excerpts_are_whole_lines_that_follow_each_other() -> None:
    text = "".join(f"line {i}\n" for i in range(400))
    prompt, rest = cut_excerpt(text, random.Random(1)) or ("", "")
    assert "\n" + prompt + rest in "\n" + text
    assert prompt.startswith("line ")
    assert prompt.endswith("\n")
    assert rest.endswith("\n")
    assert len(prompt) <= 800
    assert cut_excerpt(text[:900], random.Random(1)) is None


def test_a_chain_guesses_one_token_a_depth(wisp: LLM) -> None:
    ((budget, proposer),) = drafts("chain", wisp.backend, WISP_DRAFT).items()
    steps = []
    chain = LLM(wisp.backend, wisp.checkpoint, wisp.context, proposer)
    chain.generate(PROMPT, max_tokens=40, temperature=0, on_step=steps.append)
    assert budget == 15
    assert len(steps[0].tree) == 16
    assert all((step.tree.parents == np.arange(-1, len(step.tree) - 1)).all() for step in steps)


def test_positions_count_the_steps_that_got_so_far() -> None:
    stats = [Stats(histogram=[2, 1]), Stats(histogram=[1, 0, 4])]
    assert reached(Comparison("x", "dflash", 3, drafted=stats)) == [5 / 8, 4 / 8, 0.0]


def test_repetition_is_told_from_progress() -> None:
    assert repeated(range(50)) == 0.0
    assert repeated([1, 2] * 50) == pytest.approx(1 - 2 / 93)
    assert repeated([1, 2, 3]) == 0.0


def test_bits_of_known_text_are_fewer_than_of_noise(wisp: LLM, tmp_path: Path) -> None:
    scores = []
    noise = "".join(chr(33 + i * 7919 % 90) for i in range(60)) + "\n"
    for text in ("    for i in range(10):\n        print(i)\n", noise):
        file = tmp_path / "excerpts.jsonl"
        file.write_text(json.dumps({"prompt": "import os\n", "continuation": text}) + "\n")
        scores.append(excerpt_bits(wisp, file))
    assert scores[0] < 2 < 3 < scores[1]


def test_the_split_is_scored_as_its_tokens_and_bytes_say(
    wisp: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(card, "WINDOW", 64)
    line = wisp.tokenizer.encode("for i in range(10):\n    print(i)\n")
    tokens = np.array((line * 20)[:129], np.uint16)
    file = tmp_path / "heldout.npz"
    sizes = {"lengths": np.array([64, 65]), "bytes": np.array([200, 400]), "kind": np.array([0, 2], np.uint8)}
    np.savez(file, tokens=tokens, **sizes)
    bits = split_bits(wisp, file, lambda line: None)
    nats = 0.0
    for start in (0, 64):
        logits, targets = wisp.score(tokens[start : start + 64].tolist()), tokens[start + 1 : start + 65]
        nats += float(np.log(np.exp(logits).sum(axis=1)).sum() - logits[np.arange(64), targets].sum())
    assert bits["all"] == pytest.approx(nats / 128 * 129 / 600 / np.log(2), rel=1e-4)
    assert bits.keys() == {"all", "code", "chat"}


def test_the_command_prints_its_tables(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": PROMPT}) + "\n")
    options = ["--samples", "1", "-n", "12", "--tables", "chain", "mtp", "--humaneval", str(prompts)]
    result = subprocess.run(
        [sys.executable, "-m", "train.card", *options], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert "| position | 1 | 2 |" in result.stdout
    assert "| tokens a step | held-out code | HumanEval | same text |" in result.stdout
    assert "| MTP, 4 tokens | " in result.stdout
    rows = [line for line in result.stdout.splitlines() if "of 2 |" in line]
    assert len(rows) == 5
    assert all(row.endswith("| 2 of 2 |") for row in rows)
