"""The server as a process and over plain HTTP: what it refuses, what it survives, how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from serving import ENVIRONMENT, Server, serving, start
from warpsmith.serve.guard import MAX_BODY

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
ENDLESS = HELLO | {"ignore_eos": True, "max_tokens": 100_000, "stream": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("-c", "512") as server:
        yield server


def opened(server: Server, body: dict[str, Any], path: str = "/v1/chat/completions") -> http.client.HTTPConnection:
    """A connection with a request under way."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
    return connection


# Small endpoints


def test_health_models_and_properties(server: Server) -> None:
    assert server.ask("/health")[:2] == (200, {"status": "ok"})
    assert server.ask("/v1/models")[1]["data"][0]["id"] == "wisp"
    facts = server.ask("/props")[1]
    assert facts["default_generation_settings"]["n_ctx"] == 512
    assert "/" not in facts["model_alias"]
    assert server.ask("/v1/embeddings", {})[0] == 501


def test_tokens_and_templates(server: Server) -> None:
    tokens = server.ask("/tokenize", {"content": "def ä<|im_end|>"})[1]["tokens"]
    assert server.ask("/detokenize", {"tokens": tokens})[1] == {"content": "def ä<|im_end|>"}
    as_text = server.ask("/tokenize", {"content": "<|im_end|>", "parse_special": False})[1]["tokens"]
    assert len(as_text) > 1
    pieces = server.ask("/tokenize", {"content": "a ä", "with_pieces": True})[1]["tokens"]
    assert pieces[0]["piece"] == "a"
    assert server.ask("/detokenize", {"tokens": [1 << 20]})[0] == 400
    prompt = server.ask("/apply-template", {"messages": HELLO["messages"], "enable_thinking": True})[1]
    assert prompt["prompt"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert prompt["tokens"] == len(server.ask("/tokenize", {"content": prompt["prompt"]})[1]["tokens"])


def test_metrics_count_what_was_done(server: Server) -> None:
    before = server.metric("tokens_predicted_total")
    server.ask("/v1/chat/completions", HELLO | {"ignore_eos": True})
    assert server.metric("tokens_predicted_total") == before + 4
    assert server.metric("requests_processing") == 0
    assert "time_to_first_token_seconds_bucket" in server.ask("/metrics")[1]


# Refusals


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (b"{", "not valid JSON"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": "x"}', "messages"),
        (b"[" * 100_000, "nested"),
        (b'{"messages":' + b"[" * 300 + b"]" * 300 + b"}", "nested"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "0.5"}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "x"}], "seed": 1e400}', "seed"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', ""),
        (b'{"messages": [{"role": "system", "content": "x"}]}', "user message"),
        (
            b'{"messages": [{"role": "user", "content": "x"}],'
            b' "tools": [{"type": "function", "function": {"name": "f"}}]}',
            "tools",
        ),
        (b'{"messages": [{"role": "user", "content": "x"}], "grammar": "root ::= ("}', "grammar"),
        (b'{"messages": [{"role": "user", "content": "x"}], "json_schema": {"type": "nonsense"}}', "json_schema"),
        (b'{"messages": [{"role": "user", "content": "x"}], "regex": "a", "grammar": "b"}', "both"),
        (b'{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}}', "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"999999": 1}}', "logit_bias"),
    ],
)
def test_bad_bodies_are_refused_with_a_sentence(server: Server, body: bytes, part: str) -> None:
    status, answer, _ = server.ask("/v1/chat/completions", body)
    assert status == 400
    assert part in answer["error"]["message"]
    assert server.ask("/health")[0] == 200


def test_each_api_has_its_own_shape_of_errors(server: Server) -> None:
    assert set(server.ask("/v1/completions", {})[1]["error"]) == {"message", "type", "param", "code"}
    assert server.ask("/v1/messages", {})[1]["type"] == "error"
    status, answer, headers = server.ask("/v1/chat/completions")
    assert (status, headers["allow"]) == (405, "POST")
    assert "error" in answer
    assert server.ask("/nothing")[0] == 404
    assert server.ask("/v1/completions", b"{}", {"content-type": "text/plain"})[0] == 415


