"""A server under load, on loopback: is anything lost, does memory grow, is every text the text alone, and how fast?

    python bench/load_server.py                        # 64 clients, 5,000 requests, then throughput; about 20 minutes
    python bench/load_server.py --requests 200 --clients 16 --levels
    python bench/load_server.py --requests 0 --levels 1 8 --serve -m MODEL

First every kind of request is asked of a server that runs one at a time, without a draft and without a prefix cache:
these are the texts alone. Then clients ask a server with all of that at random. Some read slowly, some go away midway
or at once, some send nonsense. Whoever is told to come back later does. In the end every request must have had its
answer, its refusal or its client gone, every text must be the text alone, and the server's memory may not have grown
after the first fifth of the requests. Then, on a server of its own, so many clients at a time each want 128 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from statistics import median, quantiles
from time import perf_counter
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
QUESTIONS = ("How do I sort a list?", "Write a haiku.", "What is a prime?", "Name three colours.", "Explain a loop.")
PARAGRAPH = "The server reads a prompt once and keeps what it has read, so that the next one need not read it again. "
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
GROWTH = 16 << 20  # bytes by which the server's memory may grow after the first fifth: what an allocator keeps


def ask(content: str, **options: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 24, "temperature": 0} | options


def kinds() -> list[tuple[str, dict[str, Any]]]:
    """Requests as they come: short and long, greedy and sampled, with formats, probabilities and stop strings."""
    made = [(CHAT, ask(question)) for question in QUESTIONS]
    made += [(CHAT, ask(question, temperature=0.9, seed=7, top_k=40)) for question in QUESTIONS]
    made += [(CHAT, ask(PARAGRAPH * n + question)) for n, question in zip((4, 8, 16), QUESTIONS, strict=False)]
    made += [(CHAT, ask(question, logprobs=True, top_logprobs=3)) for question in QUESTIONS[:2]]
    made += [(CHAT, ask(question, repeat_penalty=1.3, max_tokens=40)) for question in QUESTIONS[:2]]
    made += [(CHAT, ask("A name, please.", response_format={"type": "json_object", "schema": SCHEMA}))]
    made += [(CHAT, ask("Yes or no?", regex="(yes|no)(, (yes|no)){3}", temperature=1, seed=3))]
    code = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef "
    made += [(TEXT, {"prompt": code, "max_tokens": 48, "temperature": 0, "stop": ["\n\n\n"]})]
    return made


NONSENSE = (
    b"{",
    b"[]",
    json.dumps({"messages": []}).encode(),
    json.dumps(ask("x", temperature="hot")).encode(),
    json.dumps(ask("x", top_k=1.5)).encode(),
    json.dumps(ask("x", no_such_parameter=1)).encode(),
    json.dumps(ask("x", model="no-such-model")).encode(),
    json.dumps(ask(PARAGRAPH * 400)).encode(),
    json.dumps(ask("x", regex="(")).encode(),
    json.dumps({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}).encode(),
)


@dataclass
class Server:
    process: subprocess.Popen[str]
    host: str
    port: int

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.host}:{self.port}/metrics", timeout=60) as answer:
            found = re.search(rf"^warpsmith_{name} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None, name
        return float(found[1])

    def processor_seconds(self) -> float:
        with open(f"/proc/{self.process.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def resident(self) -> int:
        """Bytes of memory in use."""
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(*flags: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "warpsmith.cli", "serve", "--port", "0", "-c", "1024", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = next(found for line in process.stderr if (found := re.search(r"on http://(\S+):(\d+)", line)))
        yield Server(process, address[1], int(address[2]))
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


# -- a client ---------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    status: int
    body: bytes
    first: float = 0.0  # seconds to the first token of a stream

    def text(self) -> str:
        """What was generated, streamed or not."""
        events = re.findall(rb"^data: (\{.*)$", self.body, re.MULTILINE)
        texts = []
        for event in [json.loads(event) for event in events] or [json.loads(self.body)]:
            for choice in event["choices"]:
                part = choice.get("delta") or choice.get("message") or choice
                texts.append(part.get("content") or part.get("text") or "")
        return "".join(texts)


class Gone(Exception):
    """The client went away, as it meant to."""


async def request(
    server: Server, path: str, body: bytes, *, leave_after: int | None = None, pause: float = 0.0
) -> Answer:
    """Post; `leave_after` so many bytes, with a reset as kill -9 gives; `pause` between small reads."""
    began, first = perf_counter(), 0.0
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        head = f"POST {path} HTTP/1.1\r\nHost: {server.host}:{server.port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        got = b""
        while leave_after is None or len(got) < leave_after:
            part = await reader.read(256 if pause else 65536)
            got += part
            if not first and b'"content":"' in got.replace(b'"content":""', b""):
                first = perf_counter() - began
            if not part:
                break
            if pause:
                await asyncio.sleep(pause)
        if leave_after is not None:
            reset = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
            raise Gone
    finally:
        writer.close()
    headers, _, rest = got.partition(b"\r\n\r\n")
    chunked = b"transfer-encoding: chunked" in headers.lower()
    return Answer(int(headers.split()[1]), b"".join(_chunks(rest)) if chunked else rest, first)


def _chunks(data: bytes) -> Iterator[bytes]:
    while data:
        size, _, data = data.partition(b"\r\n")
        yield data[: int(size, 16)]
        data = data[int(size, 16) + 2 :]


# -- load -------------------------------------------------------------------------------------------------------------


class Load:
    """Clients that ask at random until so many requests were made, or the time is over."""

    def __init__(self, server: Server, texts: Sequence[str], requests: int, seconds: float, seed: int) -> None:
        self.server, self.texts, self.requests = server, texts, requests
        self.until = perf_counter() + seconds
        self.numbers, self.random, self.seed = count(), random.Random(seed), seed
        self.outcomes: Counter[str] = Counter()
        self.memory: list[int] = []

    async def run(self, clients: int) -> None:
        await asyncio.gather(*(self.client() for _ in range(clients)))

    async def client(self) -> None:
        while (number := next(self.numbers)) < self.requests and perf_counter() < self.until:
            try:
                outcome = await self.one(random.Random(f"{self.seed} {number}"))
            except Gone:
                outcome = "left"
            except (OSError, ValueError, KeyError, asyncio.IncompleteReadError) as error:
                outcome = f"lost: {type(error).__name__} {error}"
            self.outcomes[outcome] += 1
            if number % max(1, self.requests // 50) == 0:
                self.memory.append(self.server.resident())

    async def one(self, draw: random.Random) -> str:
        """One request and what became of it."""
        luck, choice = draw.random(), draw.randrange(len(self.texts))
        path, body = kinds()[choice]
        if luck < 0.1:
            answer = await request(self.server, CHAT, draw.choice(NONSENSE))
            return "refused" if answer.status in (400, 404) else f"lost: nonsense {answer.status}"
        stream = luck < 0.65
        data = json.dumps(body | {"stream": stream}).encode()
        leave = None
        if luck < 0.15:
            leave = 0  # before anything came
        elif luck < 0.25:
            leave = draw.randrange(200, 2500)  # some time during the answer
        while True:
            answer = await request(
                self.server, path, data, leave_after=leave, pause=0.02 if 0.25 <= luck < 0.3 else 0.0
            )
            if answer.status != 429:
                break
            self.outcomes["told to wait"] += 1
            await asyncio.sleep(0.5 + draw.random())
        if answer.status != 200:
            return f"lost: status {answer.status}"
        return "finished" if answer.text() == self.texts[choice] else f"another text: kind {choice}"


async def texts_alone(server: Server) -> list[str]:
    return [(await request(server, path, json.dumps(body).encode())).text() for path, body in kinds()]


def load(args: argparse.Namespace) -> bool:
    """Put the server under load; whether all was well."""
    with serving("--parallel", "1", "--cache-memory", "0", "--draft", "none", *args.serve) as server:
        texts = asyncio.run(texts_alone(server))
    with serving("--parallel", "8", "--queue", "40", "--cache-memory", "64", *args.serve) as server:
        made = Load(server, texts, args.requests, args.seconds, args.seed)
        began = perf_counter()
        asyncio.run(made.run(args.clients))
        took = perf_counter() - began
        while server.metric("requests_processing"):  # those whose clients have gone
            pass
        cached, asked = server.metric("prefix_cache_hits_total"), server.metric("prefix_cache_queries_total")
    waits = made.outcomes.pop("told to wait", 0)
    wrong = {outcome: n for outcome, n in made.outcomes.items() if outcome.startswith(("lost", "another"))}
    warm = max(made.memory[: 1 + len(made.memory) // 5])
    last = median(made.memory[-max(1, len(made.memory) // 10) :])
    rows = [["requests", f"{made.outcomes.total()} from {args.clients} clients in {took:.0f} s"]]
    rows += [[outcome, str(n)] for outcome, n in sorted(made.outcomes.items())]
    rows += [["told to come back (429)", str(waits)]]
    rows += [["prompt tokens from the prefix cache", f"{cached / max(1, asked):.0%}"]]
    fifths = [f"{made.memory[len(made.memory) * n // 5 - 1] / 2**20:.0f}" for n in range(1, 6)]
    rows += [["server's memory after each fifth, MiB", ", ".join(fifths)]]
    print(table(["load", ""], rows))
    fine = not wrong and last - warm <= GROWTH and made.outcomes.total() == args.requests
    print("nothing lost, every text the text alone, memory flat" if fine else f"NOT WELL: {wrong or 'see above'}")
    return fine


def table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


# -- throughput -------------------------------------------------------------------------------------------------------


@dataclass
class Level:
    rates: list[float]  # tokens a second, one a round
    efforts: list[float]  # tokens a second of a processor's time, likewise
    first: list[float]  # seconds to the first token, one a request


async def one_round(server: Server, clients: int, tokens: int, seed: int) -> tuple[float, list[float]]:
    """All ask at the same time, each something of its own."""

    def body(client: int) -> bytes:
        question = f"{QUESTIONS[client % 5]} Number {seed * 100 + client}."
        return json.dumps(ask(question, max_tokens=tokens, ignore_eos=True, stream=True)).encode()

    began = perf_counter()
    answers = await asyncio.gather(*(request(server, CHAT, body(client)) for client in range(clients)))
    took = perf_counter() - began
    assert all(answer.status == 200 for answer in answers)
    return clients * tokens / took, [answer.first for answer in answers]


def throughput(args: argparse.Namespace, *flags: str) -> dict[int, Level]:
    levels = {level: Level([], [], []) for level in args.levels}
    with serving("--parallel", str(max(args.levels)), *flags, *args.serve) as server:
        asyncio.run(one_round(server, 1, args.tokens, 99))
        for number in range(args.rounds):  # levels take turns, so that a busy machine is busy for all
            for level, found in levels.items():
                before = server.processor_seconds()
                rate, first = asyncio.run(one_round(server, level, args.tokens, number))
                found.efforts.append(level * args.tokens / (server.processor_seconds() - before))
                found.rates.append(rate)
                found.first += first
    return levels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=5000, help="under load; 0: none (default: 5000)")
    parser.add_argument("--clients", type=int, default=64, help="at a time, under load (default: 64)")
    parser.add_argument("--seconds", type=float, default=2400, help="of load, at most (default: 2400)")
    parser.add_argument("--levels", type=int, nargs="*", default=[1, 4, 8, 16], help="clients at a time")
    parser.add_argument("--tokens", type=int, default=128, help="that each of them wants (default: 128)")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="flags for `warpsmith serve`; the last")
    args = parser.parse_args()
    fine = load(args) if args.requests else True
    if args.levels:
        rows = []
        for name, flags in (("auto", ()), ("none", ("--draft", "none"))):
            levels = throughput(args, *flags)
            one = median(levels[args.levels[0]].rates)
            for level, found in levels.items():
                rate, effort, first = median(found.rates), median(found.efforts), found.first
                late = quantiles(first, n=100)[-1] if len(first) > 1 else first[0]
                row = [name, str(level), f"{rate:.0f}", f"{rate / one:.2f}", f"{effort:.0f}"]
                rows.append([*row, f"{median(first) * 1e3:.0f}", f"{late * 1e3:.0f}"])
        head = ["draft", "parallel", "tok/s", "times one", "tok/s of a processor", "first token p50, ms", "p99, ms"]
        print(table(head, rows))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
