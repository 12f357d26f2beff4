"""A server as a user starts it, for tests: a process of its own on a port that was free."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warpsmith.model.chat import default_template

ENVIRONMENT = os.environ | {"OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TEMPLATE = default_template(thinking=False)  # wisp's own has no place for tools


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """Status, parsed body and headers; a body that is given is posted as JSON, bytes as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"} | (headers or {}))
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text, found = answer.status, answer.read(), answer.headers
        except urllib.error.HTTPError as error:
            status, text, found = error.code, error.read(), error.headers
        is_json = found.get("content-type", "").startswith("application/json")
        return status, json.loads(text) if is_json else text.decode(), found

    def metric(self, name: str) -> float:
        """A counter, the sum over its labels."""
        lines = re.findall(rf"^warpsmith_{name}(?:{{.*}})? (\S+)$", self.ask("/metrics")[1], re.MULTILINE)
        return sum(map(float, lines))

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """The exit code, and what was left to say."""
        self.process.send_signal(number)
        _, said = self.process.communicate(timeout=120)
        return self.process.returncode, said


def start(*args: str | Path) -> Server:
    """Returns when it listens; what it says before that is in the error if it never does."""
    command = [sys.executable, "-m", "warpsmith.cli", "serve", "--port", "0", *map(str, args)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if found := re.search(r"listening on (http://\S+)", line):
            return Server(process, found[1])
    raise AssertionError(f"the server ended with {process.wait()}: {said}")


@contextmanager
def serving(*args: str | Path) -> Iterator[Server]:
    server = start(*args)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate()


@contextmanager
def serving_tools(folder: Path, *args: str) -> Iterator[Server]:
    """With a template that has a place for tools."""
    file = folder / "template.jinja"
    file.write_text(TEMPLATE)
    with serving("--chat-template-file", file, *args) as server:
        yield server
