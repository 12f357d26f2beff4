"""Model names: what they mean, and what is fetched for them from a Hub that runs on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from warpsmith.checkpoint.hub import HubName, choose, is_read, parse, quant_of, resolve
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
    "someone/large": {"model-Q8_0.gguf": bytes(range(256)) * (1 << 17)},
    "someone/unread": {"model-IQ9_X.gguf": b"nobody reads", "model-UD-IQ8_M.gguf": b"this"},
    "someone/partly": {"a-IQ9_X.gguf": b"nobody reads this", "b-Q8_0.gguf": b"eight bits"},
    "someone/gptq": {
        "config.json": b'{"text_config": {"quantization_config": {"quant_method": "gptq"}}}',
        "model.safetensors": b"weights",
    },
    "someone/gated": {"model-Q4_K_M.gguf": b"secret"},
}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as its client asks for: a repository's description, and files with their ETag and commit."""

    stalling = False  # of a large file only the first half is sent, and then nothing
    asked: ClassVar[list[tuple[str, str | None]]] = []  # files sent, and the range asked for

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        for repo, files in REPOSITORIES.items():
            if path in (f"/api/models/{repo}", f"/api/models/{repo}/revision/main"):
                return self.answer_json({"id": repo, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]})
            if path.startswith(f"/api/models/{repo}/tree/"):
                tree = [{"type": "file", "path": f, "size": len(d), "oid": _etag(d)} for f, d in files.items()]
                return self.answer_json(tree)
            file = path.removeprefix(f"/{repo}/resolve/main/")
            if file in files:
                if repo == "someone/gated":
                    return self.answer(b"", {"X-Error-Code": "GatedRepo"}, 403)
                return self.answer(files[file], {"ETag": f'"{_etag(files[file])}"', "X-Repo-Commit": COMMIT})
        return self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    do_HEAD = do_GET

    def answer_json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        length = len(body)
        if self.command == "GET" and "ETag" in headers:
            wanted = self.headers.get("Range")
            self.asked.append((Path(self.path).name, wanted))
            if wanted is not None:
                status, body = 206, body[int(wanted.removeprefix("bytes=").partition("-")[0]) :]
                headers |= {"Content-Range": f"bytes {length - len(body)}-{length - 1}/{length}"}
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            if self.stalling and length > 1 << 20:
                with suppress(ConnectionError):
                    self.wfile.write(body[: length // 2])
                    self.rfile.read()  # until the other side hangs up
            else:
                self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a command that has a Hub of its own and an empty cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Hub.asked.clear()
    yield os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    server.shutdown()
    server.server_close()


@pytest.fixture
def command(settings: dict[str, str], tmp_path: Path) -> Command:
    """The real command line in an empty folder."""
    (tmp_path / "here").mkdir()

    def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "warpsmith.cli", *args],
            env=settings | environment,
            cwd=tmp_path / "here",
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


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
        ("https://huggingface.co/user/repo/blob/main/x-Q4_K_M.gguf", HubName("user/repo", "x-Q4_K_M.gguf")),
        ("https://hf.co/user/repo/resolve/main/BF16/x%20y.gguf?download=true", HubName("user/repo", "BF16/x y.gguf")),
        ("https://huggingface.co/user/repo/tree/main", HubName("user/repo")),
        ("https://huggingface.co/user/repo/tree/main/Q8_0", HubName("user/repo", quant="Q8_0")),
        ("huggingface.co/user/repo/?not-for-all-audiences=true#files", HubName("user/repo")),
        ("user/repo/blob/main/x.gguf", HubName("user/repo", "x.gguf")),
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
    assert choose(["a-IQ9_M.gguf", "a-Q5_K_S.gguf", "a-Q5_1.gguf"]) == ["a-Q5_1.gguf"]  # the first that runs
    assert choose(["a-IQ9_M.gguf", "a-TQ7_0.gguf", "a-NVFP4.gguf"]) == []
    assert choose(["a-Q8_0.gguf", "a-BF16.gguf", "a-UD-Q4_K_XL.gguf"]) == ["a-UD-Q4_K_XL.gguf"]
    assert choose(["model.gguf"]) == ["model.gguf"]
    assert choose(["README.md", "mmproj-F16.gguf"]) == []


def test_which_quantisations_are_read() -> None:
    for quant in ("", "Q4_K_M", "UD-Q4_K_XL", "IQ4_XS", "Q8_0", "BF16", "FP16", "Q6_K_L"):
        assert is_read(quant), quant
    for quant in ("IQ9_X", "UD-IQ9_XXS", "Q9_K_XL", "NVFP4", "Q4", "Q4_X_M"):
        assert not is_read(quant), quant


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
        ("someone/model-GGUF/blob/v2/model-Q4_K_M.gguf", "revision v2", "main"),
        ("someone/unknown/model-Q4_K_M.gguf", "no file someone/unknown/model-Q4_K_M.gguf here", "spelling"),
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


def test_what_does_not_run_is_not_fetched(command: Command) -> None:
    for name, code, says, fix in (
        ("someone/partly:IQ9_X", 2, "has IQ9_X files, which warpsmith does not run", "Choose one of Q8_0."),
        ("someone/unread/model-IQ9_X.gguf", 2, "has IQ9_X files", "Choose another repository."),
        ("someone/unread", 2, "has IQ9_X, UD-IQ8_M files", "Choose another repository."),
        ("someone/gptq", 1, "quantised, by 'gptq'", "original"),
    ):
        result = command("pull", name)
        assert result.returncode == code, result.stderr
        assert says in result.stderr
        assert fix in result.stderr
    assert {file for file, _ in Hub.asked} <= {"config.json"}
    assert command("pull", "someone/partly").stdout.endswith("b-Q8_0.gguf\n")


def test_a_mistyped_path_is_a_file_that_is_missing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "here" / "models" / "qwen").mkdir(parents=True)
    for name in ("models/qwen/9b.gguf", "models/qwne/9b.gguf", "models/9b"):
        result = command("show", name, HF_ENDPOINT="http://127.0.0.1:9")
        assert result.returncode == 3
        assert f"There is no model at {name}." in result.stderr
        assert "hf:" in result.stderr
    # nothing here is called so, but it could be a repository
    for settings in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        result = command("show", "modles/qwen/9b.gguf", **settings)
        assert result.returncode == 3
        assert result.stderr.startswith("error: There is no file modles/qwen/9b.gguf here.")
    # and it is not mistaken for one where it says what it is
    assert "no repository models/qwen" in command("show", "hf:models/qwen").stderr


def test_the_model_that_comes_with_the_package_has_a_name(command: Command) -> None:
    assert command("show", "wisp").stdout == command("show").stdout
    assert command("run", "-m", "wisp", "-p", "x", "-n", "2").stdout == command("run", "-p", "x", "-n", "2").stdout


def test_an_interrupted_download_ends_at_once_and_goes_on_later(
    command: Command, settings: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = REPOSITORIES["someone/large"]["model-Q8_0.gguf"]
    with monkeypatch.context() as patch:
        patch.setattr(Hub, "stalling", True)
        with subprocess.Popen(
            [sys.executable, "-m", "warpsmith.cli", "pull", "someone/large"], env=settings, stderr=subprocess.PIPE
        ) as process:
            while not any(file.stat().st_size for file in tmp_path.rglob("*.warpsmith.part")):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=15)  # retries and joined threads would take longer
        assert process.returncode == 130
        assert b"Traceback" not in err
    result = command("pull", "someone/large")
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).read_bytes() == whole
    (_, first), (_, second) = Hub.asked
    assert first is None
    assert second is not None
    assert int(second.removeprefix("bytes=").rstrip("-")) > 0
    assert not list(tmp_path.rglob("*.warpsmith.part"))
