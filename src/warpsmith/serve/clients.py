"""Known clients: what each must be told to use this server. `launch` runs them, docs/clients.md shows the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from warpsmith.errors import BadRequest

NO_KEY = "none"  # what clients that insist on a key are given where the server asks for none


@dataclass(frozen=True)
class Place:
    """A running server as a client sees it."""

    url: str  # without a path
    model: str
    context: int
    key: str = NO_KEY

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Launch:
    """A command and the environment it needs."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Client:
    what: str
    install: str
    launch: Callable[[Place], Launch]


def _claude(place: Place) -> Launch:
    models = {f"ANTHROPIC_DEFAULT_{tier}_MODEL": place.model for tier in ("OPUS", "SONNET", "HAIKU")}
    environment = {
        "ANTHROPIC_BASE_URL": place.url,
        "ANTHROPIC_AUTH_TOKEN": place.key,
        "ANTHROPIC_API_KEY": "",  # would win over the token
        "ANTHROPIC_MODEL": place.model,
        **models,
        "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Launch(["claude"], environment)


def _codex(place: Place) -> Launch:
    provider = (
        f'{{ name = "warpsmith", base_url = "{place.v1}", wire_api = "responses", env_key = "WARPSMITH_API_KEY" }}'
    )
    settings = {
        "model_provider": '"warpsmith"',
        "model_providers.warpsmith": provider,
        "model_context_window": str(place.context),
        "web_search": '"disabled"',  # tools that OpenAI's own server runs
        "features.image_generation": "false",
    }
    flags = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    return Launch(["codex", "-m", place.model, *flags], {"WARPSMITH_API_KEY": place.key})


def _opencode(place: Place) -> Launch:
    model = {"name": place.model, "limit": {"context": place.context, "output": place.context // 2}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "warpsmith",
        "options": {"baseURL": place.v1, "apiKey": place.key},
        "models": {place.model: model},
    }
    name = f"warpsmith/{place.model}"
    settings = {"provider": {"warpsmith": provider}, "model": name, "small_model": name}
    return Launch(["opencode"], {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _openai(place: Place, names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, (place.v1, place.key, place.model), strict=False))


def _qwen(place: Place) -> Launch:
    return Launch(["qwen"], _openai(place, ("OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL")))


def _aider(place: Place) -> Launch:
    command = ["aider", "--model", f"openai/{place.model}", "--no-show-model-warnings"]
    return Launch(command, _openai(place, ("OPENAI_API_BASE", "OPENAI_API_KEY")))


def _open_webui(place: Place) -> Launch:
    environment = {"OPENAI_API_BASE_URL": place.v1, "OPENAI_API_KEY": place.key, "ENABLE_OLLAMA_API": "false"}
    return Launch(["open-webui", "serve", "--port", "3000"], environment)


def _shell(place: Place) -> Launch:
    return Launch([], _openai(place, ("OPENAI_BASE_URL", "OPENAI_API_KEY")))


CLIENTS = {
    "claude": Client("Claude Code", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Client("Codex CLI", "npm install -g @openai/codex", _codex),
    "opencode": Client("OpenCode", "npm install -g opencode-ai", _opencode),
    "qwen": Client("Qwen Code", "npm install -g @qwen-code/qwen-code", _qwen),
    "aider": Client("Aider", "pip install aider-chat", _aider),
    "open-webui": Client("Open WebUI", "pip install open-webui", _open_webui),
    "openai": Client("programs that use OpenAI's SDK", "", _shell),
}


def launch_of(name: str, place: Place) -> Launch:
    if name not in CLIENTS:
        raise BadRequest(f"There is no client {name!r} to launch.", f"Choose one of {', '.join(CLIENTS)}.")
    return CLIENTS[name].launch(place)
