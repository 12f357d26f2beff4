"""A server from its start to its end: the socket, the signals, the model's thread."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette

from warpsmith.errors import BadRequest
from warpsmith.llm import LLM
from warpsmith.serve.engine import Worker
from warpsmith.serve.guard import is_loopback

# Seconds that a thread may keep the interpreter to itself while another wants it. The model's thread wants it after
# every pass; Python's own 5 ms are longer than a pass of a small model.
SWITCH = 0.0005

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Binding:
    """Where to listen, and for how long requests may go on after the end was asked for."""

    host: str = "127.0.0.1"
    port: int = 8080
    allowed: Sequence[str] = ()  # more names that requests may address
    drain: float = 10.0

    @property
    def hosts(self) -> list[str] | None:
        """Names a request may address: on loopback these alone, elsewhere any unless some were given."""
        if is_loopback(self.host):
            return [*LOOPBACK_NAMES, self.host, *(name.lower() for name in self.allowed)]
        return [self.host, *(name.lower() for name in self.allowed)] if self.allowed else None

    def listen(self) -> socket.socket:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadRequest(
                f"Cannot listen on {self.host} port {self.port}: {reason}.", "Choose another --host or --port."
            ) from None
        return listener


class _Server(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(app: Starlette, worker: Worker, binding: Binding, say: Callable[[str], None]) -> int:
    """Run until a signal; returns the exit code. A model that cannot be loaded raises its error."""
    listener = binding.listen()
    sys.setswitchinterval(SWITCH)
    code = asyncio.run(_serve(app, worker, binding, listener, say))
    if not worker.ended(5):  # a thread within a kernel cannot be stopped, and an interpreter cannot end beside it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def _serve(
    app: Starlette, worker: Worker, binding: Binding, listener: socket.socket, say: Callable[[str], None]
) -> int:
    config = uvicorn.Config(
        app,
        log_config=None,  # warnings go to stderr as they are; uvicorn's own way needs a stdout
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # nobody asks where a request came from
        timeout_graceful_shutdown=int(binding.drain) + 5,
        h11_max_incomplete_event_size=64 << 10,
    )
    server, loop = _Server(config), asyncio.get_running_loop()
    codes: list[int] = []

    def stop(code: int) -> None:
        """The first signal lets requests end, the second does not."""
        codes.append(code)
        worker.close()
        server.should_exit = True
        if len(codes) > 1:
            worker.abandon()
            server.force_exit = True

    ends = [(signal.SIGINT, 130), (signal.SIGTERM, 0)]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        ends.append((signal.SIGHUP, 129))
    for number, code in ends:
        signal.signal(number, lambda *_, code=code: loop.call_soon_threadsafe(stop, code))
    worker.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        llm = await _first(asyncio.wrap_future(worker.loaded), serving)
        if llm is not None:
            host, port = listener.getsockname()[:2]
            say(f"listening on http://{f'[{host}]' if ':' in host else host}:{port} (Ctrl-C ends it)")
            lost = await _drained(worker, server, serving, binding.drain)
            if lost:
                say(f"not finished: {lost} request{'s' if lost > 1 else ''}")
                codes.append(1)
    finally:
        server.should_exit = True
        await serving
    return codes[0] or codes[-1] if codes else 1


async def _first(loaded: asyncio.Future[LLM], serving: asyncio.Task[None]) -> LLM | None:
    """The model once it is there; None if the server was stopped before."""
    await asyncio.wait((loaded, serving), return_when=asyncio.FIRST_COMPLETED)
    return loaded.result() if loaded.done() else None


async def _drained(worker: Worker, server: uvicorn.Server, serving: asyncio.Task[None], patience: float) -> int:
    """Wait for the end; then for what has begun, so long as patience lasts. Returns how many requests were lost."""
    while not server.should_exit and not serving.done():
        await asyncio.sleep(0.05)
    deadline = asyncio.get_running_loop().time() + patience
    while worker.open and asyncio.get_running_loop().time() < deadline and not server.force_exit:
        await asyncio.sleep(0.02)
    return len(worker.abandon())
