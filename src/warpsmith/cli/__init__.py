"""The command line, one file a verb. A verb is imported only when it is used, so that help answers at once."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module

from warpsmith import __version__
from warpsmith.cli.parser import Parser
from warpsmith.cli.process import clean_up_when_told_to_end, mend_streams, need_address_space, need_stdout
from warpsmith.cli.terminal import complain
from warpsmith.errors import BadRequest, WarpsmithError

VERBS = {
    "run": "complete a prompt",
    "chat": "talk with a model",
    "serve": "answer over HTTP: OpenAI's and Anthropic's interfaces, a chat page",
    "launch": "start Claude Code, Codex, OpenCode and others on a running server",
    "bench": "measure prompt and generation speed",
    "show": "describe a model: shape, tensors, memory",
    "pull": "fetch a model from the Hugging Face Hub",
    "convert": "write a model in another format or weight type",
    "synth": "make a random model of any size",
    "doctor": "say what this machine has and what would be used",
}
SAYS_NOTHING = ("convert", "synth", "serve")  # on stdout
INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code (docs/cli.md lists them)."""
    if argv is None:  # a process of our own
        argv = sys.argv[1:]
        mend_streams()
        clean_up_when_told_to_end()
    try:
        need_address_space()
        args, unknown = _parser(argv).parse_known_args(argv)
        if unknown:
            raise BadRequest(f"There is no {unknown[0]} here.", f"`warpsmith {args.verb} --help` lists what there is.")
    except SystemExit:  # argparse has shown the help or the version
        return 0
    except WarpsmithError as error:
        return _explain(error)
    try:
        if args.verb not in SAYS_NOTHING:
            need_stdout()
        code = int(import_module(f"warpsmith.cli.{args.verb}").main(args))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        return _explain(error)


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="warpsmith",
        description="Local LLM inference for the Qwen3.5 family.",
        epilog="`warpsmith VERB --help` explains a verb.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"warpsmith {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, help in VERBS.items():
        sub = verbs.add_parser(verb, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False)
        if verb in argv[:1]:
            import_module(f"warpsmith.cli.{verb}").arguments(sub)
            sub.add_argument("--debug", action="store_true", help="show a traceback when something fails")
    return parser


def _explain(error: Exception) -> int:
    """One sentence and one fix on stderr. Whatever we did not raise on purpose is a defect, but for these."""
    if isinstance(error, WarpsmithError):
        complain(error.problem, error.fix)
        return error.exit_code
    if isinstance(error, MemoryError):
        complain("There is not enough memory for this.", "Use a smaller model or a shorter context (-c).")
        return 5
    if isinstance(error, OSError):
        name = f"{error.filename}: " if error.filename else ""
        complain(f"{name}{error.strerror or error}.", "Check the path, its permissions and the space on the disk.")
        return 1
    complain(f"Something failed inside warpsmith ({type(error).__name__}: {error}).", "Run it again with --debug.")
    return 1
