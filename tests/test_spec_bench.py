"""Speculation as a user sees it: the trees of `run --show-tree`, the table of `bench spec`, the stats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import warpsmith
from random_drafts import draft_config, random_weights, write_draft
from random_models import SMALL
from warpsmith.backend.tree import Tree
from warpsmith.cli import main
from warpsmith.cli.tree import tree_lines
from warpsmith.draft.base import Context, Draft, ScoredTree
from warpsmith.draft.ngram import NGram
from warpsmith.engine.loop import Step
from warpsmith.engine.stats import Stats
from warpsmith.errors import BadFile, BadRequest, ModelNotFound
from warpsmith.llm import LLM
from warpsmith.measure.assumed import Assumed
from warpsmith.measure.prompts import read_prompts
from warpsmith.measure.speculation import Comparison, compare, comparison_table
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import synthesize

ENVIRONMENT = os.environ | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def command(*args: str | Path, cache: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warpsmith.cli", *map(str, args)],
        capture_output=True, text=True, timeout=300, env=ENVIRONMENT | {"XDG_CACHE_HOME": str(cache)},
    )  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    synthesize(SIZES["tiny"], path, recipe="f32")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    texts = ["one two three one two three one two", "def f(x):", "abc abc abc"]
    path.write_text("".join(json.dumps({"prompt": text, "other": 1}) + "\n\n" for text in texts))
    return path


# -- trees ------------------------------------------------------------------------------------------------------------

STEP = Step(
    Tree(np.array([9, 1, 2, 3, 4, 5, 6]), np.array([-1, 0, 1, 2, 1, 0, 4])), accepted=[0, 1, 4], decided=[1, 4, 8]
)


def test_a_step_is_drawn_branch_by_branch() -> None:
    lines = list(tree_lines(STEP, str, colour=False))
    assert lines == ["2 of 6 after 9, then 8", "  +1 -2 -3", "    +4 -6", "  -5"]
    shown = " ".join(lines[1:]).split()
    assert sorted(int(token[1:]) for token in shown) == [1, 2, 3, 4, 5, 6], "every node once"


def test_colours_say_the_same() -> None:
    green, red = "\x1b[32m", "\x1b[31m"
    text = "\n".join(tree_lines(STEP, str, colour=True))
    for token, right in ((1, True), (2, False), (3, False), (4, True), (5, False), (6, False)):
        assert f"{green if right else red}{token}\x1b[0m" in text


def test_a_step_without_a_guess_says_so() -> None:
    lines = list(tree_lines(Step(Tree.chain([9]), [0], [4]), str, colour=False))
    assert lines == ["no guess after 9, then 4"]


@pytest.mark.parametrize("draft", ["ngram", None])
def test_steps_add_up_to_the_answer(draft: str | None) -> None:
    """What `on_step` is shown is what was decided, in order, and is accepted only where it was decided."""
    steps: list[Step] = []
    with warpsmith.load(device="cpu", context=256, draft=draft, spec_budget=8) as llm:
        answer = llm.generate([5, 6, 7, 8] * 8, max_tokens=60, stop_ids=[], temperature=0, on_step=steps.append)
    assert [token for step in steps for token in step.decided] == answer.token_ids[1:]
    assert len(steps) == answer.stats.steps
    for step in steps:
        assert step.tree.tokens[step.accepted[1:]].tolist() == step.decided[:-1]
        assert step.tree.path(step.accepted[-1]) == step.accepted
    assert sum(len(step.tree) - 1 for step in steps) == answer.stats.drafted_tokens
    assert sum(len(step.tree) > 1 for step in steps) == answer.stats.drafted_steps


def test_run_shows_trees_on_stderr_and_the_text_on_stdout(tmp_path: Path) -> None:
    flags = ("run", "-p", "abab" * 8, "-n", "12", "--spec-budget", "5", "--draft", "ngram")
    shown, quiet = command(*flags, "--show-tree", cache=tmp_path), command(*flags, cache=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout == quiet.stdout
    assert shown.stderr.count(" after ") >= 1
    assert " after " not in quiet.stderr


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_read_from_lines(prompts: Path) -> None:
    assert read_prompts(str(prompts), 2) == ["one two three one two three one two", "def f(x):"]
    assert len(read_prompts(str(prompts), 99)) == 3


@pytest.mark.parametrize(
    ("text", "words"), [("", "no prompts"), ("{", "line 1"), ('{"text": "x"}', "entry 1"), ("[1]", "entry 1")]
)
def test_files_without_prompts_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(BadFile, match=words):
        read_prompts(str(path), 5)


def test_unknown_and_unreachable_sets_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadRequest, match="no prompts 'humanevil'"):
        read_prompts("humanevil", 5)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name in ("humaneval", "gsm8k", "math500"):
        with pytest.raises(ModelNotFound, match="offline"):
            read_prompts(name, 5, offline=True)


# -- the comparison ---------------------------------------------------------------------------------------------------


class Liar(Draft):
    """Guesses that are never right: the tables must show it."""

    name = "liar"

    def propose(self, memory: Any, context: Context) -> ScoredTree:
        return ScoredTree(np.array([context.root, 3]), np.array([-1, 0]), np.array([0.0, -0.1]))


def test_every_prompt_is_compared_and_texts_agree() -> None:
    with warpsmith.load(device="cpu", context=256) as llm:
        sets = {"a": ["one two one two one two", "xyz"], "b": [[1, 2, 3] * 9]}
        options = {"max_tokens": 24, "temperature": 0.0, "stop_ids": []}
        results = compare(llm, sets, {4: NGram(4), "auto": Liar()}, options)
    assert [(r.prompts, r.draft, r.budget) for r in results] == [
        ("a", "ngram", 4), ("a", "liar", "auto"), ("b", "ngram", 4), ("b", "liar", "auto"),
    ]  # fmt: skip
    for result in results:
        assert result.same == len(result.plain) == len(result.drafted) == {"a": 2, "b": 1}[result.prompts]
        assert all(s.mode == "plain" for s in result.plain)
        assert result.plain_rate > 0
        assert result.acceptance_length >= 1
        assert json.loads(json.dumps(result.to_dict()))["samples"] == len(result.plain)
    assert results[1].acceptance_length == pytest.approx(1, abs=0.1)


def test_numbers_are_medians_over_prompts_and_steps_are_pooled() -> None:
    def stats(tokens: int, seconds: float, steps: int) -> Stats:
        return Stats(generated_tokens=tokens + 1, decode_seconds=seconds, steps=steps)

    result = Comparison(
        "/some/where/x.jsonl", "d", 8,
        plain=[stats(100, 10, 100), stats(100, 10, 100), stats(100, 20, 100)],
        drafted=[stats(100, 5, 40), stats(100, 2, 20), stats(100, 20, 100)],
        same=3,
    )  # fmt: skip
    assert (result.plain_rate, result.drafted_rate, result.speedup) == (10, 20, 2)
    assert result.acceptance_length == 300 / 160
    row = [cell.strip() for cell in comparison_table([result]).splitlines()[2].strip("|").split("|")]
    assert row == ["x.jsonl", "3", "d", "8", "10.00", "20.00", "1.88", *["0.000"] * 5, "2.00x", "3 of 3"]


def test_a_table_says_where_the_time_of_a_step_goes() -> None:
    spent = Stats(steps=10, draft_seconds=0.5, verify_seconds=3.0, forward_seconds=2.0, commit_seconds=0.4)
    result = Comparison("x", "d", 8, plain=[Stats()], drafted=[spent], tree_seconds=0.1)
    expected = {"draft": 40, "tree": 10, "forward": 200, "commit": 40, "host": 100}
    assert result.step_milliseconds == pytest.approx(expected)


@pytest.mark.parametrize("length", [1.0, 2.5, 8.31, 15.9])
def test_an_assumed_length_is_reached_in_the_mean(length: float) -> None:
    """Not by luck of the draft's: n-grams have nothing to say here."""
    text = np.random.default_rng(0).integers(0, 500, 40_000).tolist()
    draft = Assumed(NGram(22), length, 512)
    draft.expect(10, text)
    at, decided = 1, []
    while len(decided) < 3000 and at < 30_000:
        tree = draft.propose(draft.new_memory(), Context([0] * 10 + text[:at], None, 99))  # type: ignore[arg-type]
        assert len(tree) == 23
        assert len({*zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)}) == 23, "no token twice"
        node, count = 0, 1
        while (node := tree.child.get((node, text[at + count - 1]), -1)) > 0:
            count += 1
        decided.append(count)
        at += count
    assert np.mean(decided) == pytest.approx(length, rel=0.06)


