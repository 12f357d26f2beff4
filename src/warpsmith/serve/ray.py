"""The server as N replicas on a Ray cluster: `serve run warpsmith.serve.ray:app replicas=2`.

Ray starts, watches, replaces and finds replicas. Each is the application that `warpsmith serve` runs. A door in front
of them tells Ray's router which conversation a request belongs to, so that it goes where its prefix is.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, PositiveInt
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import warpsmith
from warpsmith.errors import WarpsmithError
from warpsmith.serve.app import make_app
from warpsmith.serve.engine import Worker
from warpsmith.serve.errors import ApiError
from warpsmith.serve.guard import MAX_BODY, Guard
from warpsmith.serve.http import json_response, sse
from warpsmith.serve.metrics import Metrics
from warpsmith.serve.run import LOOPBACK_NAMES
from warpsmith.serve.service import Service, model_name

ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
SESSION = "x-session-id"  # Ray's own header for what belongs together
PROMPT_KEY = 100  # characters of a bare prompt that tell one conversation from another
ATTEMPTS = 5  # replicas that may die under one request
DOOR_REQUESTS = 4096  # at a time: the door only waits
EVENT_STREAM = (b"content-type", b"text/event-stream; charset=utf-8")
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


class Arguments(BaseModel):
    """What `serve run ... NAME=VALUE` or a Serve config file may say."""

    model_config = ConfigDict(extra="forbid")

    replicas: PositiveInt = 1
    gpus: NonNegativeFloat = 0  # of each replica
    model: str | None = None
    context: PositiveInt | None = None
    device: str = "auto"
    draft: str = "auto"
    spec_budget: int | Literal["auto"] = "auto"
    threads: PositiveInt | None = None  # of each replica; left out, it takes one processor of Ray and uses all
    cache_type_k: str | None = None
    cache_type_v: str | None = None
    offline: bool = False
    alias: str | None = None
    api_key: str | None = None
    allow_host: str | None = None
    parallel: PositiveInt | None = None  # requests that a replica runs at a time
    cache_memory: NonNegativeInt | None = None  # MiB of each replica
    queue: PositiveInt = 64  # requests that a replica may have at a time

    @property
    def keys(self) -> list[str]:
        return [self.api_key] if self.api_key else []

    @property
    def hosts(self) -> list[str] | None:
        """Names that requests may address. Who has no key may be a web page that led a browser here."""
        if self.keys:
            return None
        return [*LOOPBACK_NAMES, *([self.allow_host.lower()] if self.allow_host else [])]


class Replica:
    """One model and its application."""

    def __init__(self, arguments: Arguments) -> None:
        a = arguments
        metrics = Metrics()
        self._worker = Worker(
            lambda: warpsmith.load(
                a.model,
                device=a.device,
                draft=a.draft,
                spec_budget=a.spec_budget,
                context=a.context,
                threads=a.threads,
                cache_type_k=a.cache_type_k,
                cache_type_v=a.cache_type_v,
                offline=a.offline,
                parallel=a.parallel,
                cache_bytes=None if a.cache_memory is None else a.cache_memory << 20,
            ),
            queue=a.queue,
            listener=metrics,
        )
        self._app = make_app(Service(self._worker, [a.alias or model_name(a.model)], None, a.keys, metrics))
        self._worker.start()
        self._worker.loaded.result()  # Ray sends nothing before this returns

    def check_health(self) -> None:
        """Ray replaces a replica where this fails, or does not answer."""
        if self._worker.ended(0):
            raise WarpsmithError("The thread that runs the model has ended.", "See the replica's log.")

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[Message]:
        """The messages that the application sends. Ray cancels this when the client is gone, and so ends its jobs."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        request: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return request.pop() if request else await asyncio.Future()

        running = asyncio.ensure_future(self._app(scope, receive, sent.put))
        running.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
            running.result()
        finally:
            running.cancel()


