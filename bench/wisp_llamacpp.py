"""Does llama.cpp, reading the same GGUF file, write what our reference backend writes?

    pip install llama-cpp-python
    python bench/wisp_llamacpp.py --prompts train/heldout_prompts.jsonl --samples 20 -n 64

The reference continues each prompt greedily, in fp32. llama.cpp then reads the prompt and the same tokens one by one,
and at every place its likeliest token should be the one that follows: as long as it is, llama.cpp by itself would
have written the same text. Its kernels round activations to 8 bits before every product with a Q8_0 weight, so where
the two best tokens nearly tie it may choose the other. Two controls tell such ties from a mistake: our cpu backend,
which rounds activations too, and llama.cpp on a copy of the file with the same weights in fp32, where it rounds
nothing. Every place where any of them chooses another token is listed with its margins.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from warpsmith.backend.base import LOGITS, Backend
from warpsmith.backend.devices import backend_for
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import Checkpoint, open_checkpoint
from warpsmith.checkpoint.convert import to_gguf
from warpsmith.llm import LLM
from warpsmith.measure.prompts import read_prompts
from warpsmith.model.weights import read_config
from warpsmith.wisp import WISP

CONTEXT = 2048
Feed = Callable[[Sequence[int]], np.ndarray]  # takes the next tokens of a text, gives the logits after the last


def ours(backend: Backend) -> Feed:
    """A text on one of our backends: its first tokens are prefilled, the later ones decoded."""
    state = backend.new_state(CONTEXT)

    def feed(tokens: Sequence[int]) -> np.ndarray:
        if state.length == 0:
            output = backend.prefill(state, tokens, LOGITS)
        else:
            output = backend.forward([(state, Tree.chain(list(tokens)))], LOGITS)
            backend.commit(state, list(range(len(tokens))))
        assert output.logits is not None
        return output.logits.numpy()[-1].astype(np.float64)

    return feed


class LlamaCpp:
    """A GGUF file in llama.cpp, its KV cache in fp32 as ours is in the reference."""

    def __init__(self, path: Path, threads: int) -> None:
        from llama_cpp import GGML_TYPE_F32, Llama  # type: ignore[import-not-found]

        self.model = Llama(
            model_path=str(path),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            type_k=GGML_TYPE_F32,
            type_v=GGML_TYPE_F32,
            logits_all=True,
            verbose=False,
        )

    def encode(self, text: str) -> list[int]:
        return self.model.tokenize(text.encode(), add_bos=False, special=True)

    def text(self) -> Feed:
        self.model.reset()

        def feed(tokens: Sequence[int]) -> np.ndarray:
            self.model.eval(list(tokens))
            return self.model.scores[self.model.n_tokens - 1].astype(np.float64)

        return feed


@dataclass
class Difference:
    engine: str
    prompt: int
    place: int
    tokens: tuple[int, int]  # the reference's choice, the other's
    margins: tuple[float, float]  # of each over the other's choice, in its own logits


@dataclass
class Agreement:
    """How an engine's logits compare with the reference's along the reference's texts."""

    name: str
    same_texts: int = 0
    places: int = 0
    errors: list[float] = field(default_factory=list)  # of the reference's best token minus its second best
    differences: list[Difference] = field(default_factory=list)

    def add(self, prompt: int, expected: list[np.ndarray], found: list[np.ndarray]) -> None:
        before = len(self.differences)
        for place, (mine, theirs) in enumerate(zip(expected, found, strict=True)):
            second, first = np.argsort(mine, kind="stable")[-2:]
            self.errors.append(float((theirs[first] - theirs[second]) - (mine[first] - mine[second])))
            a, b = int(mine.argmax()), int(theirs.argmax())
            if a != b:
                margins = (float(mine[a] - mine[b]), float(theirs[b] - theirs[a]))
                self.differences.append(Difference(self.name, prompt, place, (a, b), margins))
        self.places += len(expected)
        self.same_texts += len(self.differences) == before

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.errors))))


def greedy(feed: Feed, prompt: Sequence[int], count: int, stop: frozenset[int]) -> tuple[list[int], list[np.ndarray]]:
    """Tokens written after the prompt, and the logits that each was chosen from."""
    ids: list[int] = []
    logits = [feed(prompt)]
    while True:
        ids.append(int(logits[-1].argmax()))
        if len(ids) == count or ids[-1] in stop:
            return ids, logits
        logits.append(feed(ids[-1:]))


def follow(feed: Feed, prompt: Sequence[int], ids: Sequence[int]) -> list[np.ndarray]:
    """The logits another engine would have chosen each of `ids` from."""
    return [feed(prompt), *(feed([token]) for token in ids[:-1])]


def float_copy(checkpoint: Checkpoint, path: Path) -> Path:
    to_gguf(checkpoint, checkpoint.metadata, path, "f32")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=WISP, help="a GGUF file (default: wisp)")
    parser.add_argument("--prompts", required=True, help="a JSONL file with a `prompt` a line")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp")
    args = parser.parse_args()

    checkpoint = open_checkpoint(args.model)
    config = read_config(checkpoint)
    reference, cpu = (backend_for(device, checkpoint, config) for device in ("reference", "cpu"))
    tokenizer = LLM(reference, checkpoint, CONTEXT).tokenizer
    prompts = read_prompts(args.prompts, args.samples)
    with tempfile.TemporaryDirectory() as scratch:
        as_is = LlamaCpp(args.model, args.threads)
        in_floats = LlamaCpp(float_copy(checkpoint, Path(scratch) / "f32.gguf"), args.threads)
        engines: dict[str, Callable[[], Feed]] = {
            "llama.cpp": as_is.text,
            "warpsmith cpu": lambda: ours(cpu),
            "llama.cpp, weights in fp32": in_floats.text,
        }
        agreements = {name: Agreement(name) for name in engines}
        same_prompts = 0
        for number, text in enumerate(prompts, start=1):
            prompt = tokenizer.encode(text)
            same_prompts += as_is.encode(text) == prompt
            ids, logits = greedy(ours(reference), prompt, args.tokens, tokenizer.eos_ids)
            for name, start in engines.items():
                agreements[name].add(number, logits, follow(start(), prompt, ids))

    print(f"{args.model.name}, {len(prompts)} prompts; {same_prompts} of them have the same tokens in llama.cpp\n")
    print("| compared with the reference | same texts | same tokens | margin's error, RMS | largest |")
    print("|---|---|---|---|---|")
    for a in agreements.values():
        agreed, largest = a.places - len(a.differences), max(map(abs, a.errors))
        print(f"| {a.name} | {a.same_texts} of {len(prompts)} | {agreed} of {a.places} | {a.rms:.2g} | {largest:.2g} |")
    print("\n| engine | prompt | place | reference's choice | its margin | other choice | its margin |")
    print("|---|---|---|---|---|---|---|")
    for d in (d for a in agreements.values() for d in a.differences):
        a, b = (repr(tokenizer.decode([token])).replace("|", r"\|") for token in d.tokens)
        print(f"| {d.engine} | {d.prompt} | {d.place + 1} | `{a}` | {d.margins[0]:.4f} | `{b}` | {d.margins[1]:.4f} |")


if __name__ == "__main__":
    main()