@pytest.mark.parametrize("length", [5.0, 8.31])
def test_an_assumed_length_is_that_of_short_texts_too(length: float) -> None:
    """The last step of a text decides no more tokens than are left."""
    text = np.random.default_rng(0).integers(0, 500, 60).tolist()
    draft, steps = Assumed(NGram(22), length, 512), 0
    for _ in range(40):
        draft.expect(10, text)
        at = 1
        while at < len(text):
            tree = draft.propose(draft.new_memory(), Context([0] * 10 + text[:at], None, 99))  # type: ignore[arg-type]
            at, steps, node = at + 1, steps + 1, 0
            while at < len(text) and (node := tree.child.get((node, text[at - 1]), -1)) > 0:
                at += 1
    assert 40 * (len(text) - 1) / steps == pytest.approx(length, rel=0.03)


def test_a_comparison_with_an_assumed_length_says_so_and_its_texts_agree() -> None:
    with warpsmith.load(device="cpu", context=256) as llm:
        options = {"max_tokens": 60, "temperature": 0.0, "stop_ids": []}
        (result,) = compare(llm, {"a": ["xyz", "def f"]}, {22: NGram(22)}, options, assume=5.0)
    assert result.same == 2
    assert 3.0 < result.acceptance_length < 7.0
    assert "(assumed)" in comparison_table([result])
    assert result.to_dict()["assumed_acceptance_length"] == 5.0


