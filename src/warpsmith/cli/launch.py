"""`warpsmith launch`: start a known client so that it uses a running server, or print what that takes."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from warpsmith.errors import BadRequest, WarpsmithError

if TYPE_CHECKING:
    from warpsmith.serve.clients import Place

NAMES = "claude, codex, opencode, qwen, aider, open-webui, openai"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the server (default: http://127.0.0.1:8080)")
    parser.add_argument("--api-key", metavar="KEY", help="the server's key, if it asks for one")
    parser.add_argument("--print", action="store_true", help="print the environment and the command, start nothing")
    parser.add_argument("client", help=f"one of {NAMES}")
    rest = parser.add_argument("rest", nargs=argparse.REMAINDER, help="all that follows is for the client")
    rest.required = False  # or a missing client's error would name it too


def main(args: argparse.Namespace) -> int:
    from warpsmith.serve.clients import CLIENTS, launch_of

    launch = launch_of(args.client, _place(args))
    command = [*launch.command, *args.rest]
    if args.print or not launch.command:
        for name, value in launch.environment.items():
            print(f"export {name}={shlex.quote(value)}")
        if command:
            print(shlex.join(command))
        return 0
    program = shutil.which(command[0])
    if program is None:
        known = CLIENTS[args.client]
        raise BadRequest(f"{known.what} is not installed: there is no command {command[0]}.", f"{known.install}")
    environment = os.environ | launch.environment
    sys.stdout.flush()
    if os.name == "posix":
        os.execve(program, command, environment)  # the client takes our place: signals reach it, not us
    return subprocess.run([program, *command[1:]], env=environment, check=False).returncode


def _place(args: argparse.Namespace) -> Place:
    """The server's own word on what it is called and how much it holds."""
    from warpsmith.serve.clients import NO_KEY, Place

    url = args.url.rstrip("/").removesuffix("/v1")
    facts = _ask(f"{url}/props", args.api_key)
    context = facts["default_generation_settings"]["n_ctx"]
    return Place(url, facts["model_alias"], context, args.api_key or NO_KEY)


def _ask(url: str, key: str | None) -> dict[str, Any]:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            facts: dict[str, Any] = json.load(answer)
            return facts
    except urllib.error.HTTPError as error:
        fix = "Give it with --api-key." if error.code == 401 else "Wait until it is ready, or start another."
        raise WarpsmithError(f"The server at {url} answers {error.code} {error.reason}.", fix) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise WarpsmithError(f"No server answers at {url} ({reason}).", "Start one with `warpsmith serve`.") from None
