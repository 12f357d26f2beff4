"""`warpsmith bench`: llama-bench's tests, defaults and table. `warpsmith bench spec` has a file of its own."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from warpsmith import __version__
from warpsmith.cli import bench_spec
from warpsmith.cli.escape import printable
from warpsmith.cli.options import (
    introduce,
    model_arguments,
    natural,
    open_model,
    sampler_arguments,
    sampler_keywords,
    whole,
)
from warpsmith.cli.terminal import aside
from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.backend.base import Snapshot
    from warpsmith.llm import LLM
    from warpsmith.measure.speed import Case, Result


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p", "--n-prompt", type=_numbers, default=[512], metavar="N,...", help="prompt lengths (default: 512)"
    )
    parser.add_argument(
        "-n", "--n-gen", type=_numbers, default=[128], metavar="N,...", help="tokens to generate (default: 128)"
    )
    parser.add_argument(
        "-d",
        "--n-depth",
        type=_numbers,
        default=[0],
        metavar="N,...",
        help="tokens already in the context (default: 0)",
    )
    parser.add_argument(
        "-b",
        "--batch",
        type=_numbers,
        default=[1],
        metavar="N,...",
        help="sequences that generate side by side (default: 1)",
    )
    parser.add_argument(
        "--first",
        type=_numbers,
        default=[],
        metavar="N,...",
        help="also time the first token of N-token prompts",
    )
    parser.add_argument(
        "--tree", type=_numbers, default=[], metavar="N,...", help="also time forward passes over trees of N nodes"
    )
    parser.add_argument(
        "--bandwidth",
        action="store_true",
        help="also measure how fast memory is read, and how much of that each test reaches",
    )
    parser.add_argument(
        "-r", "--repetitions", type=natural, default=5, metavar="N", help="times each test is run (default: 5)"
    )
    parser.add_argument(
        "-o", "--output", choices=("md", "json", "jsonl", "csv"), default="md", help="how to print (default: md)"
    )
    sampling = parser.add_argument_group("sampling", "Naming one of these also times sampled generation.")
    sampler_arguments(sampling, defaults=False)
    model_arguments(parser)
    kinds = parser.add_subparsers(dest="kind", metavar="KIND")
    help = "speculation against plain decoding on given prompts"
    bench_spec.arguments(kinds.add_parser("spec", help=help, description=help.capitalize() + ".", allow_abbrev=False))


def main(args: argparse.Namespace) -> int:
    if args.kind == "spec":
        return bench_spec.main(args)
    from warpsmith.backend.sampling import Sampling
    from warpsmith.backend.tree import MAX_NODES
    from warpsmith.engine.request import check_sampling
    from warpsmith.measure.speed import against_one_node, measure, measure_first, reached
    from warpsmith.measure.table import record, table

    tests = _tests(args)
    if not tests:
        raise BadRequest("There is nothing to measure: -p and -n are both 0.", "Give one of them a length.")
    if max(args.tree, default=0) > MAX_NODES:
        raise BadRequest(f"A tree has at most {MAX_NODES} nodes, not {max(args.tree)}.", "Ask for smaller trees.")
    if max(args.batch) > MAX_NODES:
        raise BadRequest(
            f"At most {MAX_NODES} sequences can be run side by side, not {max(args.batch)}.", "Ask for fewer."
        )
    if args.draft not in ("auto", "none"):
        raise BadRequest("bench measures plain decoding.", "Leave --draft out, or use `bench spec`.")
    args.draft = "none"
    needed = max(2, *(test.context for test in tests))
    args.ctx_size = args.ctx_size or needed
    if args.ctx_size < needed:
        raise BadRequest(f"These tests take {needed} tokens of context, not {args.ctx_size}.", "Leave -c out.")
    with open_model(args) as llm:
        for test in tests:
            check_sampling(test.sampling or Sampling(), llm.config.vocab)
        introduce(args, llm)
        facts = _facts(llm)
        bandwidth = _bandwidth(llm) if args.bandwidth else None
        measured: dict[int, Result] = {}
        pasts: dict[int, Snapshot] = {}  # a long past is read once for all tests on top of it
        for i in sorted(range(len(tests)), key=lambda i: tests[i].depth):
            aside(f"{tests[i].name} ...")
            if tests[i].first:
                measured[i] = measure_first(llm, tests[i], args.repetitions)
            else:
                measured[i] = measure(llm.backend, tests[i], args.repetitions, pasts=pasts)
        results = [measured[i] for i in range(len(tests))]
        records = [record(result, facts) for result in results]
        for result, each in zip(results, records, strict=True):
            if args.tree:
                each["times_one_node"] = against_one_node(result, results)
            if bandwidth is not None:
                each["bandwidth"] = bandwidth
                each["bandwidth_reached"] = reached(result, llm.backend, bandwidth)
    print(table(records, args.output))
    return 0


def _tests(args: argparse.Namespace) -> list[Case]:
    from warpsmith.backend.sampling import Sampling
    from warpsmith.measure.speed import Case

    given = sampler_keywords(args)
    prompts = [Case(n, 0, depth) for depth in args.n_depth for n in args.n_prompt if n]
    ways = [None, Sampling(**given)] if given else [None]  # greedy, for comparison, and as asked
    texts = [
        Case(0, n, depth, sampling=way, sequences=sequences)
        for depth in args.n_depth
        for n in args.n_gen
        for way in ways
        for sequences in args.batch
        if n and sequences
    ]
    sizes = sorted({1, *args.tree} - {0}) if args.tree else []  # one node is what the others are compared with
    firsts = [Case(n, 0, first=True) for n in args.first if n]
    return prompts + firsts + texts + [Case(0, 0, depth, n) for depth in args.n_depth for n in sizes]


def _bandwidth(llm: LLM) -> float:
    aside("bandwidth ...")
    measured = llm.backend.read_bandwidth()
    if measured is None:
        raise BadRequest(f"The {llm.device} device does not measure its memory.", "Leave --bandwidth out.")
    return measured


def _facts(llm: LLM) -> dict[str, Any]:
    from warpsmith.backend.devices import gpus
    from warpsmith.measure import machine

    settings = llm.backend.settings
    aside(", ".join(f"{name} {value}" for name, value in settings.items()))
    found, _ = gpus()
    return {
        "build_commit": __version__,
        "cpu_info": machine.cpu_model(),
        "gpu_info": ", ".join(gpu["name"] for gpu in found),
        "backends": llm.device,
        "n_threads": machine.usable_cores(),
        **settings,
        "model_filename": printable(str(llm.checkpoint.path)),
        "model_type": printable(_model_type(llm)),
        "model_size": llm.checkpoint.nbytes,
        "model_n_params": llm.checkpoint.parameters,
    }


def _model_type(llm: LLM) -> str:
    """qwen35 27B Q4_K_M"""
    from warpsmith.checkpoint.convert import FILE_TYPES
    from warpsmith.model.config import SIZES

    config = llm.config
    sizes = {(c.layers, c.hidden): name for name, c in SIZES.items()}
    names = {number: name.upper() for name, number in FILE_TYPES.items()}
    recipe = names.get(llm.checkpoint.metadata.get("general.file_type", -1))
    if recipe is None:  # no file type, as in safetensors: what most of the bytes are
        sizes_by_type: Counter[str] = Counter()
        for tensor in llm.checkpoint.tensors.values():
            sizes_by_type[tensor.type.name] += tensor.nbytes
        recipe = sizes_by_type.most_common(1)[0][0]
    return f"qwen35 {sizes.get((config.layers, config.hidden)) or config.name or '?'} {recipe}"


def _numbers(text: str) -> list[int]:
    """An argparse type: numbers from 0, separated by commas."""
    numbers = [whole(part) for part in text.split(",")]
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text} holds a negative number")
    return numbers