def test_the_command_prints_a_row_for_each_budget(prompts: Path, tmp_path: Path) -> None:
    flags = ("bench", "spec", "--prompts", prompts, "-n", "12", "--samples", "2", "--draft", "ngram")
    result = command(*flags, "--sweep", "2,8,auto", "-o", "json", cache=tmp_path)
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["budget"], row["samples"], row["same"]) for row in rows] == [(2, 2, 2), (8, 2, 2), ("auto", 2, 2)]
    table = command(*flags, cache=tmp_path)
    assert table.returncode == 0, table.stderr
    assert table.stdout.startswith("| prompts")
    assert "2 of 2" in table.stdout


def test_a_random_model_and_a_random_draft_give_a_table_of_an_assumed_length(
    tiny: Path, prompts: Path, tmp_path: Path
) -> None:
    """As a 27B is measured whose weights nobody has: the draft runs at its own cost, and the texts agree."""
    path = tmp_path / "draft.gguf"
    made = command("synth", "tiny", path, "--dflash", "--type", "q8_0", cache=tmp_path)
    assert made.returncode == 0, made.stderr
    flags = ("--device", "cpu", "--prompts", prompts, "-n", "40", "--samples", "2", "--draft", path)
    result = command(
        "bench", "spec", "-m", tiny, *flags, "--sweep", "4,8", "--assume", "3", "-o", "json", cache=tmp_path
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(result.stdout)
    assert [(row["draft"], row["budget"], row["same"]) for row in rows] == [("dflash", 4, 2), ("dflash", 8, 2)]
    assert all(row["step_ms"]["draft"] > 0 and 1.5 < row["acceptance_length"] < 4.5 for row in rows)
    refused = command("synth", "tiny", tmp_path / "directory", "--dflash", cache=tmp_path)
    assert refused.returncode == 2
    assert "GGUF" in refused.stderr


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--prompts", "nothing-here"],
        ["--prompts", "FILE", "--draft", "none"],
        ["--prompts", "FILE", "--sweep", "0,4"],
        ["--prompts", "FILE", "--sweep", "99"],
        ["--prompts", "FILE", "--thinking", "on"],
        ["--prompts", "FILE", "--assume", "4", "--sweep", "8,auto"],
        ["--prompts", "FILE", "--assume", "0.5", "--sweep", "8"],
        ["--prompts", "FILE", "--assume", "12", "--sweep", "8", "--draft", "ngram"],
        ["--prompts", "FILE", "-m", "MODEL", "--draft", "mtp"],
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(
    flags: list[str],
    prompts: Path,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {"FILE": str(prompts), "MODEL": str(tiny)}  # the model has no MTP head
    code = main(["bench", "spec", *[files.get(f, f) for f in flags]])
    out, err = capfd.readouterr()
    assert code == 2, err
    assert out == ""
    assert "Traceback" not in err


def test_a_draft_of_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    config = draft_config(SMALL)
    path = write_draft(tmp_path / "draft", "lucebox", config, random_weights(config))
    result = command("run", "-p", "x", "-n", "1", "--draft", path, cache=tmp_path)
    assert result.returncode == 2, result.stderr
    assert "hidden size of 64, and the model of" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3


@pytest.mark.parametrize(("format", "held"), [("safetensors", "as Q8_0"), ("lucebox", "as Q8_0")])
def test_show_tells_what_a_draft_is_and_how_it_is_held(format: str, held: str, tmp_path: Path) -> None:
    config = draft_config(SMALL, windows=(7, None), causal=(True, False))
    path = write_draft(tmp_path / "draft", format, config, random_weights(config))
    result = command("show", path, cache=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "a DFlash draft" in result.stdout
    assert "each sees: 7 tokens, causal; all" in result.stdout
    assert f"on cuda     its matrices are held {held}" in result.stdout
    facts = json.loads(command("show", path, "--json", cache=tmp_path).stdout)
    assert (facts["held_on_cuda"], facts["draft"]["block"]) == ("Q8_0", config.block)


# -- stats ------------------------------------------------------------------------------------------------------------


class Tired(NGram):
    """Has given up."""

    name = "tired"

    @property
    def off(self) -> str | None:
        return "it is late"

    def propose(self, memory: Any, context: Context) -> ScoredTree | None:
        return None if len(context.ids) > 12 else super().propose(memory, context)


def test_stats_say_when_and_why_drafting_stopped(tiny: Path) -> None:
    with warpsmith.load(tiny, device="cpu", context=64) as base:
        llm = LLM(base.backend, base.checkpoint, 64, Tired())
        stats = llm.generate([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3], max_tokens=20, stop_ids=[], temperature=0).stats
        assert stats.speculation_off == "it is late"
        assert f"drafted in {stats.drafted_steps} of {stats.steps} steps: it is late" in stats.summary()
        assert stats.drafted_steps < stats.steps
        assert {"drafted_steps", "histogram", "draft_seconds", "verify_seconds"} <= stats.to_dict().keys()
