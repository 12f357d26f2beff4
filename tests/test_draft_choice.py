"""Which draft a name, a path or the machine chooses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import warpsmith
from draft_cases import CONFIG, backend
from random_drafts import draft_config, random_weights, write_draft
from random_models import random_tensors, small_config
from warpsmith.backend.base import Backend, Want
from warpsmith.backend.cpu import CpuBackend
from warpsmith.backend.cpu.draft import CpuDraft
from warpsmith.backend.reference import ReferenceBackend
from warpsmith.draft.budget import Budgeted
from warpsmith.draft.cascade import Cascade
from warpsmith.draft.dflash import DFlash
from warpsmith.draft.mtp import MTP
from warpsmith.draft.ngram import NGram
from warpsmith.draft.select import find_draft, make_proposer, make_proposers
from warpsmith.engine.loop import Generation
from warpsmith.engine.scheduler import Scheduler
from warpsmith.errors import BadFile, BadRequest, ModelNotFound


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_names_and_paths_choose_drafts(tmp_path: Path) -> None:
    on = backend("reference")
    assert make_proposer("none", "auto", on) is None
    assert make_proposer("ngram", 0, on) is None
    fixed = make_proposer("ngram", 9, on)
    assert isinstance(fixed, NGram)
    assert fixed.nodes == 9
    assert isinstance(make_proposer("mtp", 4, on), MTP)
    assert isinstance(make_proposer("auto", 4, on), MTP), "the model's own head before the text"
    config = draft_config(CONFIG)
    path = write_draft(tmp_path / "model" / "draft", "safetensors", config, random_weights(config))
    assert isinstance(make_proposer(path, 4, on), DFlash)
    assert find_draft(str(path), "auto") == path
    assert [find_draft(name, 3) for name in ("auto", "none", "ngram", "mtp")] == ["auto", "none", "ngram", "mtp"]
    assert isinstance(make_proposer("auto", 4, on, tmp_path / "model"), DFlash), "and its own draft before that"
    assert isinstance(make_proposer("auto", 4, on, tmp_path / "model" / "file.gguf"), DFlash)
    headless = ReferenceBackend(small_config(vocab=24), random_tensors(small_config(vocab=24)))
    text = make_proposer("auto", 4, headless, tmp_path / "model")
    assert isinstance(text, NGram), "made for another model"
    (why,) = text.left_out
    assert "knows a vocabulary of 16 tokens, and the model of 24)" in why


@pytest.mark.parametrize(("tokens", "names"), [({"dflash": 0.4, "mtp": 0.2}, "ngram+dflash"),
                                               ({"dflash": 0.7, "mtp": 0.2}, "ngram+mtp"),
                                               ({"dflash": 1.4, "mtp": 0.7}, "ngram")])  # fmt: skip
def test_auto_leaves_out_drafts_whose_guesses_take_too_long(
    tokens: dict[str, float], names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("warpsmith.draft.costs.tokens_of_a_guess", lambda draft, on: tokens[draft.name])
    config = draft_config(CONFIG)
    write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    proposer = make_proposer("auto", "auto", backend("cpu"), tmp_path)
    assert proposer is not None
    assert proposer.name == names
    slow = [name for name in ("dflash", "mtp") if tokens[name] > 0.5]
    expected = [f"{name} (a guess takes as long as {tokens[name]} tokens)" for name in slow]
    assert list(proposer.left_out) == expected
    generation = Generation(Scheduler(backend("cpu"), 64, proposer), [1, 2, 3], max_tokens=2)
    list(generation)
    assert generation.stats.left_out == generation.stats.to_dict()["left_out"] == expected
    assert ("left out: " + ", ".join(expected) in generation.stats.summary()) == bool(expected)


def test_auto_asks_the_text_first_and_then_the_model_s_own_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warpsmith.draft.costs.tokens_of_a_guess", lambda draft, on: 0.4)
    proposer = make_proposer("auto", "auto", backend("cpu"))
    assert isinstance(proposer, Cascade)
    assert proposer.name == "ngram+mtp"
    assert proposer.wants == Want("none", hidden=True)
    headless = CpuBackend(small_config(vocab=16), random_tensors(small_config(vocab=16)), threads=1)
    alone = make_proposer("auto", "auto", headless)
    assert isinstance(alone, Budgeted)
    assert alone.name == "ngram"


def test_wisp_has_a_draft_of_its_own() -> None:
    with warpsmith.load(device="cpu", context=256) as llm:
        fixed = make_proposer("auto", 4, llm.backend, llm.checkpoint.path)
        assert isinstance(fixed, DFlash)
        assert isinstance(fixed.network, CpuDraft)


def test_an_automatic_budget_measures_the_machine(tmp_path: Path) -> None:
    on = backend("cpu")
    proposer = make_proposer("ngram", "auto", on)
    assert isinstance(proposer, Budgeted)
    assert proposer.name == "ngram"
    assert proposer.costs.seconds[0] > 0
    assert len(list((tmp_path / "cache" / "warpsmith" / "costs").iterdir())) == 1


@pytest.mark.parametrize(
    ("draft", "budget", "error", "words"),
    [
        ("ngrma", "auto", BadRequest, "no draft 'ngrma'"),
        ("ngram", -1, BadRequest, "budget of -1"),
        ("ngram", 64, BadRequest, "budget of 64"),
        ("./missing/draft", 4, ModelNotFound, "missing"),
        ("somebody/nowhere", 4, ModelNotFound, "offline"),
    ],
)
def test_what_cannot_be_chosen_is_refused(draft: str, budget: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        find_draft(draft, budget, offline=True)


def test_drafts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    config = draft_config(CONFIG, vocab=999)
    path = write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    with pytest.raises(BadRequest, match="vocabulary of 999"):
        make_proposer(path, 4, backend("reference"))
    plain = small_config(vocab=16)
    with pytest.raises(BadRequest, match="no MTP head"):
        make_proposer("mtp", 4, ReferenceBackend(plain, random_tensors(plain)))
    bare = type("Bare", (ReferenceBackend,), {"mtp": Backend.mtp, "embed": Backend.embed})
    unable = bare(CONFIG, random_tensors(CONFIG))
    with pytest.raises(BadRequest, match="does not run MTP"):
        make_proposer("mtp", 4, unable)
    fitting = draft_config(CONFIG)
    path = write_draft(tmp_path / "draft2", "safetensors", fitting, random_weights(fitting))
    with pytest.raises(BadRequest, match="does not lend"):
        make_proposer(path, 4, unable)
    text = make_proposer("auto", 4, unable)
    assert isinstance(text, NGram)
    assert text.left_out == ("mtp (The reference backend does not run MTP heads)",)
    (tmp_path / "text.gguf").write_text("not a draft at all, no, not at all")
    with pytest.raises(BadFile, match="GGUF"):
        make_proposer(tmp_path / "text.gguf", 4, backend("reference"))


def test_budgets_that_are_compared_share_a_draft_s_weights(tmp_path: Path) -> None:
    config = draft_config(CONFIG)
    path = write_draft(tmp_path / "draft", "safetensors", config, random_weights(config))
    made = make_proposers(path, [4, 8, "auto"], backend("cpu"))
    four, eight, paying = made.values()
    assert isinstance(four, DFlash)
    assert isinstance(eight, DFlash)
    assert isinstance(paying, Budgeted)
    assert list(made) == [4, 8, "auto"]
    assert (four.nodes, eight.nodes) == (4, 8)
    assert four.network is eight.network
    with pytest.raises(BadRequest, match="64"):
        make_proposers("ngram", [4, 64], backend("cpu"))
