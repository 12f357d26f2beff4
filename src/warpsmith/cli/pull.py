"""`warpsmith pull`: fetch a model into the Hub's shared cache and say where it is."""

from __future__ import annotations

import argparse

from warpsmith.cli.terminal import emit


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="NAME", help="user/repo, user/repo:QUANT or user/repo/file.gguf")


def main(args: argparse.Namespace) -> int:
    from warpsmith.checkpoint.hub import resolve

    emit(f"{resolve(args.model, refresh=True)}\n")
    return 0
