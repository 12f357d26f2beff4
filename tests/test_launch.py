"""`warpsmith launch`: every client is told where the server is, what the model is called, and the key."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from serving import ENVIRONMENT, Server, serving
from warpsmith.cli.launch import NAMES
from warpsmith.serve.clients import CLIENTS

COMMAND = [sys.executable, "-m", "warpsmith.cli", "launch"]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("-c", "256", "--alias", "my model", "--api-key", "secret", "--draft", "none") as server:
        yield server


def launch(server: Server, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, "--url", server.url, "--api-key", "secret", *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_shell_can_run_what_is_printed(server: Server, name: str, tmp_path: Path) -> None:
    printed = launch(server, "--print", name, "-x", "two words")
    assert printed.returncode == 0, printed.stderr
    fake = tmp_path / "bin"
    fake.mkdir()
    for program in ("claude", "codex", "opencode", "qwen", "aider", "open-webui"):
        (fake / program).write_text('#!/bin/sh\nenv; for word in "$@"; do echo "arg: $word"; done\n')
        (fake / program).chmod(0o755)
    path = f"{fake}:{os.environ['PATH']}"
    shell = subprocess.run(["sh", "-c", printed.stdout + "env"], capture_output=True, text=True, env={"PATH": path})
    said = shell.stdout
    assert server.url in said
    assert "secret" in said
    if name not in ("openai", "open-webui"):
        assert "my model" in said
    if name != "openai":
        assert "arg: -x\narg: two words\n" in said
        started = launch(server, name, "-x", "two words", PATH=path)
        assert started.returncode == 0, started.stderr
        assert [line for line in started.stdout.splitlines() if line.startswith("arg")] == [
            line for line in said.splitlines() if line.startswith("arg")
        ]


def test_settings_are_in_the_clients_own_formats(server: Server) -> None:
    words = shlex.split(launch(server, "--print", "codex").stdout.splitlines()[-1])
    settings = tomllib.loads("\n".join(words[i + 1] for i, word in enumerate(words) if word == "-c"))
    assert settings["model_providers"]["warpsmith"]["base_url"] == f"{server.url}/v1"
    assert settings["model_context_window"] == 256
    export = shlex.split(launch(server, "--print", "opencode").stdout.splitlines()[0])[1]
    opencode = json.loads(export.partition("=")[2])
    assert opencode["provider"]["warpsmith"]["options"]["baseURL"] == f"{server.url}/v1"
    assert opencode["model"] == "warpsmith/my model"


def test_what_is_wrong_is_said(server: Server) -> None:
    for args, code, part in (
        (["nobody"], 2, "claude, codex"),
        ([], 2, "required: client.\n"),
        (["--url", "http://127.0.0.1:9", "claude"], 1, "warpsmith serve"),
        (["--api-key", "wrong", "claude"], 1, "--api-key"),
    ):
        result = launch(server, *args)
        assert result.returncode == code
        assert part in result.stderr
        assert "Traceback" not in result.stderr
    missing = launch(server, "aider", PATH="/nowhere")
    assert (missing.returncode, "pip install aider-chat" in missing.stderr) == (2, True)


def test_the_help_names_every_client() -> None:
    assert NAMES.split(", ") == list(CLIENTS)
