"""The published OpenAPI document is true: schemathesis finds nothing between it and the server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from serving import Server, serving
from warpsmith.cli import main
from warpsmith.serve.app import make_app
from warpsmith.serve.engine import Worker
from warpsmith.serve.openapi import OPERATIONS, document
from warpsmith.serve.service import Service

schemathesis = pytest.importorskip("schemathesis")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = tmp_path_factory.mktemp("serve") / "small.gguf"  # random, and fast: thousands of requests are coming
    assert (
        main(["synth", "tiny", str(model), "--layers", "2", "--hidden", "256", "--ffn", "256", "--vocab", "272"]) == 0
    )
    with serving("-m", model, "-c", "256", "--draft", "none", "-t", "1") as server:
        yield server


schema = schemathesis.openapi.from_dict(document(keys=False))


@schema.parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_the_document_is_true(case: Any, server: Server) -> None:
    # valid bodies may still be refused, with 400 and a reason: a conversation without a user, a schema of nonsense
    case.call_and_validate(base_url=server.url, excluded_checks=[schemathesis.checks.positive_data_acceptance])


def test_every_route_is_documented() -> None:
    app = make_app(Service(Worker(lambda: pytest.fail("nothing is loaded"), 1), ["x"]))
    routes = {(method.lower(), route.path) for route in app.routes for method in route.methods - {"HEAD"}}  # type: ignore[attr-defined]
    hidden = {("get", "/page/{name}"), ("get", "/v1/health"), ("post", "/v1/embeddings")}
    named = {(method, re.sub(r":path}", "}", path)) for method, path in routes - hidden}
    assert named == {(operation.method, operation.path) for operation in OPERATIONS} | {("get", "/v1/models/{name}")}


def test_the_server_publishes_it(server: Server) -> None:
    assert server.ask("/openapi.json")[1] == document(keys=False)
