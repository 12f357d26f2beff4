"""`warpsmith chat`: a conversation at the terminal."""

from __future__ import annotations

import argparse
import copy
import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from warpsmith.cli.options import (
    check_absent,
    introduce,
    model_arguments,
    open_model,
    sampler_keywords,
    sampling_arguments,
    sampling_keywords,
)
from warpsmith.cli.parser import Parser
from warpsmith.cli.prompt import messages
from warpsmith.cli.terminal import aside, complain, emit, explain_invisible
from warpsmith.errors import BadRequest, ContextFull, WarpsmithError

if TYPE_CHECKING:
    from warpsmith.engine.stats import Stats
    from warpsmith.llm import LLM

COMMANDS = {
    "/regen": "answers the last message again",
    "/undo": "takes back the last message and its answer",
    "/clear": "forgets the conversation",
    "/system TEXT": 'sets the system message; /system "" removes it',
    "/set NAME VALUE": "sets what a flag does: /set temp 0.8, /set n 500",
    "/save FILE": "writes the conversation as JSON",
    "/help": "shows this",
    "/exit": "leaves, as Ctrl-D does",
}
HINT = "/help lists the commands, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
KEYS = "Alt-Enter, a backslash at the end of a line, or three quotes around a message make it several lines."
_COMMAND = re.compile(r"/([A-Za-z]+)(?: +(.*))?")  # one line; `/usr/bin` is none

Message = dict[str, str]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    model_arguments(parser)
    sampling_arguments(parser, predict=-1)


def main(args: argparse.Namespace) -> int:
    source = messages(interactive := sys.stdin is not None and sys.stdin.isatty())
    with open_model(args) as llm:
        introduce(args, llm)
        chat, hint_due = Chat(llm, args, interactive), interactive
        while chat.going:
            try:
                if hint_due:
                    aside(HINT)
                    hint_due = False
                if (message := next(source, None)) is None:
                    break
                chat.hear(message)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                hint_due = True
            except WarpsmithError as error:
                if not interactive:
                    raise
                complain(error.problem, error.fix)
    return 0


