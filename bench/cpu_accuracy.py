"""How far are the CPU engine's logits from the reference's, on the very same file?

    python bench/cpu_accuracy.py --prompts train/heldout_prompts.jsonl

wisp is stored in every weight type that has kernels. Both backends read each of these files and the same texts; the
reference computes in fp32. What differs is what the engine rounds: activations to 8 bits before quantised weights, keys
and values to their type. So the table says what the engine adds to a file's own error, which its second column shows:
how far the reference on this file is from the reference on wisp as it is shipped.

`OPENBLAS_NUM_THREADS=1` makes the reference several times faster where the cores are busy.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from warpsmith.checkpoint.canonical import open_checkpoint
from warpsmith.checkpoint.convert import to_gguf
from warpsmith.checkpoint.quantize import RECIPES
from warpsmith.llm import LLM, load
from warpsmith.measure.prompts import read_prompts
from warpsmith.wisp import WISP


def logits_of(llm: LLM, texts: Sequence[str]) -> np.ndarray:
    """Logits after every token of every text, one row each."""
    return np.concatenate([llm.score(llm.tokenizer.encode(text)) for text in texts])


def relative_error(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Of each row."""
    return np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)


def lost_margins(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where the likeliest token is another: by how much the expected logits prefer their own."""
    rows, chosen = np.arange(len(expected)), found.argmax(axis=1)
    differs = chosen != expected.argmax(axis=1)
    return (expected.max(axis=1) - expected[rows, chosen])[differs]


def files(scratch: Path) -> dict[str, Path]:
    """wisp in every type, beginning with the very weights that are shipped, as floats."""
    floats = scratch / "f32.gguf"
    original = open_checkpoint(WISP)
    to_gguf(original, original.metadata, floats, "f32")
    made = {"f32": floats, "q8_0": WISP}
    checkpoint = open_checkpoint(floats)
    for recipe in RECIPES:
        if recipe not in made:
            made[recipe] = scratch / f"{recipe}.gguf"
            to_gguf(checkpoint, checkpoint.metadata, made[recipe], recipe)
    return {recipe: made[recipe] for recipe in RECIPES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, help="a JSONL file with a `prompt` a line")
    parser.add_argument("--samples", type=int, default=20, help="texts to read (default: 20)")
    parser.add_argument("--threads", type=int, help="of the CPU engine")
    args = parser.parse_args()
    texts = read_prompts(args.prompts, args.samples)

    with tempfile.TemporaryDirectory() as scratch:
        shipped = None
        for recipe, path in files(Path(scratch)).items():
            with load(path, device="reference") as llm:
                expected = logits_of(llm, texts)
            if shipped is None:
                shipped = expected
                lead = np.median(np.diff(np.partition(shipped, -2, axis=1)[:, -2:], axis=1))
                print(f"wisp, {len(shipped)} positions of {len(texts)} texts; the best logit leads by {lead:.2f}\n")
                print("| file | its own error | keys, values | relative error | worst | same token | margins lost |")
                print("|---|---|---|---|---|---|---|")
            own = relative_error(expected, shipped).mean()
            for kind in ("f16", "q8_0"):
                with load(path, device="cpu", threads=args.threads, cache_type_k=kind, cache_type_v=kind) as llm:
                    found = logits_of(llm, texts)
                errors, lost = relative_error(found, expected), lost_margins(found, expected)
                margins = f"median {np.median(lost):.3f}, largest {lost.max():.3f}" if len(lost) else ""
                print(
                    f"| {recipe} | {own:.2g} | {kind} | {errors.mean():.2g} | {errors.max():.2g} "
                    f"| {1 - len(lost) / len(errors):.2%} | {margins} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
