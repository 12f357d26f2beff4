"""Replicas on a Ray cluster of this machine, started with Ray's own command."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.error
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

import warpsmith
from serving import ENVIRONMENT, Server

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'warpsmith[ray]'")

from ray.serve.schema import ServeDeploySchema

from warpsmith.errors import ModelNotFound, WarpsmithError
from warpsmith.serve.ray import Arguments, Replica, app, conversation

pytestmark = pytest.mark.ray

CHAT = "/v1/chat/completions"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas of wisp."""
    port, home = free_port(), tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # Ray's sockets want a short path
    config = {
        "http_options": {"port": port},
        "applications": [
            {
                "import_path": "warpsmith.serve.ray:app",
                "args": {"replicas": 2, "threads": 1, "context": 1024, "draft": "none", "queue": 8},
            }
        ],
    }
    ServeDeploySchema.model_validate(config)
    file = tmp_path_factory.mktemp("ray") / "serve.yaml"
    file.write_text(json.dumps(config))  # which is YAML
    environment = ENVIRONMENT | {
        "HOME": home,
        "RAY_TMPDIR": home,
        "RAY_ADDRESS": "local",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # on a busy machine a replica may be slow to say how many requests it has, and Ray would ask the other
        "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",
        "RAY_SERVE_MAX_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "60",
        "PYTHONPATH": str(Path(warpsmith.__file__).parents[1]),
    }
    command = [str(Path(sys.executable).with_name("serve")), "run", str(file)]
    with open(Path(home) / "log", "w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, text=True)
        server = Server(process, f"http://127.0.0.1:{port}")
        try:
            while not healthy(server) or len(reached(server)) < 2:
                with suppress(subprocess.TimeoutExpired):
                    raise AssertionError(f"it ended with {process.wait(0.5)}: {Path(log.name).read_text()}")
            yield server
        finally:
            process.terminate()
            process.wait(60)
            shutil.rmtree(home, ignore_errors=True)


def healthy(server: Server) -> bool:
    try:
        return server.ask("/health")[0] == 200
    except urllib.error.URLError:
        return False


def reached(server: Server) -> set[str]:
    """When the replicas were made that some conversations go to: a replica that joins later takes over some of them."""
    answers = [server.ask("/metrics", headers={"x-session-id": f"{number}"})[1] for number in range(10)]
    return {found[1] for answer in answers if (found := re.search(r"_created (\d\S+)", answer))}


def replicas(server: Server) -> set[int]:
    """The processes that run a model, among the descendants of the one that was started."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in table.splitlines()]
    ours = {server.process.pid}
    while more := {int(pid) for pid, parent, *_ in rows if int(parent) in ours} - ours:
        ours |= more
    return {int(pid) for pid, _, *args in rows if int(pid) in ours and "ServeReplica:default:replica" in "".join(args)}


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 40, "temperature": 0, **more}


def test_it_is_the_same_application(cluster: Server) -> None:
    assert cluster.ask("/v1/models")[1]["data"][0]["id"] == "wisp"
    assert cluster.ask("/")[1].startswith("<!doctype html>")
    assert cluster.ask("/nothing")[0] == 404
    assert cluster.ask("/props", headers={"host": "evil.example"})[0] == 421
    assert cluster.ask(CHAT, b"{")[0] == 400
    assert cluster.ask("/v1/messages", {})[1]["type"] == "error"
    events = cluster.ask(CHAT, chat("Hello", stream=True))[1]
    assert events.endswith("data: [DONE]\n\n")
    whole = cluster.ask(CHAT, chat("Hello"))[1]["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]) == whole


def test_a_conversation_stays_where_its_prefix_is(cluster: Server) -> None:
    """Each of these could be elsewhere by chance once in two times."""
    for number in range(5):
        messages: list[dict[str, str]] = []
        before = 0
        for turn in range(3):
            messages.append({"role": "user", "content": f"Conversation {number}: and what of matter {turn}?"})
            answer = cluster.ask(CHAT, {"messages": messages, "max_tokens": 20})[1]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= before
            messages.append(answer["choices"][0]["message"])
            before = answer["usage"]["prompt_tokens"] - 8  # the mark of an answer may be written anew


def test_a_client_that_vanishes_frees_the_replica(cluster: Server) -> None:
    connection = HTTPConnection(cluster.url.removeprefix("http://"), timeout=120)
    body = chat("Hello", stream=True, ignore_eos=True) | {"max_tokens": 100_000}
    connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json", "x-session-id": "gone"})
    connection.getresponse().read(10)
    connection.close()
    answer = cluster.ask(CHAT, chat("Hello"), {"x-session-id": "gone"})[1]  # its turn would come after 900 tokens
    assert answer["choices"][0]["message"]["content"]
    metrics = cluster.ask("/metrics", headers={"x-session-id": "gone"})[1]
    assert 'warpsmith_requests_total{outcome="broken off"} 1.0' in metrics


def test_more_requests_than_may_wait_are_refused(cluster: Server) -> None:
    """Sixteen at work and sixteen waiting."""
    answers: list[tuple[int, Any]] = []

    def ask(number: int) -> None:
        status, _, headers = cluster.ask(CHAT, chat(f"Number {number}"))
        answers.append((status, headers["retry-after"]))

    clients = [threading.Thread(target=ask, args=(number,)) for number in range(80)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert set(answers) == {(200, None), (429, "1")}
    assert sum(status == 200 for status, _ in answers) >= 32


def test_a_replica_that_is_killed_loses_no_request(cluster: Server) -> None:
    """Requests that wait or are at work on the dead replica are answered by the other, with the same text."""
    texts = [f"Say number {number}" for number in range(8)]  # on both replicas
    alone = {text: cluster.ask(CHAT, chat(text))[1]["choices"][0]["message"]["content"] for text in texts}
    before = replicas(cluster)
    victim = min(before)
    wrong: list[Any] = []
    replaced, asked = threading.Event(), threading.Semaphore(0)

    def keep_asking(text: str) -> None:
        while not replaced.is_set():
            status, answer, _ = cluster.ask(CHAT, chat(text))
            if status != 200 or answer["choices"][0]["message"]["content"] != alone[text]:
                wrong.append(answer)
            asked.release()

    threads = [threading.Thread(target=keep_asking, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for _ in range(2 * len(texts)):
        asked.acquire()
    os.kill(victim, signal.SIGKILL)
    while len(replicas(cluster) - {victim}) < 2:  # Ray starts another in its place
        asked.acquire()
    replaced.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(replicas(cluster) - before) == 1


def test_a_stream_whose_replica_dies_says_so(cluster: Server) -> None:
    connection = HTTPConnection(cluster.url.removeprefix("http://"), timeout=120)
    body = chat("Hello", stream=True, ignore_eos=True) | {"max_tokens": 100_000}
    connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read(10)
    for pid in replicas(cluster):
        os.kill(pid, signal.SIGKILL)
    last = answer.read().decode().strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "unavailable_error"
    assert cluster.ask(CHAT, chat("Hello"))[0] == 200  # it waits for a new one


# What needs no cluster


def key(body: dict[str, Any], **headers: str) -> str:
    return conversation(headers, json.dumps(body).encode())


def test_turns_of_a_conversation_have_one_key() -> None:
    first = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More"}]
    assert key({"messages": first}) == key({"messages": later, "temperature": 1})
    assert key({"messages": first}) != key({"messages": first[1:]})
    assert key({"input": "Hello"}) == key({"input": [{"role": "user", "content": "Hello"}, {"role": "assistant"}]})
    assert key({"system": "a", "messages": first}) != key({"system": "b", "messages": first})
    assert key({"prompt": "x" * 200}) == key({"prompt": "x" * 300})
    assert key({"prompt": "x"}) != key({"prompt": "y"})
    assert key({"messages": first, "prompt_cache_key": "mine"}) == "mine"
    assert conversation({"x-session-id": "this"}, b"{}") == "this"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 100_000, b'{"messages": 1}', b'{"messages": [1]}'])
def test_any_body_has_a_key(body: bytes) -> None:
    assert conversation({}, body)


def test_a_replica_whose_model_has_ended_is_not_well() -> None:
    replica = Replica(Arguments(context=256, draft="none"))
    replica.check_health()
    replica._worker.close()
    assert replica._worker.ended(60)
    with pytest.raises(WarpsmithError, match="has ended"):
        replica.check_health()
    with pytest.raises(ModelNotFound):
        Replica(Arguments(model="missing.gguf"))


def test_arguments_are_checked() -> None:
    assert Arguments.model_validate({"replicas": "3", "offline": "true"}).replicas == 3
    for wrong in ({"replicas": "0"}, {"no_such_thing": "1"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            app(wrong)
    assert Arguments(api_key="k").hosts is None
    assert "evil.example" not in (Arguments().hosts or ())
