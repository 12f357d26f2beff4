"""Speed on one GPU beside what it must reach: random models of true shapes, each by `warpsmith bench`.

    python bench/cuda_speed.py [--files FOLDER] [--only 27B 9B 4B 0.8B] [--repetitions 5]

Makes the models it does not find in the folder (27B takes 16 GB of disk), runs `warpsmith bench` on each, times loading
the 27B from the page cache, and prints one table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TYPES = {"27B": "q4_k_m", "9B": "q4_k_m", "4B": "q4_k_m", "0.8B": "bf16"}
LOAD = """
import sys, time, warpsmith
start = time.perf_counter()
warpsmith.load(sys.argv[1], device="cuda", draft="none", context=1024)
print(time.perf_counter() - start)
"""
Row = tuple[str, str, str]  # what, measured, what it must reach


def warpsmith(*arguments: object) -> str:
    command = [sys.executable, "-m", "warpsmith.cli", *map(str, arguments)]
    print("$ warpsmith", *arguments, file=sys.stderr, flush=True)
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


class Bench:
    """Runs of `warpsmith bench` on one model."""

    def __init__(self, path: Path, repetitions: int) -> None:
        self.always = ["bench", "-m", path, "--device", "cuda", "-p", 0, "-r", repetitions, "-o", "json"]

    def run(self, depth: int, *arguments: object, trees: tuple[int, ...] = ()) -> tuple[dict[str, Any], dict[int, str]]:
        """Decoding at a depth; and passes over trees there, in passes over one node, by their nodes."""
        asked = ["--tree", ",".join(map(str, trees))] if trees else []
        records = json.loads(warpsmith(*self.always, "-n", 128, "-d", depth, "--bandwidth", *asked, *arguments))
        (decoded,) = [r for r in records if not r["n_nodes"]]
        return decoded, {r["n_nodes"]: f"{r['times_one_node']:.2f}" for r in records if r["n_nodes"]}


def load_seconds(path: Path) -> float:
    """After the runs before it: the file is in the page cache, and most kernels are built."""
    done = subprocess.run([sys.executable, "-c", LOAD, path], check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout)


def of_bandwidth(record: dict[str, Any]) -> str:
    return f"{record['median_ts']:.1f} tok/s, {record['bandwidth_reached']:.1%} of {record['bandwidth'] / 1e9:.0f} GB/s"


def rows_of(size: str, path: Path, repetitions: int) -> Iterator[Row]:
    bench, name = Bench(path, repetitions), f"{size} {TYPES[size].upper()}"
    must = {"27B": "205 tok/s", "9B": "75%", "4B": "75%", "0.8B": "2180 tok/s"}[size]
    decoded, passes = bench.run(520, trees={"27B": (16, 22), "0.8B": (22,)}.get(size, ()))
    yield f"{name} decode, depth 520", of_bandwidth(decoded), must
    if size == "27B":
        yield "16-node / 22-node forward, in forwards of one node", f"{passes[16]} / {passes[22]}", "1.20 / 1.30"
        for depth, cache, least in ((32768, "q8_0", 175), (131072, "q4_0", 140)):
            decoded, _ = bench.run(depth, "-ctk", cache, "-ctv", cache)
            yield f"decode, depth {depth}, {cache} cache", of_bandwidth(decoded), f"{least} tok/s"
        yield f"load, {path.stat().st_size / 1e9:.1f} GB in the page cache", f"{load_seconds(path):.1f} s", "15 s"
    if size == "0.8B":
        yield "22-node forward, in forwards of one node", passes[22], "1.6"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=Path, help="a folder that has or gets the models, SIZE-TYPE.gguf")
    parser.add_argument("--only", nargs="+", choices=list(TYPES), default=list(TYPES), metavar="SIZE")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    print("| | measured | must reach |\n|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.files or Path(temporary)
        for size in given.only:
            path = folder / f"{size}-{TYPES[size]}.gguf"
            if not path.exists():
                warpsmith("synth", size, path, "--type", TYPES[size])
            for row in rows_of(size, path, given.repetitions):
                print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
