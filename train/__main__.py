"""wisp from nothing but this folder: fetch the packages, train model and draft, write the GGUF files and the tables.

python -m train --work DIR                                    everything, in the steps that made the files that ship
python -m train --work DIR --stages pretrain draft            some of it: stages find the earlier ones' results in DIR
python -m train --work DIR --smoke --wheels FEW_WHEELS        every stage in small, on any machine, to see that it runs

Training wants a large NVIDIA GPU (an H200: eleven minutes of pretraining, three for the draft); the stages before it
and after it need none, and only the first a network: DIR may move from machine to machine. Every stage is a process of
its own with pinned seeds; pretraining that was interrupted goes on from where it was. DIR/out/log.txt has it all.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# How long the runs were that made the files in the package.
PRETRAINING_STEPS, DRAFT_STEPS = 1440, 1030
FEATURES = "1,3,5,6"
SMALL_STEP = ["--steps", 4, "--save-every", 2, "--log-every", 1, "--no-compile"]
SMALL_STEP += ["--length", 64, "--batch-tokens", 256, "--micro-tokens", 128]
SMALL_TEXT = ["--sequences", 6, "--corpus-sequences", 6, "--prompt", 16, "--new", 24, "--batch", 2, "--anchors", 2]


class Log:
    """Runs a module as a process of its own; what it prints is shown, and kept in one file for all stages."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def write(self, line: str) -> None:
        print(line, end="", flush=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)

    def run(self, module: str, *arguments: object) -> None:
        options = ["-m", module, *map(str, arguments)]
        self.write(f"$ python {shlex.join(options)}\n")
        started = time.monotonic()
        command = [sys.executable, "-u", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout
            for line in process.stdout:
                self.write(line)
        self.write(f"[{module}: exit {process.returncode} after {time.monotonic() - started:.0f} s]\n")
        if process.returncode:
            raise SystemExit(process.returncode)


def stages(args: argparse.Namespace, run: Callable[..., None]) -> dict[str, Callable[[], None]]:
    """What is run, in order, each by the name it has on the command line."""
    work: Path = args.work
    corpus, packs, tokenizer, out = work / "corpus", work / "packs", work / "tokenizer", work / "out"
    wheels, gguf, model = args.wheels or work / "wheels", args.gguf or work / "gguf", work / "wisp"
    build = ["--wheels", wheels, "--corpus", corpus, *(["--benchmark", args.benchmark] if args.benchmark else [])]
    build += ["--report", work / "DATA.md", "--heldout-bytes", 40_000] if args.smoke else []
    training = ["--data", packs, "--out", out, "--state", work / "state"]
    training += SMALL_STEP if args.smoke else ["--steps", PRETRAINING_STEPS]
    draft = ["--target", model, "--data", packs, "--out", out, "--features", FEATURES]
    draft += [*SMALL_TEXT, "--steps", 2] if args.smoke else ["--steps", DRAFT_STEPS]
    few = ["--prompts", 4, "--prompt", 16, "--new", 24, "--length", 64, "--rows", 2] if args.smoke else []
    tables = ["--model", gguf / "wisp.gguf", "--draft", gguf / "wisp-dflash.gguf", "--heldout", packs / "heldout.npz"]
    tables += ["--humaneval", args.benchmark] if args.benchmark else []
    tables += ["--samples", 1, "-n", 16, "--tables", "chain", "mtp"] if args.smoke else []

    def pretrain() -> None:
        run("train.pretrain", *training)
        run("train.shards", out / "wisp", model, tokenizer)

    def export() -> None:
        run("train.plot", out / "pretrain.json", out)
        gguf.mkdir(parents=True, exist_ok=True)
        (gguf / "wisp.gguf").unlink(missing_ok=True)
        run("warpsmith.cli", "convert", model, gguf / "wisp.gguf", "--type", "q8_0")
        shutil.copy(out / "draft.gguf", gguf / "wisp-dflash.gguf")

    return {
        "fetch": lambda: run("train.data", "fetch", "--wheels", wheels),
        "build": lambda: run("train.data", "build", *build),
        "tokenizer": lambda: run("train.tokenizer", "--corpus", corpus, "--out", tokenizer),
        "pack": lambda: run("train.data", "pack", "--corpus", corpus, "--tokenizer", tokenizer, "--out", packs),
        "pretrain": pretrain,
        "draft": lambda: run("train.draft", *draft),
        "evaluate": lambda: run(
            "train.evaluate", "--target", model, "--draft", out / "draft", "--data", packs, "--out", out, *few
        ),
        "export": export,
        "card": lambda: run("train.card", *tables),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    nothing = argparse.Namespace(work=Path(), wheels=None, gguf=None, benchmark=None, smoke=False)
    names = list(stages(nothing, print))
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="where everything is kept")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, help="run only these (default: all)")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages fetched before; left alone")
    parser.add_argument("--gguf", type=Path, metavar="DIR", help="where the two GGUF files go (default: DIR/gguf)")
    parser.add_argument("--benchmark", type=Path, metavar="FILE", help="JSONL prompts to keep out and to measure with")
    parser.add_argument("--smoke", action="store_true", help="a few steps of everything")
    args = parser.parse_args()
    todo = stages(args, Log(args.work / "out" / "log.txt").run)
    for name in names:
        if name in args.stages and not (name == "fetch" and args.wheels):
            todo[name]()


if __name__ == "__main__":
    main()
