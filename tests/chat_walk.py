"""A long random talk with `warpsmith chat` at a terminal: what a person may do, in any order, from a seed.

After every action the prompt must come back, nothing may be said of a defect, and what /save writes must be what was
typed and what was shown. `python tests/chat_walk.py SECONDS [SEED [FLAG ...]]` goes on for so
long.
"""

from __future__ import annotations

import fcntl
import json
import random
import re
import signal
import struct
import sys
import tempfile
import termios
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from terminal import PROMPT, Terminal

PASTE = "\x1b[200~{}\x1b[201~"
LINES = ["def f(x):", "    return x", "class Ä:", "日本語 text", "🙂", "\tindented", "# note", "", "a = b \\", "naïve"]
SUMMARY = "tokens of context"
SENTENCES = ("Traceback (most", "Something failed inside", "Exception ignored", "Unhandled exc", "Press ENTER to")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # shown as U+FFFD


class Walk:
    def __init__(self, seed: int, folder: Path, *flags: str) -> None:
        self.random, self.folder = random.Random(seed), folder
        settings = {"XDG_STATE_HOME": str(folder), "NO_COLOR": "1"}
        self.chat = Terminal("chat", "-c", "512", "-n", "60", *flags, **settings)
        self.at = self.chat.until(PROMPT)
        self.system: str | None = None
        self.users: list[str] = []  # what was asked, as the chat should know it
        self.done: Counter[str] = Counter()
        self.trail: list[str] = []
        self.saves = 0

    def step(self) -> None:
        actions: dict[Callable[[], None], int] = {
            self.ask: 6,
            self.paste: 4,
            self.interrupt: 4,
            self.interrupt_at_the_prompt: 2,
            self.too_long: 1,
            self.regenerate: 3,
            self.undo: 3,
            self.clear: 1,
            self.change_system: 2,
            self.set: 4,
            self.nonsense: 3,
            self.nothing: 1,
            self.resize: 1,
            self.history: 2,
            self.paste_from_elsewhere: 2,
            self.type_ahead: 2,
            self.edit: 2,
        }
        action = self.random.choices(list(actions), list(actions.values()))[0]
        self.done[action.__name__] += 1
        action()

    # -- what a person does ----------------------------------------------------------------------------------------

    def text(self, lines: int) -> str:
        text = "\n".join(self.random.choice(LINES) for _ in range(lines))
        return text if text.strip() and not text.startswith(("/", '"""')) else "x" + text

    def line(self) -> str:
        words = [word for word in LINES if word and "\t" not in word and not word.endswith("\\")]
        return "go " + " ".join(self.random.choices(words, k=self.random.randint(1, 4)))

    def ask(self) -> None:
        lines = [self.line() for _ in range(self.random.randint(1, 3))]
        join = self.random.choice(["\x1b\r", "\\\r"])  # Alt-Enter, or a backslash
        self.answered(join.join(lines) + "\r", "\n".join(lines))

    def paste(self) -> None:
        text = self.text(self.random.randint(2, 12))
        if text.endswith("\\"):
            text += "."
        self.answered(PASTE.format(text) + "\r", text)

    def paste_from_elsewhere(self) -> None:
        """Other ends of lines, and characters that are none."""
        self.answered(PASTE.format("one\r\n  two\rthree\x01\x07 four") + "\r", "one\n  two\nthree\x01\x07 four")

    def edit(self) -> None:
        """Ctrl-D deletes within a line, and leaves only an empty one; Ctrl-A, Ctrl-E, backspace, arrows."""
        self.answered("bXd\x1b[D\x1b[D\x04\x01a\x05e!\x7f\r", "abde")

    def type_ahead(self) -> None:
        """A message that is typed while the one before is answered comes next."""
        self.trail.append("type ahead")
        start = self.at
        self.chat.type("first\r")
        taken = self.chat.until("\x1b[?2004l", start)
        self.chat.type("second\r")
        between = self.chat.until(PROMPT, taken)
        self.at = self.chat.until(PROMPT, self.chat.until("\x1b[?2004l", between))
        self.quiet()
        for text, shown in (("first", self.chat.seen[taken:between]), ("second", self.chat.seen[between : self.at])):
            assert ("leaves no room" in shown) or (SUMMARY in shown), shown
            self.users += [text] if SUMMARY in shown else []
        self.compare(None)

    def interrupt(self) -> None:
        """Ctrl-C somewhere in an answer, or just after it."""
        text = self.line()
        start = self.at
        self.trail.append(f"interrupt {text!r}")
        self.chat.type("/set n -1\r")
        self.at = self.chat.until(PROMPT, self.chat.until("n is -1", start))
        start = self.at
        self.chat.type(text + "\r")
        self.chat.until("\x1b[?2004l", start)  # the line was taken
        for _ in range(self.random.randint(0, 30)):
            if PROMPT in self.chat.seen[start:]:
                break
            self.chat.read(0.05)
        self.chat.type("\x03")
        self.at = self.chat.until(PROMPT, start)
        shown = self.chat.seen[start : self.at]
        self.quiet()
        self.compare_after(shown, text)
        self.command("/set n 60", "n is 60")

    def interrupt_at_the_prompt(self) -> None:
        self.trail.append("^C at the prompt")
        start = self.at
        self.chat.type(self.random.choice(["", "half a line", "two\x1b\rlines"]) + "\x03")
        self.at = self.chat.until(PROMPT, self.chat.until("Ctrl-C stops an answer", start))

    def too_long(self) -> None:
        text = "word " * 3000
        self.trail.append("a message longer than the context")
        self.command(PASTE.format(text), "leaves no room")
        self.compare(None)

    def regenerate(self) -> None:
        if self.users:
            self.answered("/regen\r", None)
        else:
            self.command("/regen", "no answer yet")

    def undo(self) -> None:
        if self.users:
            self.users.pop()
            self.command("/undo", f"taken back: {2 * len(self.users)} messages are left")
        else:
            self.command("/undo", "nothing to take back")
        self.compare(None)

    def clear(self) -> None:
        self.command("/clear", f"forgotten: {2 * len(self.users)} messages")
        self.users = []
        self.compare(None)

    def change_system(self) -> None:
        self.system = self.random.choice([None, "Be brief.", "Schreib schöner."])
        self.command("/system " + (self.system or '""'), self.system or "no system message")
        self.compare(None)

    def set(self) -> None:
        good = ["temp 0.8", "temp 0", "top-k 5", "top-p 0.9", "min-p 0.1", "repeat-penalty 1.1", "seed 5", "stop zzz"]
        bad = {
            "temp hot": "invalid",
            "top-p 7": "outside",
            "colour red": "names are",
            "temp": "takes a name",
            "n x": "n",
        }
        if self.random.random() < 0.7:
            text = self.random.choice(good)
            self.command(f"/set {text}", " is ".join(text.split()))
        else:
            text = self.random.choice(list(bad))
            self.command(f"/set {text}", bad[text])

    def nonsense(self) -> None:
        command, said = self.random.choice(
            [
                ("/fly", "There is no command /fly"),
                ("/help", "Alt-Enter"),
                ("/save /proc/no/such", "No such file"),
                ("/save", "takes the name of a file"),
                (f"/save {self.folder}", "exists already"),
                ("/undo\x15/help", "Alt-Enter"),  # Ctrl-U takes a line back
            ]
        )
        self.command(command, said)

    def nothing(self) -> None:
        self.trail.append("an empty line")
        start = self.at
        self.chat.type(self.random.choice(["", "   "]) + "\r")
        self.at = self.chat.until(PROMPT, start)

    def resize(self) -> None:
        rows, columns = self.random.choice([(24, 80), (5, 20), (60, 200), (24, 80)])
        self.trail.append(f"resize {rows} {columns}")
        fcntl.ioctl(self.chat.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.command("/help", "Alt-Enter" if columns >= 80 else "/exit")

    def history(self) -> None:
        """An earlier line again, thrown away."""
        self.trail.append("history")
        start = self.at
        self.chat.type("\x1b[A" * self.random.randint(1, 5) + "\x03")
        self.at = self.chat.until(PROMPT, self.chat.until("Ctrl-C stops an answer", start))

    # -- what must be so -------------------------------------------------------------------------------------------

    def command(self, keys: str, expect: str) -> str:
        self.trail.append(keys[:60])
        start = self.at
        self.chat.type(keys + "\r")
        self.at = self.chat.until(PROMPT, self.chat.until(expect, start))
        self.quiet()
        return self.chat.seen[start : self.at]

    def answered(self, keys: str, message: str | None) -> None:
        """An answer was given to the message, or to the last one again; or there was no room and nothing changed."""
        self.trail.append(repr(keys[:60]))
        start = self.at
        self.chat.type(keys)
        self.at = self.chat.until(PROMPT, self.chat.until("\x1b[?2004l", start))
        shown = self.chat.seen[start : self.at]
        assert ("leaves no room" in shown) or (SUMMARY in shown), shown
        self.quiet()
        self.compare_after(shown, message)

    def quiet(self) -> None:
        for sentence in SENTENCES:
            assert sentence not in self.chat.seen, f"{sentence}: {self.chat.seen[-3000:]}"

    def compare_after(self, shown: str, message: str | None) -> None:
        if "leaves no room" in shown:
            self.compare(None)
        else:
            self.users += [] if message is None else [message]
            self.compare(shown)

    def compare(self, shown: str | None) -> None:
        """What is saved is what was typed; its last answer is what was shown."""
        path = self.folder / f"{self.saves}.json"
        self.saves += 1
        self.command(f"/save {path}", "messages")
        saved = json.loads(path.read_text())
        path.unlink()
        if self.system is not None:
            assert saved.pop(0) == {"role": "system", "content": self.system}
        assert [message["role"] for message in saved] == ["user", "assistant"] * len(self.users)
        assert [message["content"] for message in saved[::2]] == self.users
        if shown is not None:
            answer = CONTROL.sub("\ufffd", saved[-1]["content"].rstrip("\n")).replace("\n", "\r\n")
            if "stopped" in shown:  # at Ctrl-C a terminal forgets what it has not shown yet
                answer = answer[: max(0, len(answer) - 400)]
            assert answer in shown.replace("^C", ""), (answer, shown)

    def leave(self) -> None:
        self.chat.type("\x04")
        assert self.chat.exit_code() == 0


def talk(seed: int, folder: Path, steps: int, *flags: str, until: float = float("inf")) -> Walk:
    walk = Walk(seed, folder, *flags)
    try:
        for _ in range(steps):
            if time.monotonic() > until:
                break
            walk.step()
        walk.leave()
    except BaseException:
        print(f"seed {seed}, after {walk.trail[-8:]}", file=sys.stderr)
        with suppress(OSError):  # it may have ended by itself
            walk.chat.end()
        raise
    return walk


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background Ctrl-C would be ignored, in chats too
    seconds, seed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1
    begun, done, failures = time.monotonic(), Counter[str](), 0
    while time.monotonic() < begun + seconds:
        with tempfile.TemporaryDirectory() as folder:
            try:
                done += talk(seed, Path(folder), 200, *sys.argv[3:], until=begun + seconds).done
            except AssertionError as error:
                failures += 1
                print(f"seed {seed}: {str(error)[-2000:]}", flush=True)
        print(
            f"{time.monotonic() - begun:.0f} s, seed {seed}: {sum(done.values())} actions, {failures} failures",
            flush=True,
        )
        seed += 1
    print(dict(done))
