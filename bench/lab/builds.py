"""What every build of the forward kernel takes, without a GPU: registers, stack, spills, bytes of machine code.

PYTHONPATH=src python bench/lab/builds.py [--sizes 0.8B 4B] [--types BF16 Q8_0 Q4_0] [--nodes 1 24] [--chip h200]

Run it before and after a change: a few spilled registers undo everything (docs/megakernel.md).
"""

from __future__ import annotations

import argparse
import re
from concurrent.futures import ThreadPoolExecutor
from itertools import product

from warpsmith.backend.cuda.build.compiler import compile_source, sources, target
from warpsmith.backend.cuda.build.profiles import load_profiles
from warpsmith.backend.cuda.builds import VARIANTS, build_constants, build_options
from warpsmith.backend.cuda.memory.driver import Chip
from warpsmith.backend.cuda.memory.layout import Layout
from warpsmith.backend.cuda.schedule import busy_sms
from warpsmith.model.config import SIZES
from warpsmith.model.weights import expected_shapes

KERNEL = "forward/forward.cu"


def row(chip_name: str, size: str, kind: str, nodes: int) -> str:
    profile, model = load_profiles()[chip_name], SIZES[size]
    chip = Chip(profile.name, profile.capability, profile.sms, profile.shared_memory)
    layout = Layout(model, min(profile.sms, busy_sms(model)), dict.fromkeys(expected_shapes(model), kind))
    constants = build_constants(layout, chip, profile, nodes)
    architecture = target(profile.capability)
    options = ("--ptxas-options=-v", *build_options(KERNEL, layout, architecture))
    image, log = compile_source(sources()[KERNEL], KERNEL, architecture, constants, options)

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    stores, loads = number(r"(\d+) bytes spill stores"), number(r"(\d+) bytes spill loads")
    registers, stack = number(r"Used (\d+) registers"), number(r"(\d+) bytes stack frame")
    return f"| {size} {kind} | {nodes} | {registers} | {stack} | {stores} / {loads} | {len(image)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", default=["0.8B"], choices=list(SIZES))
    parser.add_argument("--types", nargs="+", default=["BF16", "Q8_0"])
    parser.add_argument("--nodes", nargs="+", type=int, default=list(VARIANTS))
    parser.add_argument("--chip", default="h200", choices=list(load_profiles()))
    arguments = parser.parse_args()
    print("| model | nodes | registers | stack | spill stores / loads | bytes |\n|---|---|---|---|---|---|")
    builds = list(product([arguments.chip], arguments.sizes, arguments.types, arguments.nodes))
    with ThreadPoolExecutor(2) as pool:
        for line in pool.map(lambda build: row(*build), builds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