def test_a_body_that_is_too_large_is_not_read(server: Server) -> None:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    connection.putrequest("POST", "/tokenize")
    connection.putheader("content-type", "application/json")
    connection.putheader("content-length", str(MAX_BODY + 1))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    piece = b"x" * (1 << 20)
    try:
        connection.request(
            "POST", "/tokenize", iter([piece] * 40), {"content-type": "application/json"}, encode_chunked=True
        )
        assert connection.getresponse().status == 413
    except (BrokenPipeError, ConnectionResetError):
        pass  # it has hung up already
    assert server.ask("/health")[0] == 200


def test_a_host_name_that_is_not_ours_is_refused(server: Server) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example"):
        assert server.ask("/props", headers={"host": host})[0] == 421
    for host in ("localhost", "LOCALHOST:8080", "127.0.0.1:1", "[::1]:8080"):
        assert server.ask("/props", headers={"host": host})[0] == 200


def test_other_web_pages_may_not_call(server: Server) -> None:
    headers = server.ask("/props", headers={"origin": "https://evil.example"})[2]
    assert headers["access-control-allow-origin"] is None


def test_keys_names_and_origins(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\ntwo\n")
    flags = ("--api-key-file", keys, "--api-key", "three", "--alias", "mine", "--cors", "https://good.example")
    with serving(*flags, "--host", "0.0.0.0", "--allow-host", "box.lan", "-c", "256") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        box = {"host": "box.lan"}
        assert server.ask("/props")[0] == 421
        assert server.ask("/health", headers=box)[0] == 200
        assert server.ask("/", headers=box)[0] == 200
        for given in ({}, {"authorization": "Bearer on"}, {"authorization": "Basic one"}, {"x-api-key": "onetwo"}):
            status, answer, _ = server.ask("/v1/models", headers=box | given)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
        for given in ({"authorization": "Bearer one"}, {"authorization": "bearer three"}, {"x-api-key": "two"}):
            assert server.ask("/v1/models", headers=box | given)[0] == 200
        key = box | {"x-api-key": "one"}
        assert server.ask("/v1/chat/completions", HELLO | {"model": "mine"}, key)[1]["model"] == "mine"
        assert server.ask("/v1/chat/completions", HELLO | {"model": "wisp"}, key)[0] == 404
        found = server.ask("/v1/models", headers=key | {"origin": "https://good.example"})[2]
        assert found["access-control-allow-origin"] == "https://good.example"


@pytest.mark.parametrize(
    ("args", "code", "part"),
    [
        (["-m", "no-such-file.gguf"], 3, "no-such-file.gguf"),
        (["--port", "99999999"], 2, "port"),
        (["--host", "192.0.2.1"], 2, "--host"),
        (["--queue", "0"], 2, "--queue"),
        (["--parallel", "0"], 2, "--parallel"),
        (["--parallel", "65"], 2, "65 sequences"),
        (["--parallel", "8", "--cache-memory", "100000000"], 5, "--cache-memory"),
        (["--api-key", ""], 2, "API key"),
        (["--chat-template-file", "no-such-file"], 1, "no-such-file"),
    ],
)
def test_a_server_that_cannot_start_says_why(args: list[str], code: int, part: str) -> None:
    command = [sys.executable, "-m", "warpsmith.cli", "serve", "--port", "0", *args]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert result.returncode == code, result.stderr
    assert part in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_named(server: Server) -> None:
    port = str(urlsplit(server.url).port)
    command = [sys.executable, "-m", "warpsmith.cli", "serve", "--port", port]
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    assert (result.returncode, port in result.stderr) == (2, True)


def test_a_server_open_to_others_warns_without_a_key() -> None:
    command = [sys.executable, "-m", "warpsmith.cli", "serve", "--port", "0", "--host", "0.0.0.0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    assert process.stderr is not None
    assert "warning: anybody" in process.stderr.readline()
    process.send_signal(signal.SIGINT)  # while it loads
    process.communicate(timeout=60)
    assert process.returncode == 130


# Many, slow and vanished clients


def test_a_client_that_vanishes_frees_the_model(server: Server) -> None:
    before = server.metric("requests_total")
    gone = [opened(server, ENDLESS), opened(server, ENDLESS | {"stream": False})]
    for connection in gone:
        assert connection.sock is not None
        connection.sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0"
        )  # a reset, as kill -9 gives
    gone[0].getresponse().read(10)
    for connection in gone:
        connection.close()
    answer = server.ask("/v1/chat/completions", HELLO | {"ignore_eos": True})[1]
    assert answer["usage"]["completion_tokens"] == 4
    while server.metric("requests_total") < before + 3:  # they end by themselves, and within a step
        pass


def test_clients_that_vanish_at_once_free_the_model(server: Server) -> None:
    before = server.metric("requests_total")
    for path, body in (
        ("/v1/chat/completions", ENDLESS),
        ("/v1/completions", {"prompt": "x", "ignore_eos": True, "max_tokens": 100_000, "stream": True}),
        ("/v1/messages", HELLO | {"max_tokens": 100_000, "stream": True}),
        ("/v1/responses", {"input": "x", "stream": True}),
    ):
        for _ in range(5):
            connection = opened(server, body, path)
            assert connection.sock is not None
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
    assert server.ask("/v1/chat/completions", HELLO)[0] == 200
    while server.metric("requests_processing"):
        pass
    assert before < server.metric("requests_total") <= before + 21
    assert server.metric("tokens_predicted_total") < 2000


def test_text_is_the_same_whatever_runs_beside_it(server: Server) -> None:
    def ask(seed: int) -> str:
        body = HELLO | {"temperature": 1, "seed": seed, "max_tokens": 16}
        return server.ask("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]

    alone = [ask(seed) for seed in range(4)]
    together: list[str] = [""] * 8

    def one(place: int) -> None:
        together[place] = ask(place % 4)

    threads = [threading.Thread(target=one, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone * 2


def test_a_full_queue_answers_429_and_the_rest_is_served() -> None:
    with serving("-c", "4096", "--queue", "2", "--parallel", "1") as server:
        busy = [opened(server, ENDLESS)]
        busy[0].getresponse().read(10)  # at work: two more may wait
        busy += [opened(server, HELLO) for _ in range(2)]
        while server.metric("requests_deferred") < 2:
            pass
        status, answer, headers = server.ask("/v1/chat/completions", HELLO)
        assert (status, headers["retry-after"]) == (429, "1")
        assert answer["error"]["type"] == "rate_limit_error"
        assert server.ask("/v1/messages", HELLO)[1]["error"]["type"] == "rate_limit_error"
        busy[0].close()
        for connection in busy[1:]:
            assert connection.getresponse().status == 200


# The end


def test_sigterm_lets_what_has_begun_finish() -> None:
    server = start("-c", "4096", "--drain", "120")
    connection = opened(server, ENDLESS | {"max_tokens": 300})
    answer = connection.getresponse()
    answer.read(10)
    code, said = server.stop()
    assert b"[DONE]" in answer.read()
    assert (code, "not finished" in said) == (0, False)


def test_what_does_not_finish_in_time_is_told_so_and_named() -> None:
    server = start("-c", "4096", "--drain", "0", "--parallel", "1")
    running, waiting = opened(server, ENDLESS), opened(server, ENDLESS | {"stream": False})
    answer = running.getresponse()
    answer.read(10)
    while server.metric("requests_deferred") < 1:
        pass
    code, said = server.stop()
    assert "shutting down" in answer.read().decode()
    assert waiting.getresponse().status == 503
    assert (code, "not finished: 2 requests" in said) == (1, True)


def test_a_log_that_nobody_reads_does_not_end_it() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "warpsmith.cli", "serve", "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT)
    assert process.stderr is not None
    assert process.stdout is not None
    process.stderr.close()
    process.stdout.close()
    server = Server(process, f"http://127.0.0.1:{port}")  # type: ignore[arg-type]
    try:
        while True:
            try:
                if server.ask("/health")[0] == 200:
                    break
            except urllib.error.URLError:
                assert process.poll() is None
        assert server.ask("/v1/chat/completions", HELLO)[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_ctrl_c_ends_it() -> None:
    code, said = start().stop(signal.SIGINT)
    assert (code, "Traceback" in said) == (130, False)
