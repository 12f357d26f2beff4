"""`warpsmith chat`: a conversation at the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from warpsmith.cli.options import introduce, model_arguments, open_model, sampling_arguments, sampling_keywords
from warpsmith.cli.terminal import aside, complain, emit
from warpsmith.errors import WarpsmithError

if TYPE_CHECKING:
    from warpsmith.llm import LLM

HELP = "/clear forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    model_arguments(parser)
    sampling_arguments(parser, predict=-1)


def main(args: argparse.Namespace) -> int:
    with open_model(args) as llm:
        introduce(args, llm)
        Chat(llm, args.system, sampling_keywords(args)).run()
    return 0


class Chat:
    """A model, the messages so far, and how to sample. Lines come from a person or from a pipe."""

    def __init__(self, llm: LLM, system: str | None, options: dict[str, Any]) -> None:
        self.llm, self.options = llm, options
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)
        self.interactive = sys.stdin.isatty()

    def run(self) -> None:
        if self.interactive:
            aside(HELP)
            with suppress(ImportError):  # not on every system
                import readline  # noqa: F401  gives input() line editing and history
        going = True
        while going:
            try:
                going = self._step()
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                emit("\n")
                aside(HELP)

    def _step(self) -> bool:
        """Take a line and do what it says; False at the end."""
        try:
            line = input("> " if self.interactive else "").strip()
        except EOFError:
            if self.interactive:
                emit("\n")
            return False
        if line in ("/exit", "/quit", "/bye"):
            return False
        if line == "/clear":
            self.messages = list(self.opening)
        elif line == "/help":
            aside(HELP)
        elif line:
            self._turn(line)
        return True

    def _turn(self, question: str) -> None:
        self.messages.append({"role": "user", "content": question})
        try:
            answer = self._answer()
        except WarpsmithError as error:
            if not self.interactive:
                raise
            complain(error.problem, error.fix)
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        """Stream an answer; what there is of it when Ctrl-C is pressed is the answer."""
        text, stats = "", None
        try:
            for chunk in self.llm.stream(self.messages, **self.options):
                emit(chunk.text)
                text += chunk.text
                stats = chunk.stats
        except KeyboardInterrupt:
            if not self.interactive:
                raise
        emit("" if text.endswith("\n") else "\n")
        aside("stopped" if stats is None else stats.summary())
        return text
