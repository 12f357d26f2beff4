"""What `warpsmith bench spec --assume AL` prints for a 27B of random Q4_K_M weights and a random DFlash draft of the
released shape, without files of that size.

PYTHONPATH=src python bench/lab/spec_assumed.py [--assume 8.31] [--sweep 15 22] [--depth 520] [-n 128]
"""

from __future__ import annotations

import argparse
from copy import copy
from pathlib import Path

import numpy as np
from draft_timing import random_draft
from large_timing import random_model

from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.checkpoint.canonical import Checkpoint
from warpsmith.draft.dflash import DFlash
from warpsmith.llm import LLM
from warpsmith.measure.speculation import compare, comparison_table
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import model_metadata
from warpsmith.model.synthetic_draft import draft_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assume", type=float, default=8.31)
    parser.add_argument("--sweep", type=int, nargs="+", default=[15, 22])
    parser.add_argument("--depth", type=int, default=520)
    parser.add_argument("-n", type=int, default=128)
    parser.add_argument("--samples", type=int, default=3)
    given = parser.parse_args()
    config = SIZES["27B"]
    tensors = random_model(config, "q4_k_m")
    backend = LargeBackend(config, tensors, context=given.depth + given.n + 64)
    llm = LLM(backend, Checkpoint(Path("random-27B"), model_metadata(config), tensors), backend.context)
    first, *others = given.sweep
    drafts = {first: DFlash(random_draft(draft_of(config), "bf16"), backend, first)}
    for nodes in others:  # the same weights
        drafts[nodes] = copy(drafts[first])
        drafts[nodes].nodes = nodes
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 50_000, given.depth).tolist() for _ in range(given.samples)]
    options = {"max_tokens": given.n, "temperature": 0.0, "stop_ids": []}
    print(comparison_table(compare(llm, {f"random {given.depth}": prompts}, drafts, options, assume=given.assume)))


if __name__ == "__main__":
    main()
