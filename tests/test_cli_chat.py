"""`warpsmith chat` at a terminal and in a pipe: what becomes a message, and what the commands do."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_walk import talk
from terminal import PROMPT, Terminal
from warpsmith.cli.chat import Chat, arguments
from warpsmith.cli.options import open_model
from warpsmith.cli.prompt import is_open, piped, unquoted

COMMAND = [sys.executable, "-m", "warpsmith.cli"]
PASTE = "\x1b[200~{}\x1b[201~"
CODE = "def f(x):\n    if x:\n        return x \\\n            + 1\n"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = ["--layers", "2", "--hidden", "256", "--ffn", "256", "--vocab", "272"]
    subprocess.run([*COMMAND, "synth", "tiny", str(path), *shape, "--seed", "3"], check=True, capture_output=True)
    return path


class ChatTerminal(Terminal):
    """A chat that answers every message with a few letters A."""

    def __init__(self, gguf: Path, home: Path, *flags: str) -> None:
        says_a = ["--logit-bias", "65+1000", "--draft", "none", "--device", "reference"]
        settings = {"XDG_STATE_HOME": str(home), "NO_COLOR": "1"}
        super().__init__("chat", "-m", str(gguf), *says_a, *flags, **settings)
        self.home, self.at = home, self.until(PROMPT)

    def say(self, keys: str, expect: str = "tokens of context") -> str:
        """Type, and wait for what is expected and for the next prompt. Returns all that was shown."""
        start = self.at
        self.type(keys + "\r")
        self.at = self.until(PROMPT, self.until(expect, start))
        return self.seen[start : self.at]

    def messages(self) -> list[str]:
        """What was said so far, as /save tells."""
        path = self.home / f"saved-{len(os.listdir(self.home))}.json"
        self.say(f"/save {path}", "messages")
        return [message["content"] for message in json.loads(path.read_text())]

    def leave(self) -> None:
        self.type("\x04")
        assert self.exit_code() == 0
        assert "Traceback" not in self.seen


def test_what_is_one_message(gguf: Path, tmp_path: Path) -> None:
    chat = ChatTerminal(gguf, tmp_path, "-n", "2")
    for keys, message in (
        (PASTE.format(CODE), CODE),  # lines, indentation and backslashes as they were
        (PASTE.format("a\nb") + " and more", "a\nb and more"),
        ("one\x1b\rtwo", "one\ntwo"),  # Alt-Enter
        ("one\\\r  two\\\rthree", "one\n  two\nthree"),
        ('"""\r  quoted\r\rtext\r"""', "  quoted\n\ntext"),
        ("    indented", "    indented"),
        ("/usr/bin/env is a path", "/usr/bin/env is a path"),
        (PASTE.format("/clear\nis a command"), "/clear\nis a command"),
    ):
        chat.say(keys)
        assert chat.messages() == [message, "AA"]
        chat.say("/clear", "forgotten: 2 messages")
    chat.leave()


def test_commands(gguf: Path, tmp_path: Path) -> None:
    chat = ChatTerminal(gguf, tmp_path, "-n", "2", "--system", "be brief")
    chat.say("/regen", "no answer yet")
    chat.say("one")
    chat.say("two")
    assert chat.messages() == ["be brief", "one", "AA", "two", "AA"]
    chat.say("/undo", "2 messages are left")
    chat.say("/set n 3", "n is 3")
    assert "the same answer" not in chat.say("/regen")
    assert chat.messages() == ["be brief", "one", "AAA"]
    chat.say("/regen", "the same answer")
    chat.say("/system talk", "system message: talk")
    chat.say('/system ""', "no system message")
    assert chat.messages() == ["one", "AAA"]
    chat.say("/set temp hot", "invalid float value")
    chat.say("/set top-p 7", "outside [0, 1]")
    chat.say("/set colour red", "repeat-penalty")  # the list of names
    chat.say("/fly", "There is no command /fly")
    assert "/regen, /undo, /clear, /system, /set, /save, /help, /exit" in chat.say("/fly", "There are")
    chat.say("/help", "Alt-Enter")
    chat.say(f"/save {gguf}", "exists already")
    chat.say(f"/save {tmp_path}/no/such/folder", "No such file")
    chat.say("/clear", "forgotten: 2 messages")
    assert chat.messages() == []
    chat.type("/exit\r")
    assert chat.exit_code() == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_talk(seed: int, tmp_path: Path) -> None:
    walk = talk(seed, tmp_path, 60)
    assert sum(walk.done.values()) == 60


def test_history_is_there_the_next_time(gguf: Path, tmp_path: Path) -> None:
    first = ChatTerminal(gguf, tmp_path, "-n", "1")
    first.say(PASTE.format("something\nmemorable"))
    first.leave()
    second = ChatTerminal(gguf, tmp_path, "-n", "1")
    second.say("\x1b[A")  # up
    assert second.messages()[0] == "something\nmemorable"
    second.leave()
    assert stat.S_IMODE((tmp_path / "warpsmith" / "chat_history").stat().st_mode) == 0o600


def test_a_history_that_cannot_be_written_does_no_harm(gguf: Path, tmp_path: Path) -> None:
    chat = ChatTerminal(gguf, tmp_path, "-n", "1")
    path = tmp_path / "warpsmith" / "chat_history"
    path.unlink()
    path.mkdir()  # no file can be appended to here, as on a full disk
    chat.say("hello")
    assert chat.messages() == ["hello", "A"]
    chat.say("\x1b[A\x1b[A")  # this run still has it
    assert chat.messages()[2] == "hello"
    chat.leave()
    assert "Exception" not in chat.seen


def test_an_interrupt_between_prompts_does_no_harm(gguf: Path, tmp_path: Path) -> None:
    chat = ChatTerminal(gguf, tmp_path, "-n", "1")
    for _ in range(
        30
    ):  # the signal itself, which at a prompt comes only before it is ready or when it has been answered
        os.kill(chat.pid, signal.SIGINT)
        chat.type("\x03")
    chat.at = chat.until(PROMPT, len(chat.seen))
    chat.say("hello")
    chat.leave()
    assert "Exception" not in chat.seen


def test_interrupts_at_any_moment_do_no_harm(gguf: Path, tmp_path: Path) -> None:
    """As of a Ctrl-C that is held down; above all while an error is explained."""
    chat = ChatTerminal(gguf, tmp_path, "-n", "3")
    calm = threading.Event()

    def storm() -> None:
        while not calm.wait(0.0005):
            os.kill(chat.pid, signal.SIGINT)

    storming = threading.Thread(target=storm)
    storming.start()
    try:
        for keys in ["/fly"] * 25 + ["hello"] * 5:
            chat.type(keys + "\r")
            chat.at = chat.until(PROMPT, chat.until("\x1b[?2004l", chat.at))
    finally:
        calm.set()
        storming.join()
    assert chat.seen.count("There is no command /fly") == 25
    assert chat.messages()[::2] == ["hello"] * 5
    chat.leave()


class Dying:
    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


class Settings(argparse.Namespace):
    """Something is thrown away when they are looked at during a chat."""

    chatting = False

    def __getattribute__(self, name: str) -> Any:
        if name == "predict" and Settings.chatting:
            Dying()
        return super().__getattribute__(name)


def test_an_interrupt_while_something_is_thrown_away_is_not_lost(
    gguf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser, before = argparse.ArgumentParser(), signal.getsignal(signal.SIGINT)
    arguments(parser)
    args = parser.parse_args(["-m", str(gguf), "--device", "reference", "--draft", "none", "-n", "3"], Settings())
    try:
        with open_model(args) as llm:
            chat = Chat(llm, args, interactive=True)
            Settings.chatting = True
            chat.hear("hello")
    finally:
        Settings.chatting = False
        signal.signal(signal.SIGINT, before)
    assert chat.turns[-1]["content"] == ""
    shown = capsys.readouterr()
    assert "stopped" in shown.err
    assert "Traceback" not in shown.err


def test_what_follows_an_interrupt_begins_a_line(gguf: Path, tmp_path: Path) -> None:
    chat = ChatTerminal(gguf, tmp_path, "--logit-bias", "10+2000")  # nothing but new lines, and after them ^C
    chat.type("hello\r")
    chat.until("\r\n\r\n\r\n", chat.until("\x1b[?2004l", chat.at))
    chat.type("\x03")
    chat.at = chat.until(PROMPT, chat.until("stopped", chat.at))
    assert "^C" in chat.seen
    assert "^Cstopped" not in chat.seen
    chat.leave()


def test_a_terminal_that_knows_no_commands_gets_none(gguf: Path, tmp_path: Path) -> None:
    flags = ["-n", "2", "--logit-bias", "65+1000", "--draft", "none"]
    dumb = Terminal("chat", "-m", str(gguf), *flags, TERM="dumb", XDG_STATE_HOME=str(tmp_path))
    at = dumb.until("> ")
    dumb.type("hello\r")
    dumb.until("> ", dumb.until("tokens of context", at))
    dumb.type("/exit\r")
    assert dumb.exit_code() == 0
    assert "AA" in dumb.seen
    assert "\x1b" not in dumb.seen[at:]


def test_an_answer_that_was_cut_says_why(gguf: Path, tmp_path: Path) -> None:
    chat = ChatTerminal(gguf, tmp_path, "-c", "64", "-n", "2")
    shown = chat.say("hello", "cut after 2 tokens (-n). /set n -1")
    used = re.search(r"prompt (\d+) tokens.* (\d+) of 64 tokens of context", shown)
    assert used
    assert int(used[2]) == int(used[1]) + 2
    chat.say("/set n -1", "n is -1")
    shown = chat.say("/regen", "cut: the context is full. /clear begins anew, /undo takes back a turn; -c makes room")
    assert "64 of 64 tokens of context" in shown
    chat.say("again", "/clear begins anew")  # now there is no room for another question
    chat.say("/clear", "forgotten")
    chat.say("hello", "64 of 64")
    chat.leave()


def test_no_longer_context_is_promised_than_the_model_has() -> None:
    result = subprocess.run([*COMMAND, "chat", "-n", "1"], input="x " * 5000, capture_output=True, text=True)
    assert result.returncode == 2
    assert "leaves no room" in result.stderr
    assert "/clear" in result.stderr
    assert "-c" not in result.stderr.splitlines()[-1]


def test_a_pipe_has_the_same_messages_and_commands(gguf: Path, tmp_path: Path) -> None:
    lines = 'one \\\n  line\n"""\n  a\n\n  b\n"""\n/undo\n/save saved.json\n\n/fly\nnever said\n'
    result = subprocess.run(
        [*COMMAND, "chat", "-m", str(gguf), "-n", "1"], input=lines, capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 2, result.stderr
    assert "There is no command /fly" in result.stderr
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert [message["content"] for message in saved][::2] == ["one \n  line"]


def test_a_pipe_that_is_not_text_is_a_usage_error(gguf: Path) -> None:
    result = subprocess.run([*COMMAND, "chat", "-m", str(gguf), "-n", "1"], input=b"caf\xe9\n", capture_output=True)
    assert result.returncode == 2
    assert b"Standard input is not UTF-8 text" in result.stderr


@given(st.lists(st.text(st.characters(exclude_characters='"\r\n\\', exclude_categories=["Cs"])), max_size=4))
def test_quotes_and_backslashes_keep_every_character(lines: list[str]) -> None:
    text = "\n".join(lines)
    quoted = f'"""\n{text}\n"""'
    assert is_open('"""\n' + text)
    assert not is_open(quoted)
    assert unquoted(quoted) == text
    for end in ("\n", "\r\n"):
        assert list(piped(line + end for line in quoted.split("\n"))) == [text]
    if lines:
        assert list(piped(line + "\n" for line in text.replace("\n", "\\\n").split("\n"))) == [text]
