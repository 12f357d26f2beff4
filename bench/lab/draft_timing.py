"""How long a DFlash draft of the 27B's true shape takes on a GPU, random weights, and where its clocks go.

PYTHONPATH=src python bench/lab/draft_timing.py [--depths 520 4096] [--types bf16 q4_k_m] [--speaks 98304]
    [--own-head] [--set IN_FLIGHT=6,BETWEEN=2] [--profile]
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import numpy as np
from large_timing import milliseconds, random_model

from warpsmith.backend.base import Want
from warpsmith.backend.cuda.draft.network import CudaDraft, CudaMemory
from warpsmith.backend.cuda.large.backend import LargeBackend
from warpsmith.backend.cuda.rows import CudaRows
from warpsmith.checkpoint.canonical import Tensor
from warpsmith.checkpoint.convert import tensor_type
from warpsmith.checkpoint.dflash import DFlashConfig, DraftFile, expected_shapes
from warpsmith.checkpoint.dflash_writer import to_gguf_name
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import weight_bytes
from warpsmith.model.synthetic_draft import LAYERS, draft_of

CAPACITY, ACCEPTED, MARKS = 4096, 8, 4096


def random_draft(config: DFlashConfig, recipe: str) -> DraftFile:
    """Tensors of one shape and type share their bytes."""
    kept, tensors = {}, {}
    for name, shape in expected_shapes(config).items():
        stored = to_gguf_name(name)
        kind = tensor_type(recipe, stored, shape, config.layers, tied=False)
        if (shape, kind) not in kept:
            pieces = [piece.reshape(-1) for piece in weight_bytes(0, stored, kind, shape)]
            kept[shape, kind] = np.concatenate(pieces).reshape(-1, kind.row_bytes(shape[-1]))
        tensors[name] = Tensor(name, kind, shape, lambda raw=kept[shape, kind]: raw)
    return DraftFile(config, tensors)


def waiting(backend: LargeBackend, network: CudaDraft, memory: CudaMemory, rows: int, depth: int) -> None:
    """Features of so many rows, and as many remembered as there are tokens."""
    config = network.config
    offsets = np.arange(rows)[:, None] + np.arange(len(config.target_layers)) * rows
    memory.appended, memory.position, memory.waiting = min(depth, CAPACITY) - rows, depth - rows, 0
    network.append(
        memory, CudaRows(backend.outputs.features, offsets * config.hidden, config.hidden, lambda: True), depth - rows
    )


def timings(backend: LargeBackend, network: CudaDraft, depth: int) -> None:
    memory, want = network.new_memory(), Want(tokens="top", top=16)
    memory.buffers["positions"].write(np.arange(CAPACITY, dtype=np.int32))
    for name in ("keys", "values"):
        memory.buffers[name].clear()
    backend.outputs.features.clear()

    def block(rows: int) -> None:
        request = network.request(7, depth, Want(tokens="top"))
        memory.waiting, memory.position, memory.appended = rows, depth - rows, min(depth, CAPACITY) - rows
        network.launch(memory, request)

    for name, run in {
        "draft, nothing to append": lambda: block(0),
        f"draft, {ACCEPTED} rows to append": lambda: block(ACCEPTED),
        "gather": lambda: waiting(backend, network, memory, ACCEPTED, depth),
        "top 16": lambda: network.top.tokens_of(15, want, offset=network._logits_at),
    }.items():
        print(f"depth {depth}: {name} {milliseconds(backend, run, 11):.3f} ms")

    def append_only() -> None:
        memory.waiting, memory.position, memory.appended = 16, depth - 16, min(depth, CAPACITY) - 16
        network.project(memory)

    print(f"depth {depth}: 16 rows appended alone {milliseconds(backend, append_only, 11):.3f} ms")
    walls = []
    for _ in range(12):
        waiting(backend, network, memory, ACCEPTED, depth)
        backend.device.synchronize()
        start = time.perf_counter()
        network.fill(memory, 7, depth, 15, want)
        walls.append(1e3 * (time.perf_counter() - start))
    print(f"depth {depth}: fill as the host sees it {statistics.median(walls[2:]):.3f} ms")


def print_profile(backend: LargeBackend, network: CudaDraft, depth: int) -> None:
    """Clocks of the steps of one launch: mean and slowest SM."""
    memory = network.new_memory()
    memory.buffers["positions"].write(np.arange(CAPACITY, dtype=np.int32))
    for _ in range(3):
        memory.waiting, memory.position, memory.appended = ACCEPTED, depth - ACCEPTED, depth - ACCEPTED
        backend.profile.clear()
        network.launch(memory, network.request(7, depth, Want(tokens="top")))
        backend.device.synchronize()
    marks = backend.profile.read(np.int64, (backend.chip.sms, MARKS // 2, 2))
    took, waits = np.diff(marks[:, :, 0], axis=1), marks[:, 1:, 1]
    # what is made of the sums before a stage, then the stage
    steps = [("fc", "start"), ("fc", "operands"), ("fc", "products")]
    for stage in ("context", *("in", "out", "mlp_in", "mlp_out") * LAYERS, "head"):
        mixed = ("rows", "parts") if stage == "out" else ()
        steps += [(stage, step) for step in ("wait", *mixed, "work", "operands", "products")]
    further = len(backend.lend_head().deal.first) - 1  # of the head's rounds
    steps += [("head", step) for step in (*("wait", "operands", "products") * further, "last sums")]
    found: dict[tuple[str, str], list[int]] = {}
    for at, step in enumerate(steps):
        found.setdefault(step, []).append(at)
    print(f"clocks in all {took[:, : len(steps)].sum(axis=1).mean():.0f}: stage, step, times, mean / slowest SM")
    for (stage, step), where in found.items():
        waited = f", for weights {waits[:, where].mean():.0f}" if step == "products" else ""
        clocks = took[:, where]
        print(f"  {stage:8} {step:14} {len(where):2} x {clocks.mean():7.0f} / {clocks.max(axis=0).mean():7.0f}{waited}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[520, 4096])
    parser.add_argument("--types", nargs="+", default=["bf16"], help="weight types of the draft's file")
    parser.add_argument("--speaks", type=int, help="so many first tokens of the vocabulary only")
    parser.add_argument("--own-head", action="store_true", help="with an LM head of its own, of the draft's types")
    parser.add_argument(
        "--set", nargs="+", default=[""], metavar="NAME=VALUE,...", help="constants of the draft's kernels, by turns"
    )
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    target = SIZES["27B"]
    options = {"PROFILE": MARKS} if given.profile else {}
    start = time.perf_counter()
    backend = LargeBackend(target, random_model(target, "q4_k_m"), context=8192, options=options)
    print(f"target loaded in {time.perf_counter() - start:.1f} s")
    for recipe in given.types:
        file = random_draft(replace(draft_of(target), speaks=given.speaks, own_head=given.own_head), recipe)
        for setting in given.set:
            backend.options = options | dict(pair.split("=") for pair in setting.split(",") if pair)
            start = time.perf_counter()
            network = CudaDraft(backend, file.config, file.tensors, [CAPACITY] * LAYERS)
            took, held = time.perf_counter() - start, network.layout.stream.stream_bytes
            print(f"draft in {recipe} {setting} loaded in {took:.1f} s, {held / 1e9:.2f} GB")
            for depth in given.depths:
                timings(backend, network, depth)
            if given.profile:
                print_profile(backend, network, given.depths[0])


if __name__ == "__main__":
    main()
