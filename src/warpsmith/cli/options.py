"""Flags that several verbs share, spelled as llama.cpp spells them."""

from __future__ import annotations

import argparse
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from warpsmith.backend.devices import CACHE_TYPES, DEVICES
from warpsmith.cli.terminal import aside, loading_bar
from warpsmith.engine.request import SAMPLING
from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.llm import LLM


def model_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "-m",
        "--model",
        metavar="NAME",
        help="a file, a directory, user/repo[:QUANT] or user/repo/file.gguf (default: wisp, built in)",
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=natural,
        metavar="N",
        help="tokens of prompt and answer to make room for (default: 8192, or the model's limit if that is less)",
    )
    group.add_argument(
        "--device",
        choices=("auto", *(device.name for device in DEVICES)),
        default="auto",
        help="what to run on (default: auto, the fastest that works here)",
    )
    group.add_argument(
        "--draft", default="auto", metavar="D", help="auto, none, ngram, mtp, or a draft model (default: auto)"
    )
    group.add_argument(
        "--spec-budget",
        type=budget,
        default="auto",
        metavar="N",
        help="tokens drafted a step, at most 63; 0 is off (default: auto, what pays)",
    )
    cache_arguments(group)
    group.add_argument("--offline", action="store_true", help="never use the network")
    cuda = parser.add_argument_group("cuda device", "Naming it chooses the GPU.")
    cuda.add_argument(
        "--memory-limit",
        type=nbytes,
        metavar="N[KMGT]",
        help="take at most so many bytes of the GPU's memory, such as 24G, what CUDA itself takes included",
    )
    cpu = parser.add_argument_group("cpu device", "Naming one of these chooses the CPU.")
    cpu.add_argument(
        "-t",
        "--threads",
        type=natural,
        metavar="N",
        help="threads (default: all usable cores but one of every eight)",
    )
    cpu.add_argument(
        "--cpu-features",
        type=lambda text: text.split(","),
        metavar="F,...",
        help="instruction sets to use, of those that `doctor` lists; portable is none of them (default: all)",
    )


def cache_arguments(group: argparse._ActionsContainer) -> None:
    for short, kept in (("k", "keys"), ("v", "values")):
        group.add_argument(
            f"-ct{short}",
            f"--cache-type-{short}",
            choices=CACHE_TYPES,
            help=f"how {kept} of the past are kept (default: f16; the reference: f32)",
        )


def sampling_arguments(parser: argparse.ArgumentParser, predict: int) -> None:
    group = parser.add_argument_group("generation")
    group.add_argument(
        "-n",
        "--predict",
        type=_limit,
        default=predict,
        metavar="N",
        help=f"most tokens to generate; -1: until the context is full (default: {predict})",
    )
    group.add_argument("-s", "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    sampler_arguments(group)
    group.add_argument(
        "--thinking",
        choices=("auto", "on", "off"),
        default="auto",
        help="in chats: whether to think before the answer (default: auto, as the model does)",
    )


def sampler_arguments(group: argparse._ArgumentGroup, defaults: bool = True) -> None:
    """How the next token is chosen. `defaults`: what is left out is as the list says; otherwise it is off."""
    for p in SAMPLING:
        metavar, help = "N" if p.kind is int else "X", f"{p.help} (default: {p.usual})" if defaults else p.help
        group.add_argument(p.flag, dest=p.name, type=p.kind, metavar=metavar, help=help)
    group.add_argument("--logit-bias", action="append", type=_bias, metavar="ID(+|-)X", help="add X to a token's logit")


def sampler_keywords(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Sampling` that were given."""
    given = {p.name: value for p in SAMPLING if (value := getattr(args, p.name)) is not None}
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


def open_model(args: argparse.Namespace, **options: Any) -> LLM:
    """With more keywords of `load` than the flags say."""
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
            memory_limit=args.memory_limit,
            offline=args.offline,
            progress=progress,
            **options,
        )


def introduce(args: argparse.Namespace, llm: LLM) -> None:
    """Say which model runs when none was named."""
    if args.model is None:
        aside("no model named (-m): running wisp, the 27M-parameter model that comes with warpsmith")


def natural(text: str) -> int:
    """An argparse type: a whole number from 1."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def whole(text: str) -> int:
    """An argparse type: a whole number. What argparse says of `int` itself names our functions."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _limit(text: str) -> int:
    """An argparse type: tokens at most."""
    number = whole(text)
    if number < 1 and number != -1:
        raise argparse.ArgumentTypeError(f"{text} is no number of tokens; -1 is no limit")
    return number


def nbytes(text: str) -> int:
    """An argparse type: bytes, in units of 2 ** 10, 20, 30 or 40 with a letter behind."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text.upper())
    number = int(float(found[1]) * 1024 ** " KMGT".find(found[2] or " ")) if found else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of bytes such as 24G")
    return number


def budget(text: str) -> int | Literal["auto"]:
    """An argparse type: how many tokens may be drafted."""
    return "auto" if text == "auto" else whole(text)


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, amount = text.partition(sign)
        if found and token.isdecimal():
            with suppress(ValueError):
                return int(token), float(sign + amount)
    raise argparse.ArgumentTypeError(f"{text} is not of the form 15043+1 or 15043-1")


def check_absent(path: Path) -> None:
    """Refuse to write over something."""
    if path.exists():
        raise BadRequest(f"{path} exists already.", "Choose another name, or remove it first.")
