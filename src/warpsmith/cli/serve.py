"""`warpsmith serve`: an HTTP server for clients of OpenAI's and Anthropic's interfaces, and a chat page."""

from __future__ import annotations

import argparse
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from warpsmith.cli.options import introduce, model_arguments, natural, open_model, whole
from warpsmith.cli.terminal import aside
from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.llm import LLM


def arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    group.add_argument(
        "--port", type=_port, default=8080, help="port to listen on; 0 is any that is free (default: 8080)"
    )
    group.add_argument("--api-key", action="append", metavar="KEY", help="demand this key; may be repeated")
    group.add_argument(
        "--api-key-file", type=Path, metavar="PATH", help="demand one of the keys in this file, one a line"
    )
    group.add_argument(
        "--alias",
        action="append",
        metavar="NAME",
        help="what requests call the model, in place of its name; may be repeated",
    )
    group.add_argument(
        "-np",
        "--parallel",
        type=natural,
        metavar="N",
        help="requests that run at a time (default: what half of the free memory holds, at most 8)",
    )
    group.add_argument("--queue", type=natural, default=64, metavar="N", help="requests that may wait (default: 64)")
    group.add_argument(
        "--cache-memory",
        type=_mebibytes,
        metavar="MIB",
        help="memory to keep the beginnings of prompts in, for later ones that begin alike; 0: none "
        "(default: a quarter of what is then free, at most 8192)",
    )
    group.add_argument(
        "--drain",
        type=_seconds,
        default=10.0,
        metavar="S",
        help="at shutdown: seconds that running requests get to end (default: 10)",
    )
    group.add_argument(
        "--chat-template-file", type=Path, metavar="PATH", help="use this chat template instead of the model's own"
    )
    group.add_argument(
        "--allow-host", action="append", metavar="NAME", help="answer requests for this host name too; may be repeated"
    )
    group.add_argument(
        "--cors",
        action="append",
        metavar="ORIGIN",
        help="let web pages of this origin call the server; '*' is any; may be repeated",
    )
    model_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from warpsmith.serve.app import make_app
    from warpsmith.serve.engine import Worker
    from warpsmith.serve.guard import is_loopback
    from warpsmith.serve.metrics import Metrics
    from warpsmith.serve.run import Binding, serve
    from warpsmith.serve.service import Service, model_name

    keys = _keys(args)
    template = None if args.chat_template_file is None else args.chat_template_file.read_text(encoding="utf-8")
    if not is_loopback(args.host) and not keys:
        _say(f"warning: anybody who reaches {args.host} can use this server; --api-key demands a key")
    metrics = Metrics()

    def load() -> LLM:
        llm = open_model(args, parallel=args.parallel, cache_bytes=args.cache_memory)
        with suppress(OSError):
            introduce(args, llm)
        return llm

    worker = Worker(load, queue=args.queue, listener=metrics)
    names = list(dict.fromkeys(args.alias or [model_name(args.model)]))
    service = Service(worker, names, template, keys, metrics)
    binding = Binding(args.host, args.port, args.allow_host or (), args.drain)
    app = make_app(service, hosts=binding.hosts, origins=args.cors or ())
    return serve(app, worker, binding, _say)


def _say(text: str) -> None:
    """To stderr; a server whose log nobody reads any more goes on."""
    with suppress(OSError):
        aside(text)


def _port(text: str) -> int:
    """An argparse type: a port."""
    number = whole(text)
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port: they end at 65535")
    return number


def _seconds(text: str) -> float:
    """An argparse type: a time to wait."""
    with suppress(ValueError):
        if 0 <= (number := float(text)) < inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")


def _mebibytes(text: str) -> int:
    """An argparse type: bytes, given in MiB."""
    number = whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of MiB")
    return number << 20


def _keys(args: argparse.Namespace) -> list[str]:
    keys = list(args.api_key or ())
    if args.api_key_file is not None:
        keys += args.api_key_file.read_text(encoding="utf-8").split()
        if not keys:
            raise BadRequest(f"{args.api_key_file} holds no key.", "Write one key a line.")
    if any(not key.isascii() or not key.strip() for key in keys):
        raise BadRequest("An API key is empty or not ASCII.", "Use letters and digits.")
    return keys