class Door:
    """Takes every request, and asks the replica that knows its conversation."""

    def __init__(self, replicas: DeploymentHandle, arguments: Arguments) -> None:
        self._replicas = replicas
        self._guard = Guard(self._pass_on, arguments.keys, arguments.hosts, MAX_BODY)

    async def __call__(self, request: Request) -> Response:
        return _Application(self._guard)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp | None = None
        try:
            request = Request(scope, receive)
            body = await request.body()
            replica = self._replicas.options(stream=True, session_id=conversation(request.headers, body))
            await self._ask(replica, {name: scope[name] for name in SCOPE if name in scope}, body, send)
        except BackPressureError:
            answer = _refusal(scope, 429, "As many requests are waiting as may. Try again in a moment.", "queue_full")
        except RayActorError:
            answer = _refusal(scope, 503, "The replicas that were asked have died. Ask again.", "replica_died")
        except ApiError as error:
            answer = json_response(error.body(scope["path"]), error.status, error.headers)
        if answer is not None:
            await answer(scope, receive, send)

    async def _ask(self, replica: DeploymentHandle, scope: dict[str, Any], body: bytes, send: Send) -> None:
        """Until the client has seen a byte of the answer, a replica that dies is no reason to lose the request."""
        for attempt in range(ATTEMPTS):
            unseen: list[Message] | None = []
            streams = False
            try:
                async for message in replica.answer.remote(scope, body):
                    if unseen is None:
                        await send(message)
                        continue
                    unseen.append(message)
                    streams = streams or EVENT_STREAM in message.get("headers", ())
                    if message.get("body"):
                        for held in unseen:
                            await send(held)
                        unseen = None
                for held in unseen or ():
                    await send(held)
                return
            except RayActorError:
                if unseen is None:
                    if not streams:
                        raise
                    error = ApiError(503, "The replica died in the middle of its answer. Ask again.")
                    event = sse(error.body(scope["path"]), "error").encode()
                    await send({"type": "http.response.body", "body": event})
                    return
                if attempt == ATTEMPTS - 1:
                    raise


class _Application(Response):
    """What Ray takes for a response, and lets answer the request."""

    def __init__(self, app: ASGIApp) -> None:
        super().__init__()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _refusal(scope: Scope, status: int, message: str, code: str) -> Response:
    error = ApiError(status, message, code=code)
    return json_response(error.body(scope["path"]), status, {"retry-after": "1"})


def conversation(headers: Mapping[str, str], body: bytes) -> str:
    """What the turns of one conversation have in common: what the client says they have, or how it begins."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        asked = {}
    said = headers.get(SESSION) or asked.get("prompt_cache_key")
    if isinstance(said, str) and said:
        return said
    turns = asked.get("messages", asked.get("input"))
    if isinstance(turns, list):
        first = next((i for i, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user"), 0)
        opening: Any = turns[: first + 1]
    elif turns is not None:
        opening = [{"role": "user", "content": turns}]
    elif isinstance(asked.get("prompt"), str):
        opening = asked["prompt"][:PROMPT_KEY]
    else:
        return uuid4().hex  # nothing to remember: any replica
    text = json.dumps([asked.get("system"), asked.get("instructions"), opening], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def app(given: dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and for Serve config files."""
    arguments = Arguments.model_validate(given)
    replica = serve.deployment(
        Replica,
        name="replica",
        num_replicas=arguments.replicas,
        max_ongoing_requests=arguments.queue,
        max_queued_requests=arguments.queue * arguments.replicas,
        ray_actor_options={"num_cpus": arguments.threads or 1, "num_gpus": arguments.gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        health_check_period_s=2,
        health_check_timeout_s=10,
    )
    door = serve.deployment(Door, name="door", max_ongoing_requests=DOOR_REQUESTS, ray_actor_options={"num_cpus": 0})
    return door.bind(replica.bind(arguments), arguments)
