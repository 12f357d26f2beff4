"""Flags that several verbs share, spelled as llama.cpp spells them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from warpsmith.cli.terminal import aside, loading_bar
from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.llm import LLM

DEVICES = ("auto", "reference", "cpu", "cuda")


def model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m", "--model", metavar="NAME", help="a file, a directory, user/repo[:QUANT] or user/repo/file.gguf"
    )
    group.add_argument("-c", "--ctx-size", type=natural, metavar="N", help="tokens of context to make room for")
    group.add_argument("--device", choices=DEVICES, default="auto", help="who computes (default: auto)")
    group.add_argument(
        "--draft", default="auto", metavar="D", help="auto, none, ngram, mtp, or a draft model (default: auto)"
    )
    group.add_argument(
        "--spec-budget",
        type=budget,
        default="auto",
        metavar="N",
        help="tokens drafted a step; 0 is off (default: auto)",
    )
    group.add_argument("--offline", action="store_true", help="use the network for nothing")
    cpu = parser.add_argument_group("cpu device", "Naming one of these chooses the cpu.")
    cpu.add_argument("-t", "--threads", type=natural, metavar="N", help="threads (default: all usable cores)")
    cpu.add_argument(
        "--cpu-features",
        type=lambda text: text.split(","),
        metavar="F,...",
        help="instruction sets that kernels may use, of those `doctor` lists; portable is none (default: all)",
    )
    for short, kept in (("k", "keys"), ("v", "values")):
        cpu.add_argument(
            f"-ct{short}",
            f"--cache-type-{short}",
            choices=("f32", "f16", "q8_0"),
            help=f"how {kept} of the past are kept (default: f16)",
        )


def sampling_arguments(parser: argparse.ArgumentParser, predict: int) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "-n",
        "--predict",
        type=int,
        default=predict,
        metavar="N",
        help=f"tokens at most; -1: no limit (default: {predict})",
    )
    group.add_argument("-s", "--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    sampler_arguments(group)
    group.add_argument(
        "--thinking", choices=("auto", "on", "off"), default="auto", help="in chats (default: the model's)"
    )


def sampler_arguments(group: argparse._ArgumentGroup) -> None:
    """How the next token is chosen."""
    group.add_argument("--temp", type=float, metavar="T", help="temperature; 0 is greedy")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens; 0 is all")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest that sum to P")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="keep those at least P times as likely as the likeliest"
    )
    group.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    group.add_argument("--repeat-penalty", type=float, metavar="X", help="divide logits of recent tokens; 1 is off")
    group.add_argument("--presence-penalty", type=float, metavar="X", help="subtract from logits of recent tokens")
    group.add_argument("--frequency-penalty", type=float, metavar="X", help="subtract for each recent use")
    group.add_argument("--repeat-last-n", type=int, metavar="N", help="tokens that count as recent; -1 is all")
    group.add_argument("--logit-bias", action="append", type=_bias, metavar="ID(+|-)X", help="add X to a token's logit")


# flag -> field of Sampling
_SAMPLER = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "seed": "seed",
    "repeat_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_last_n": "repeat_last_n",
}


def sampler_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Sampling` that were given."""
    given = {keyword: value for flag, keyword in _SAMPLER.items() if (value := getattr(args, flag)) is not None}
    if args.logit_bias:
        given["logit_bias"] = dict(args.logit_bias)
    return given


def sampling_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say to `LLM.stream`; what they leave out is the model's to decide."""
    given = sampler_keywords(args)
    if args.predict >= 0:
        given["max_tokens"] = args.predict
    if args.stop is not None:
        given["stop"] = args.stop
    if args.thinking != "auto":
        given["enable_thinking"] = args.thinking == "on"
    return given


def open_model(args: argparse.Namespace) -> LLM:
    import warpsmith

    with loading_bar() as progress:
        return warpsmith.load(
            args.model,
            device=args.device,
            draft=args.draft,
            spec_budget=args.spec_budget,
            context=args.ctx_size,
            threads=args.threads,
            cpu_features=args.cpu_features,
            cache_type_k=args.cache_type_k,
            cache_type_v=args.cache_type_v,
            offline=args.offline,
            progress=progress,
        )


def introduce(args: argparse.Namespace, llm: LLM) -> None:
    """Say which model runs when none was named."""
    if args.model is None:
        aside("no model named (-m): running wisp, the 27M-parameter model that comes with warpsmith")


def natural(text: str) -> int:
    """An argparse type: a whole number from 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def budget(text: str) -> int | Literal["auto"]:
    """An argparse type: how many tokens may be drafted."""
    return "auto" if text == "auto" else int(text)


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, amount = text.partition(sign)
        if found:
            return int(token), float(sign + amount)
    raise argparse.ArgumentTypeError(f"{text} is not of the form 15043+1 or 15043-1")


def check_absent(path: Path) -> None:
    """Refuse to write over something."""
    if path.exists():
        raise BadRequest(f"{path} exists already.", "Choose another name, or remove it first.")
