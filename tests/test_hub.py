"""Model names: what they mean, and what is fetched for them from a Hub that runs on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from warpsmith.checkpoint.hub import HubName, choose, parse, quant_of, resolve
from warpsmith.errors import ModelNotFound

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SPLIT = [f"Q8_0/model-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "someone/model-GGUF": {
        "README.md": b"#",
        "mmproj-Q4_K_M.gguf": b"a vision tower",
        "model-Q4_K_M.gguf": b"four bits",
        "model-UD-Q5_K_XL.gguf": b"five bits",
        **{name: name.encode() for name in SPLIT},
    },
    "someone/model": {
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "modeling.py": b"import os",
        "model.safetensors.index.json": json.dumps({"weight_map": {"x": "model-00001-of-00001.safetensors"}}).encode(),
        "model-00001-of-00001.safetensors": b"weights",
    },
    "someone/nothing": {"README.md": b"#"},
    "someone/gated": {"model-Q4_K_M.gguf": b"secret"},
}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as its client asks for: a repository's description, and files with their ETag and commit."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for repo, files in REPOSITORIES.items():
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return self.answer_json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})
            if path.startswith(f"/api/models/{repo}/tree/"):
                tree = [{"type": "file", "path": f, "size": len(d), "oid": _etag(d)} for f, d in files.items()]
                return self.answer_json(tree)
            file = path.removeprefix(f"/{repo}/resolve/{COMMIT}/")
            if file in files:
                if repo == "someone/gated":
                    return self.answer(b"", {"X-Error-Code": "GatedRepo"}, 403)
                return self.answer(files[file], {"ETag": f'"{_etag(files[file])}"', "X-Repo-Commit": COMMIT})
        return self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def answer_json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The real command line, with a Hub of its own and an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return subprocess.run(
            [sys.executable, "-m", "warpsmith.cli", *args],
            env=os.environ | settings | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    yield run
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("user/repo", HubName("user/repo")),
        ("hf:user/repo", HubName("user/repo")),
        ("hf.co/user/repo:q4_k_m", HubName("user/repo", quant="q4_k_m")),
        ("https://huggingface.co/user/repo", HubName("user/repo")),
        ("user/repo:UD-Q4_K_XL", HubName("user/repo", quant="UD-Q4_K_XL")),
        ("user/Qwen3.5-27B-GGUF/Qwen3.5-27B-Q4_K_M.gguf", HubName("user/Qwen3.5-27B-GGUF", "Qwen3.5-27B-Q4_K_M.gguf")),
        ("user/repo/BF16/part-00001-of-00002.gguf", HubName("user/repo", "BF16/part-00001-of-00002.gguf")),
        ("models/file.gguf", None),
        ("file.gguf", None),
        ("./user/repo", None),
        ("/user/repo", None),
        ("user/repo/config.json", None),
        ("user/repo:", None),
        ("user/re po", None),
        ("", None),
    ],
)
def test_names(name: str, expected: HubName | None) -> None:
    assert parse(name) == expected


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Qwen3.5-27B-Q4_K_M.gguf", "Q4_K_M"),
        ("Qwen3.5-27B-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("BF16/qwen3.5-27b-bf16-00002-of-00003.gguf", "BF16"),
        ("qwen.iq4_xs.gguf", "IQ4_XS"),
        ("model.gguf", ""),
    ],
)
def test_quantisation_in_a_file_name(file: str, quant: str) -> None:
    assert quant_of(file) == quant


def test_choice_of_a_file() -> None:
    files = list(REPOSITORIES["someone/model-GGUF"])
    assert choose(files) == ["model-Q4_K_M.gguf"]
    assert choose(files, "q8_0") == SPLIT
    assert choose(files, "Q5_K_XL") == ["model-UD-Q5_K_XL.gguf"]  # the only one of that kind is an UD- variant
    assert choose(files, "Q2_K") == []
    assert choose(["a-IQ2_M.gguf", "a-Q3_K_L.gguf"]) == ["a-IQ2_M.gguf"]  # none we prefer: the first
    assert choose(["a-Q8_0.gguf", "a-BF16.gguf", "a-UD-Q4_K_XL.gguf"]) == ["a-UD-Q4_K_XL.gguf"]
    assert choose(["model.gguf"]) == ["model.gguf"]
    assert choose(["README.md", "mmproj-F16.gguf"]) == []


def test_an_existing_path_is_itself(tmp_path: Path) -> None:
    assert resolve(tmp_path) == tmp_path
    with pytest.raises(ModelNotFound, match=r"missing\.gguf"):
        resolve(tmp_path / "missing.gguf")
    for name in ("~no-such-user/model", "x" * 10_000, "a\0b", "", "\udc80"):
        with pytest.raises(ModelNotFound, match="no model at"):
            resolve(name)


def test_fetching_gguf(command: Command) -> None:
    for name, expected in (
        ("someone/model-GGUF", "model-Q4_K_M.gguf"),
        ("hf.co/someone/model-GGUF:ud-q5_k_xl", "model-UD-Q5_K_XL.gguf"),
        ("someone/model-GGUF/" + SPLIT[0], SPLIT[0]),
    ):
        result = command("pull", name)
        assert result.returncode == 0, result.stderr
        path = Path(result.stdout.strip())
        assert path.as_posix().endswith(expected)
        assert path.read_bytes() == REPOSITORIES["someone/model-GGUF"][expected]
    assert (path.parent / Path(SPLIT[1]).name).exists(), "the other part of a split file comes too"
    assert not (path.parents[1] / "mmproj-Q4_K_M.gguf").exists()
    # and what is there needs no network: the error is about the file's content, not about its absence
    offline = command("show", "someone/model-GGUF:Q4_K_M", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="1")
    assert offline.returncode == 1
    assert "is not a GGUF file" in offline.stderr or "too few" in offline.stderr


def test_fetching_safetensors(command: Command) -> None:
    result = command("pull", "someone/model")
    assert result.returncode == 0, result.stderr
    directory = Path(result.stdout.strip())
    fetched = {file.name for file in directory.iterdir()}
    assert fetched == set(REPOSITORIES["someone/model"]) - {"modeling.py"}
    again = command("pull", "someone/model", HF_HUB_OFFLINE="1")
    assert Path(again.stdout.strip()) == directory
    (directory / "model-00001-of-00001.safetensors").unlink()
    assert command("pull", "someone/model", HF_HUB_OFFLINE="1").returncode == 3


@pytest.mark.parametrize(
    ("name", "says", "fix"),
    [
        ("someone/model-GGUF:Q2_K", "has no Q2_K file", "Q4_K_M"),
        ("someone/model-GGUF/other.gguf", "has no file other.gguf", "model-Q4_K_M.gguf"),
        ("someone/nothing", "neither GGUF files nor safetensors", "another"),
        ("someone/unknown", "no repository someone/unknown", "spelling"),
        ("someone/gated", "gated", "HF_TOKEN"),
    ],
)
def test_what_cannot_be_fetched_exits_3(command: Command, name: str, says: str, fix: str) -> None:
    result = command("pull", name)
    assert result.returncode == 3, result.stderr
    problem, advice = result.stderr.splitlines()[-2:]
    assert says in problem
    assert fix in advice
    assert not result.stdout


def test_without_a_network_it_exits_3(command: Command) -> None:
    for arguments, settings in (
        (["pull", "someone/model"], {"HF_ENDPOINT": "http://127.0.0.1:9"}),
        (["pull", "someone/model"], {"HF_HUB_OFFLINE": "1"}),
        (["show", "someone/model", "--offline"], {}),
    ):
        result = command(*arguments, **settings)
        assert result.returncode == 3, result.stderr
        assert "someone/model" in result.stderr
        assert "fix:" in result.stderr
        assert "Traceback" not in result.stderr