class Chat:
    """A model, the messages so far, and how to answer."""

    def __init__(self, llm: LLM, args: argparse.Namespace, interactive: bool) -> None:
        self.llm, self.args, self.interactive = llm, args, interactive
        self.system: str | None = args.system
        self.turns: list[Message] = []
        self.going = True
        self._stoppable = False  # whether Ctrl-C means anything: while an answer comes
        self._stopped = False  # by a Ctrl-C that could not be raised
        if interactive:
            signal.signal(signal.SIGINT, self._heed_ctrl_c)
        self._commands: dict[str, Callable[[str], None]] = {
            "regen": self._regenerate,
            "undo": self._undo,
            "clear": self._clear,
            "system": self._set_system,
            "set": self._set,
            "save": self._save,
            "help": self._help,
        }
        self._commands |= dict.fromkeys(("exit", "quit", "bye"), self._exit)

    def _heed_ctrl_c(self, number: int, frame: FrameType | None) -> None:
        """Interrupts an answer once. At any other moment, an error being explained, say, it would end the chat; at the
        prompt Ctrl-C is a key, and no signal."""
        if self._stoppable:
            self._stoppable = False
            self._stopped = _in_destructor(frame)
            if not self._stopped:
                raise KeyboardInterrupt

    def hear(self, message: str) -> None:
        """Answer a message, or do what a command says."""
        if command := _COMMAND.fullmatch(message):
            if command[1] not in self._commands:
                raise BadRequest(
                    f"There is no command /{command[1]}.", f"There are {', '.join(c.split()[0] for c in COMMANDS)}."
                )
            self._commands[command[1]]((command[2] or "").strip())
        elif message.strip():
            self._answer([*self.turns, {"role": "user", "content": message}])

    @property
    def opening(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _answer(self, turns: list[Message]) -> None:
        """Stream an answer to these turns and keep both; what there is of it when Ctrl-C is pressed is the answer."""
        text, stats, finish_reason = "", None, None
        try:
            try:
                self._stopped, self._stoppable = False, True
                for chunk in self.llm.stream([*self.opening, *turns], **sampling_keywords(self.args)):
                    if self._stopped:
                        raise KeyboardInterrupt
                    emit(chunk.text)
                    text += chunk.text
                    stats, finish_reason = chunk.stats, chunk.finish_reason
            finally:
                self._stoppable = False
        except KeyboardInterrupt:
            if not self.interactive:
                raise
        except ContextFull as error:
            raise ContextFull(error.problem, self._way_out()) from None
        self.turns = [*turns, {"role": "assistant", "content": text}]
        emit("" if text.endswith("\n") and stats is not None else "\n")  # the terminal has shown ^C
        if stats is None:
            aside("stopped")
            return
        explain_invisible(text, stats.generated_tokens)
        used = stats.prompt_tokens + stats.generated_tokens
        aside(f"{stats.summary()} | {used} of {self.llm.context} tokens of context")
        if finish_reason == "length":
            aside(self._why_cut(stats, used))

    def _why_cut(self, stats: Stats, used: int) -> str:
        if used >= self.llm.context:
            return f"cut: the context is full. {self._way_out()}"
        return f"cut after {stats.generated_tokens} tokens (-n). /set n -1 lifts the limit, /regen answers again."

    def _way_out(self) -> str:
        longer = self.llm.context < self.llm.config.context
        return "/clear begins anew, /undo takes back a turn" + (
            f"; -c makes room for up to {self.llm.config.context} tokens." if longer else "."
        )

    # -- commands -------------------------------------------------------------------------------------------------

    def _regenerate(self, _: str) -> None:
        if not self.turns:
            raise BadRequest("There is no answer yet.", "Write a message first.")
        before = self.turns[-1]
        self._answer(self.turns[:-1])
        if self.turns[-1] == before:
            aside("the same answer: it is greedy, or its seed was given. /set temp 0.8 or /set seed N changes that.")

    def _undo(self, _: str) -> None:
        if not self.turns:
            raise BadRequest("There is nothing to take back.", "Write a message first.")
        self.turns = self.turns[:-2]
        aside(f"taken back: {len(self.turns)} messages are left")

    def _clear(self, _: str) -> None:
        aside(f"forgotten: {len(self.turns)} messages")
        self.turns = []

    def _set_system(self, text: str) -> None:
        if text:
            self.system = None if text == '""' else text
        aside("there is no system message" if self.system is None else f"system message: {self.system}")

    def _set(self, text: str) -> None:
        """Like the flag of that name. The flags' own parser reads it, so there is one list of them."""
        from warpsmith.engine.request import check_sampling, sampling_for

        parser = Parser(prog="/set", add_help=False, allow_abbrev=False)
        sampling_arguments(parser, predict=-1)
        names = [max(action.option_strings, key=len).lstrip("-") for action in parser._actions]
        name, _, value = text.partition(" ")
        if name not in (*names, "n") or not value:
            raise BadRequest("/set takes a name and a value.", f"The names are n, {', '.join(names)}.")
        args = copy.copy(self.args)
        flag = "-n" if name == "n" else f"--{name}"
        try:
            parser.parse_args([flag, value.strip()], args)
        except BadRequest as error:
            raise BadRequest(error.problem, "Give it a value that the flag takes.") from None
        check_sampling(sampling_for(sampler_keywords(args), {}), self.llm.config.vocab)
        self.args = args
        aside(f"{name} is {value.strip()}")

    def _save(self, name: str) -> None:
        from warpsmith.checkpoint.atomic import whole_file

        if not name:
            raise BadRequest("/save takes the name of a file.", "Try /save conversation.json.")
        path = Path(name).expanduser()
        check_absent(path)
        try:
            with whole_file(path) as file:
                file.write(json.dumps([*self.opening, *self.turns], ensure_ascii=False, indent=2).encode())
        except OSError as error:
            raise WarpsmithError(f"{path}: {error.strerror}.", "Choose another file.") from None
        aside(f"{path}: {len(self.opening) + len(self.turns)} messages")

    def _help(self, _: str) -> None:
        for command, meaning in COMMANDS.items():
            aside(f"{command:<16} {meaning}")
        aside(f"{KEYS} Ctrl-C stops an answer.")

    def _exit(self, _: str) -> None:
        self.going = False


def _in_destructor(frame: FrameType | None) -> bool:
    """Where Python would print what is raised, and go on."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None
