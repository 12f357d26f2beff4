"""wisp in one command a run; every stage is its own process, so that one that fails does not take the rest along.

python -m train smoke --data carry --out OUT      speed probe, then every stage for a few seconds
python -m train first --data carry --out OUT      most of pretraining, at a constant rate
python -m train last  --data carry --out OUT      the rest with the rate going to zero, then the draft and the scores
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path


def stage(module: str, *arguments: object) -> bool:
    command = [sys.executable, "-u", "-m", f"train.{module}", *map(str, arguments)]
    started = time.monotonic()
    status = subprocess.run(command).returncode
    print(f"[{module}: exit {status} after {time.monotonic() - started:.0f} s]", flush=True)
    return status == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", choices=("smoke", "first", "last"))
    parser.add_argument("--data", type=Path, required=True, help="tokens_*.xz at any depth, heldout.npz, tokenizer/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--state", type=Path, default=Path("build/train"), help="kept on this machine between runs")
    parser.add_argument("--resume", type=Path, help="prefix of shards to continue from when there is no state")
    parser.add_argument("--pretrain-minutes", type=float)
    parser.add_argument("--draft-minutes", type=float, default=2.5)
    parser.add_argument("--generate-minutes", type=float, default=0.8)
    args, extra = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shared = ["--data", args.data, "--tokenizer", args.data / "tokenizer", "--out", args.out]
    wisp = args.out / "wisp"
    pretrain = ["--data", args.data, "--out", args.out, *extra]
    if args.run == "smoke":
        stage("probe")
        stage("pretrain", *pretrain, "--minutes", 0.8, "--log-every", 5)
        stage(
            "draft",
            "--target",
            wisp,
            *shared,
            "--generate-minutes",
            0.1,
            "--minutes",
            0.7,
            "--sequences",
            4096,
        )
        stage("evaluate", "--target", wisp, "--draft", args.out / "draft", *shared)
        return
    pretrain += ["--state", args.state]
    if args.resume:
        pretrain += ["--resume", args.resume]
    if args.run == "first":
        stage("pretrain", *pretrain, "--minutes", args.pretrain_minutes or 9.3)
        return
    decay = ["--warmup", 0.005, "--decay-from", 0.3]
    stage("pretrain", *pretrain, *decay, "--minutes", args.pretrain_minutes or 5.3)
    minutes = ["--minutes", args.draft_minutes, "--generate-minutes", args.generate_minutes]
    stage("draft", "--target", wisp, *shared, *minutes)
    stage("evaluate", "--target", wisp, "--draft", args.out / "draft", *shared)


if __name__ == "__main__":
    main()
