"""A command at a terminal of its own, for tests of what people see."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys

# prompt_toolkit would ask where the cursor is, and nobody here answers
SETTINGS = {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
PROMPT = "\x1b[?2004h"  # a chat waits for keys: it asks the terminal to mark what is pasted


class Terminal:
    """A command at a terminal of its own."""

    def __init__(self, *args: str, **environment: str) -> None:
        self.seen = ""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(
                sys.executable, [sys.executable, "-m", "warpsmith.cli", *args], os.environ | SETTINGS | environment
            )

    def until(self, text: str, after: int = 0, press: str = "") -> int:
        """Read until `text` appears past position `after`; returns where it ends. `press` is typed until it does."""
        for _ in range(60):
            self.type(press)
            while (at := self.seen.find(text, after)) < 0 and select.select([self.fd], [], [], 1)[0]:
                try:
                    self.seen += os.read(self.fd, 4096).decode(errors="replace")
                except OSError:  # nobody is at the other end any more
                    raise AssertionError(f"it ended with {self.exit_code()}: {self.seen[-2000:]!r}") from None
            if at >= 0:
                return at + len(text)
        raise AssertionError(f"no {text!r} in {self.seen!r}")

    def read(self, seconds: float) -> None:
        """What comes within so many seconds."""
        if select.select([self.fd], [], [], seconds)[0]:
            self.seen += os.read(self.fd, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def end(self) -> None:
        """Whatever it does."""
        os.kill(self.pid, signal.SIGKILL)
        self.exit_code()

    def exit_code(self) -> int:
        try:
            while data := os.read(self.fd, 4096):
                self.seen += data.decode(errors="replace")
        except OSError:  # how a terminal says that nobody is at the other end
            pass
        os.close(self.fd)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
