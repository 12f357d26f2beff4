"""Perplexity of wisp in several types of weights, on one text, by every engine at hand.

    python bench/perplexity.py [--types q4_k_m q5_k_m q6_k q8_0] [--devices cpu cuda] [--llamacpp] [--tokens 4096]

Each type is made from the values of the file in the package; the text is what the model's training never saw
(train/heldout_prompts.jsonl). Windows of 512 tokens, every token of a window but its first counts. cuda runs the
activations-first pass, whose products take the file's own blocks. llama.cpp reads the same file on the CPU (`pip
install cyllama`), activations rounded as its kernels do.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from warpsmith.backend.base import Want
from warpsmith.backend.devices import backend_for
from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.convert import to_gguf
from warpsmith.model.tokenizer import Tokenizer
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

WINDOW = 512
TEXT = Path(__file__).parents[1] / "train" / "heldout_prompts.jsonl"
Score = Callable[[list[int]], np.ndarray]  # logits after every token of a window


def windows(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    texts = [json.loads(line)["prompt"] for line in TEXT.read_text().splitlines()]
    ids = tokenizer.encode("\n\n".join(texts))[:count]
    return [ids[i : i + WINDOW] for i in range(0, len(ids) - 1, WINDOW)]


def make(path: Path, kind: str) -> None:
    """From the values of the file in the package, which are Q8_0's."""
    original = open_checkpoint(WISP)
    floats = path.with_name("wisp-f32.gguf")
    if not floats.exists():
        to_gguf(original, original.metadata, floats, "f32")
    checkpoint = open_checkpoint(floats)
    to_gguf(checkpoint, checkpoint.metadata, path, kind)


def ours(device: str, path: Path) -> Score:
    checkpoint = open_checkpoint(path)
    config = read_config(checkpoint)
    if device == "cuda":
        from warpsmith.backend.cuda.large.backend import LargeBackend

        backend = LargeBackend(config, checkpoint.tensors, context=WINDOW)
    else:
        backend = backend_for(device, checkpoint, config, WINDOW)

    def score(ids: list[int]) -> np.ndarray:
        output = backend.prefill(backend.new_state(WINDOW), ids, Want("logits", every_row=True))
        return output.logits.numpy()

    return score


def llamacpp(path: Path) -> Score:
    from cyllama.llama import llama_cpp  # type: ignore[import-not-found]

    vocab = read_config(open_checkpoint(path)).vocab

    class Model(llama_cpp.LlamaModel):  # type: ignore[misc]
        n_vocab = vocab  # get_logits_ith asks for it, and cyllama 0.2.18 has it not

    parameters = llama_cpp.LlamaContextParams()
    parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = WINDOW
    context = llama_cpp.LlamaContext(Model(str(path), llama_cpp.LlamaModelParams()), parameters, verbose=False)

    def score(ids: list[int]) -> np.ndarray:
        context.kv_cache_clear()
        batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1)
        for position, token in enumerate(ids):
            batch.add(token, position, [0], True)
        context.decode(batch)
        return np.array([context.get_logits_ith(i) for i in range(len(ids))])

    return score


def perplexity(score: Score, pieces: list[list[int]]) -> float:
    total, count = 0.0, 0
    for ids in pieces:
        logits = score(ids)[:-1].astype(np.float64)
        peak = logits.max(axis=1)
        logsumexp = peak + np.log(np.exp(logits - peak[:, None]).sum(axis=1))
        total += float((logsumexp - logits[np.arange(len(ids) - 1), ids[1:]]).sum())
        count += len(ids) - 1
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=["q4_k_m", "q5_k_m", "q6_k", "q8_0"])
    parser.add_argument("--devices", nargs="+", default=["cpu"])
    parser.add_argument("--llamacpp", action="store_true")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--files", type=Path, help="a folder that has or gets the files, wisp-TYPE.gguf")
    given = parser.parse_args()
    engines = [*given.devices, *["llama.cpp"] * given.llamacpp]
    print("| wisp | " + " | ".join(engines) + " |\n|---|" + "---|" * len(engines))
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.files or Path(temporary)
        for kind in given.types:
            path = folder / f"wisp-{kind}.gguf"
            if not path.exists():
                make(path, kind)
            tokenizer = Tokenizer.from_gguf(open_checkpoint(path).metadata, str(path))
            pieces = windows(tokenizer, given.tokens)
            scores = [llamacpp(path) if engine == "llama.cpp" else ours(engine, path) for engine in engines]
            cells = [f"{perplexity(score, pieces):.3f}" for score in scores]
            print(f"| {kind.upper()} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
