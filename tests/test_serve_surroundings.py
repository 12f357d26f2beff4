"""The server's process in bad surroundings: clients that are killed, a full disk, closed streams, an end under load."""

from __future__ import annotations

import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

import pytest

from serving import ENVIRONMENT, Server, serving, start

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "ignore_eos": True}
CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"content-type": "application/json"})
answer = urllib.request.urlopen(request)
print(answer.read(10), flush=True)
answer.read()
"""


@contextmanager
def surrounded(redirection: str, *flags: str, file_size: int | None = None, **settings: str) -> Iterator[Server]:
    """A server started by a shell with its streams as `redirection` says; files may grow to `file_size` bytes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "warpsmith.cli", "serve", "--port", str(port), "-c", "512", *flags]

    def limit() -> None:
        if file_size is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))

    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        env=ENVIRONMENT | settings,
        preexec_fn=limit,
        text=True,
        stderr=subprocess.PIPE,
    )
    server = Server(process, f"http://127.0.0.1:{port}")
    try:
        while not answers(server):
            with suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"it ended with {process.wait(0.1)}: {process.communicate()[1]}")
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def answers(server: Server) -> bool:
    try:
        return server.ask("/health")[0] == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def check_works_and_ends(server: Server) -> None:
    for _ in range(2):
        status, answer, _ = server.ask(CHAT, HELLO)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
    assert server.ask(CHAT, HELLO | {"messages": "x"})[0] == 400
    code, said = server.stop()
    assert (code, "Traceback" in said) == (0, False)


@pytest.mark.parametrize(
    "streams", [">&-", "2>&-", ">&- 2>&- <&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>/dev/full"]
)
def test_streams_that_take_nothing_do_not_matter(streams: str) -> None:
    """A server has nothing to say on stdout, and a log that is full or closed is no reason to end."""
    with surrounded(streams) as server:
        check_works_and_ends(server)


def test_a_full_disk_does_not_matter(tmp_path: Path) -> None:
    """Costs of drafts are measured and recorded in the cache; where they cannot be, they are measured every time."""
    log = tmp_path / "log"
    with surrounded(f"2>{log}", "--draft", "ngram", file_size=0, XDG_CACHE_HOME=str(tmp_path / "cache")) as server:
        check_works_and_ends(server)
    assert log.read_text() == ""
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_is_killed_frees_the_model(stream: bool) -> None:
    with serving("-c", "4096") as server:
        endless = json.dumps(HELLO | {"max_tokens": 100_000, "stream": stream})
        command = [sys.executable, "-c", CLIENT, server.url + CHAT, endless]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
        while server.metric("requests_processing") + server.metric("requests_deferred") < 3:
            pass
        if stream:
            assert clients[0].stdout is not None
            assert clients[0].stdout.readline()  # in the middle of its answer
        for client in clients:
            client.kill()
            client.communicate()
        assert server.ask(CHAT, HELLO)[1]["usage"]["completion_tokens"] == 4
        while server.metric("requests_processing") + server.metric("requests_deferred"):
            pass
        assert server.metric("tokens_predicted_total") == 4  # those of requests that ended
        assert server.metric("requests_total") == 4


@pytest.mark.parametrize(("drain", "code"), [("120", 0), ("0", 1)])
def test_sigterm_under_load(drain: str, code: int) -> None:
    """Every client hears something: a whole answer, or that the server ends; and the count of the latter is named."""
    server = start("-c", "1024", "--drain", drain)
    outcomes: list[str] = []
    begun = threading.Semaphore(0)

    def ask(stream: bool) -> None:
        while True:
            try:
                begun.release()
                status, answer, _ = server.ask(CHAT, HELLO | {"max_tokens": 200, "stream": stream})
            except (urllib.error.URLError, ConnectionError):
                return  # no longer there
            text = answer if isinstance(answer, str) else json.dumps(answer)
            finished = "[DONE]" in text if stream else status == 200
            outcomes.append("finished" if finished else "told" if "shutting down" in text else f"{status} {text}")

    clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(6)]
    for client in clients:
        client.start()
    for _ in range(12):
        begun.acquire()
    while not server.metric("requests_processing"):
        pass  # some may be between two requests
    ended, said = server.stop(signal.SIGTERM)
    for client in clients:
        client.join()
    assert set(outcomes) <= {"finished", "told"}
    assert "finished" in outcomes
    assert (ended, "not finished: " in said) == (code, code == 1)


def test_a_terminal_that_goes_away_ends_it_as_sigterm_does() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup ignore it, and the server would, too
    server = start("-c", "1024", "--drain", "0")
    signal.signal(signal.SIGHUP, before)
    client = HTTPConnection(server.url.removeprefix("http://"), timeout=120)
    body = json.dumps(HELLO | {"max_tokens": 1000, "stream": True})
    client.request("POST", CHAT, body, {"content-type": "application/json"})
    answer = client.getresponse()
    answer.read(10)
    code, said = server.stop(signal.SIGHUP)
    assert "shutting down" in answer.read().decode()
    assert (code, said) == (129, "not finished: 1 request\n")


def test_nohup_keeps_it_alive() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # what it starts with
    try:
        server = start("-c", "512")
    finally:
        signal.signal(signal.SIGHUP, before)
    server.process.send_signal(signal.SIGHUP)
    assert server.ask(CHAT, HELLO)[0] == 200
    assert server.stop()[0] == 0
