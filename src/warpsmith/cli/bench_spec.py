"""`warpsmith bench spec`: speculation against plain decoding, as the papers measure it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from warpsmith.cli.options import budget, introduce, model_arguments, natural, open_model
from warpsmith.cli.terminal import aside
from warpsmith.errors import BadRequest


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        action="append",
        required=True,
        metavar="SET",
        help="a JSONL file, humaneval, gsm8k or math500; may be repeated",
    )
    parser.add_argument(
        "-n", "--n-gen", type=natural, default=256, metavar="N", help="tokens to generate (default: 256)"
    )
    parser.add_argument("--samples", type=natural, default=10, metavar="N", help="prompts of each set (default: 10)")
    parser.add_argument("--sweep", type=_budgets, metavar="N,...", help="compare these budgets; auto may be one")
    parser.add_argument(
        "--assume", type=_length, metavar="AL", help="make the draft right so often that a step decides AL tokens"
    )
    parser.add_argument("--chat", action="store_true", help="ask through the model's chat template")
    parser.add_argument(
        "--thinking",
        choices=("auto", "on", "off"),
        default="auto",
        help="with --chat: whether to think before the answer (default: auto, as the model does)",
    )
    parser.add_argument("--temp", type=float, default=0.0, metavar="T", help="temperature; 0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="makes sampling repeatable (default: 0)")
    parser.add_argument("-o", "--output", choices=("md", "json"), default="md", help="how to print (default: md)")
    parser.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    model_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from warpsmith.draft.select import find_draft, make_proposers
    from warpsmith.measure.prompts import read_prompts
    from warpsmith.measure.speculation import compare, comparison_table

    budgets = args.sweep or [args.spec_budget]
    if args.draft == "none" or 0 in budgets:
        raise BadRequest("Without a draft there is nothing to compare.", "Leave --draft none and budgets of 0 out.")
    if args.assume is not None and "auto" in budgets:
        raise BadRequest("With --assume a budget is a number of nodes.", "Use --sweep 15,22, or --spec-budget 22.")
    if args.thinking != "auto" and not args.chat:
        raise BadRequest("--thinking is for chats.", "Add --chat.")
    for each in budgets:
        draft = find_draft(args.draft, each, args.offline)
    sets = {name: _prompts(read_prompts(name, args.samples, args.offline), args.chat) for name in args.prompts}
    args.draft = "none"  # for now: each budget gets a draft of its own
    with open_model(args) as llm:
        introduce(args, llm)
        proposers = make_proposers(draft, budgets, llm.backend, llm.checkpoint.path)
        options: dict[str, Any] = {"max_tokens": args.n_gen, "temperature": args.temp, "seed": args.seed}
        if args.thinking != "auto":
            options["enable_thinking"] = args.thinking == "on"
        comparisons = compare(llm, sets, proposers, options, aside, args.assume)
    if args.output == "json":
        print(json.dumps([c.to_dict() for c in comparisons], indent=2))
    else:
        print(comparison_table(comparisons))
    return 0


def _prompts(texts: list[str], chat: bool) -> list[Any]:
    return [[{"role": "user", "content": text}] for text in texts] if chat else list(texts)


def _length(text: str) -> float:
    """An argparse type: tokens a step."""
    length = float(text)
    if not 1 <= length < 17:
        raise argparse.ArgumentTypeError(f"{text} tokens a step are not 1 to 16")
    return length


def _budgets(text: str) -> list[Any]:
    return [budget(part) for part in text.split(",")]
