"""Which draft speaks: what `--draft` and `--spec-budget` mean."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from pathlib import Path
from typing import Literal

from warpsmith.backend.base import Backend, Want
from warpsmith.backend.tree import MAX_NODES
from warpsmith.draft.base import Draft, Proposer
from warpsmith.errors import BadRequest, WarpsmithError
from warpsmith.wisp import WISP, WISP_DRAFT

NAMES = ("auto", "none", "ngram", "mtp")
AFFORDABLE = 0.5  # tokens whose time one guess may take: verifying it takes time too, and it is not always right
BESIDE = "draft"  # the folder of a model's directory in which its own draft lies


def find_draft(draft: str | Path, budget: int | Literal["auto"], offline: bool = False) -> str | Path:
    """What a user calls a draft as one of `NAMES` or the path of its files, fetched if need be.

    Cheap, and worth doing before a model is loaded: everything that can be wrong with the name is found out here.
    """
    if budget != "auto" and not 0 <= budget < MAX_NODES:
        raise BadRequest(f"A budget of {budget} nodes is outside [0, {MAX_NODES - 1}].", "Or use auto.")
    if draft in NAMES:
        return draft
    if "/" not in str(draft) and not Path(draft).exists():
        raise BadRequest(f"There is no draft {str(draft)!r}.", f"Use one of {', '.join(NAMES)}, a path, or user/repo.")
    from warpsmith.checkpoint.hub import resolve

    return resolve(draft, offline=offline)


def make_proposer(
    draft: str | Path, budget: int | Literal["auto"], backend: Backend, model: Path | None = None
) -> Proposer | None:
    """The proposer for what `find_draft` found, ready to run; None for plain decoding.

    `budget` is how many nodes it may guess a step, or auto for as many as pay. `model` is where the model lies, whose
    own draft `auto` prefers.
    """
    if draft == "none" or budget == 0:
        return None
    most = backend.largest_tree - 1
    if budget != "auto" and budget > most:
        raise BadRequest(f"Trees on this device have room for {most} drafted nodes, not {budget}.", "Or use auto.")
    left_out: list[str] = []
    if budget != "auto":
        chosen = (
            _own(backend, model, left_out) or _named("ngram", backend) if draft == "auto" else _named(draft, backend)
        )
        chosen.nodes, chosen.left_out = budget, tuple(left_out)
        return chosen
    from warpsmith.draft.budget import Budgeted
    from warpsmith.draft.costs import costs_of

    def held(draft: Draft, wants: Want) -> Budgeted:
        draft.nodes = min(draft.nodes, most, backend.largest_launch - 1)  # more than a launch takes never pay
        return Budgeted(draft, costs_of(backend, wants))

    if draft != "auto":
        named = _named(draft, backend)
        return held(named, named.wants)
    own, text = _own(backend, model, left_out, affordable=True), _named("ngram", backend)
    proposer: Proposer
    if own is None:
        proposer = held(text, text.wants)
    else:
        from warpsmith.draft.cascade import Cascade

        proposer = Cascade([held(text, own.wants), held(own, own.wants)])
    proposer.left_out = tuple(left_out)
    return proposer


def make_proposers(
    draft: str | Path, budgets: Sequence[int | Literal["auto"]], backend: Backend, model: Path | None = None
) -> dict[int | Literal["auto"], Proposer]:
    """A proposer for each budget, for who compares them; those of so many nodes share one draft's weights."""
    made: dict[int | Literal["auto"], Proposer] = {}
    shared: Draft | None = None
    for budget in budgets:
        if budget == "auto" or shared is None or budget >= backend.largest_tree:
            proposer = make_proposer(draft, budget, backend, model)
            if proposer is None:
                continue
            made[budget] = proposer
            if budget != "auto" and isinstance(proposer, Draft):
                shared = proposer
        else:
            made[budget] = other = copy(shared)
            other.nodes = budget
    return made


def _own(backend: Backend, model: Path | None, left_out: list[str], affordable: bool = False) -> Draft | None:
    """The first of the model's own drafts that can be used here: the one that lies beside it, then its MTP head.
    `affordable`: and guesses fast enough to pay. Why one cannot is added to `left_out`."""
    from warpsmith.draft.costs import tokens_of_a_guess

    head = "mtp" if backend.config.mtp_layers else None
    for kind, name in (("dflash", _own_draft(model)), ("mtp", head)):
        if name is None:
            continue
        try:
            draft = _named(name, backend)
        except WarpsmithError as error:
            left_out.append(f"{kind} ({error.problem.rstrip('.')})")
            continue
        if not affordable or (tokens := tokens_of_a_guess(draft, backend)) < AFFORDABLE:
            return draft
        left_out.append(f"{kind} (a guess takes as long as {tokens:.1f} tokens)")
    return None


def _named(draft: str | Path, backend: Backend) -> Draft:
    if draft == "ngram":
        from warpsmith.draft.ngram import NGram

        return NGram()
    if draft == "mtp":
        from warpsmith.draft.mtp import MTP

        return MTP(backend)
    from warpsmith.checkpoint.dflash import open_draft
    from warpsmith.draft.dflash import DFlash

    return DFlash(open_draft(draft), backend)


def _own_draft(model: Path | None) -> Path | None:
    """Where the draft lies that came with a model."""
    if model is None:
        return None
    if model == WISP:
        return WISP_DRAFT
    beside = (model if model.is_dir() else model.parent) / BESIDE
    return beside if beside.is_dir() else None
