"""Greedy text of wisp after prompts of a file, on one device; and where it parts from another device's.

PYTHONPATH=src python bench/wisp_texts.py humaneval.jsonl --device cpu -o cpu.json
PYTHONPATH=src python bench/wisp_texts.py humaneval.jsonl --device prompts --against cpu.json

`prompts` is the GPU with the kernels that read prompts on tensor cores; `nodes` is the same forward pass without them,
so that a prompt goes through it token by token, as an answer does. Each line of the file has a "prompt". Two texts may
part where two tokens are tied: the table shows their logits in the reference, and the program fails if they differ by
more than TIE (the CPU rounds activations to 8 bits, which moves logits by 0.03 rms).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from warpsmith.backend.base import LOGITS, Backend
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.model.tokenizer import Tokenizer
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

TIE = 0.15
LONGEST = 400  # tokens of a prompt: the last ones


def greedy(backend: Backend, prompt: list[int], count: int, one_by_one: bool) -> list[int]:
    state = backend.new_state(len(prompt) + count)
    output = None
    for first in range(0, len(prompt), 1 if one_by_one else len(prompt)):
        output = backend.prefill(state, prompt[first : first + 1] if one_by_one else prompt)
    assert output is not None
    assert output.argmax is not None
    token = int(output.argmax[-1])
    return [token, *backend.decode(state, token, count - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", choices=["cpu", "prompts", "nodes"], required=True)
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--against", type=Path, nargs="*", default=[])
    given = parser.parse_args()
    wisp = open_checkpoint(WISP)
    config = replace(read_config(wisp), context=LONGEST + given.tokens, mtp_layers=0)
    tokenizer = Tokenizer.from_gguf(wisp.metadata, str(wisp.path))
    lines = given.file.read_text().splitlines()[: given.samples]
    prompts = [tokenizer.encode(json.loads(line)["prompt"])[-LONGEST:] for line in lines]
    backend: Backend
    if given.device == "cpu":
        from warpsmith.backend.cpu import CpuBackend

        backend = CpuBackend(config, wisp.tensors)
    else:
        from warpsmith.backend.cuda.large.backend import LargeBackend

        backend = LargeBackend(config, wisp.tensors, prompts=given.device == "prompts")
    texts = [greedy(backend, prompt, given.tokens, given.device == "nodes") for prompt in prompts]
    if given.out:
        given.out.write_text(json.dumps(texts))
    return max([compare(config, wisp.tensors, prompts, texts, path) for path in given.against], default=0)


def compare(config, tensors, prompts: list[list[int]], texts: list[list[int]], path: Path) -> int:
    from warpsmith.backend.reference import ReferenceBackend

    reference, worst, parted = ReferenceBackend(config, tensors), 0.0, 0
    for number, (prompt, ours, theirs) in enumerate(zip(prompts, texts, json.loads(path.read_text()), strict=True)):
        differ = np.flatnonzero(np.array(ours) != np.array(theirs))
        if len(differ):
            at, parted = int(differ[0]), parted + 1
            past = [*prompt, *ours[:at]]
            logits = reference.prefill(reference.new_state(len(past)), past, LOGITS).logits
            assert logits is not None
            row = logits.numpy()[-1]
            gap = float(abs(row[ours[at]] - row[theirs[at]]))
            worst = max(worst, gap)
            print(f"prompt {number}, token {at}: {ours[at]} {row[ours[at]]:.3f}, {theirs[at]} {row[theirs[at]]:.3f}")
    count = len(prompts)
    print(f"against {path.name}: {count - parted} of {count} texts are the same, the largest gap is {worst:.3f}")
    return int(worst > TIE)


if __name__ == "__main__":
    sys.exit(main())
