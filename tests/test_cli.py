"""The command line as a user types it, every command a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commands import COMMAND, ENVIRONMENT, VERBS, fails, succeeds, warpsmith
from terminal import PROMPT, Terminal
from warpsmith.checkpoint.quantize import RECIPES
from warpsmith.cli import main
from warpsmith.model.tokenizer import byte_tokenizer
from warpsmith.wisp import WISP_DRAFT

# a random model's end tokens made impossible: an answer then goes on until it is stopped
ENDLESS = [flag for token in sorted(byte_tokenizer(272).eos_ids) for flag in ("--logit-bias", f"{token}-1000")]
# slow enough that an answer is still being written when Ctrl-C arrives
SLOW = ["--device", "reference", "--draft", "none"]
SMALL = ["--layers", "2", "--hidden", "256", "--ffn", "256", "--vocab", "272"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    succeeds("synth", "tiny", path, *SMALL, "--type", "q4_k_m", "--seed", "3")
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small"
    succeeds("synth", "tiny", path, *SMALL, "--type", "f32", "--mtp")
    return path


# Help and usage


def test_help_names_the_verbs_and_loads_nothing_heavy() -> None:
    program = (
        "import sys; from warpsmith.cli import main; assert main(['--help']) == 0; "
        "heavy = {'numpy', 'rich', 'tokenizers', 'huggingface_hub', 'jinja2', 'prompt_toolkit', 'starlette'}; "
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(re.search(rf"^ +{verb} ", result.stdout, re.MULTILINE) for verb in VERBS)
    assert succeeds("--version").startswith("warpsmith 0.")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    assert "--debug" in succeeds(verb, "--help")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["fly"],
        ["run", "--no-such-flag"],
        ["run", "-p", "x", "-n", "many"],
        ["run", "-p", "x", "-n", "0"],
        ["run", "-p", "x", "-n", "-5"],
        ["run", "-p", "x", "--spec-budget", "few"],
        ["run", "-p", "x", "--logit-bias", "seven+1"],
        ["serve", "--port", "http"],
        ["serve", "--drain", "nan"],
        ["serve", "--drain", "-1"],
        ["bench", "-p", "1,x"],
        ["run", "-p", "x", "-c", "0"],
        ["run", "-p", "x", "-c", "99999999"],
        ["run", "-p", "x", "-f", "y"],
        ["run", "-p", "x", "--top-p", "7"],
        ["run", "-p", "x", "--device", "abacus"],
        ["run", "-p", "x", "--logit-bias", "7"],
        ["run", "-p", "x", "--draft", "no-such-draft.gguf"],
        ["run", "-p", "x", "-s", ""],
        ["run", "-p", ""],
        ["run", "-p", "x", "--thinking", "off"],
        ["run", "-p", b"\xff\xfe"],
        ["show", "-c", "-5"],
        ["pull"],
        ["synth", "900B", "x.gguf"],
        ["synth", "tiny", "x.gguf", "--type", "q1_z"],
        ["synth", "tiny", "x.gguf", "--heads", "3", "--kv-heads", "2"],
        ["synth", "tiny", "x.gguf", "--vocab", "10"],
        ["synth", "tiny", "directory", "--type", "q4_k_m"],
        ["convert", "x.gguf"],
    ],
)
def test_what_cannot_be_done_as_asked_exits_2(
    args: list[str | bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By the function behind the command, which other tests start: a process for each would mostly import."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = main([os.fsdecode(each) for each in args])
    out, err = capfd.readouterr()
    assert code == 2, err
    assert out == ""
    assert "error:" in err
    assert "Traceback" not in err
    assert not re.search("invalid (_|natural|budget)", err)  # names of our functions
    assert list(tmp_path.iterdir()) == []


# Running


def test_run_streams_text_to_stdout_and_stats_to_stderr() -> None:
    result = warpsmith("run", "-p", "def fibonacci(n):", "-n", "8")
    assert result.returncode == 0, result.stderr
    model, stats = result.stderr.splitlines()
    assert "wisp" in model
    assert "prompt 8 tokens" in stats
    assert "generated 8 tokens" in stats
    assert "cut at the limit" in stats
    assert "\x1b" not in result.stderr
    answer = json.loads(succeeds("run", "-p", "def fibonacci(n):", "-n", "8", "--json"))
    assert answer["text"] == result.stdout
    assert len(answer["token_ids"]) == 8
    assert answer["finish_reason"] == "length"
    assert answer["stats"]["mode"].startswith("ngram"), "and perhaps another, if that is fast enough here"
    plain = json.loads(succeeds("run", "-p", "def fibonacci(n):", "-n", "8", "--json", "--draft", "none"))
    assert plain["stats"]["mode"] == "plain"
    assert plain["token_ids"] == answer["token_ids"]
    assert answer["stats"]["generated_tokens"] == 8


def test_an_answer_that_was_cut_names_the_limit(gguf: Path) -> None:
    args = ["run", "-m", gguf, "-p", "x", *ENDLESS]
    assert "cut at the limit (-n)" in warpsmith(*args, "-n", "3").stderr
    assert "cut at the limit (-c)" in warpsmith(*args, "-n", "-1", "-c", "8").stderr
    wisp = warpsmith("run", stdin=b"x " * 5000).stderr
    assert "leaves no room" in wisp
    assert "the model has no longer context" in wisp
    assert "-c" in fails(2, *args[:3], "-p", "x" * 50, "-c", "8")


def test_a_prompt_from_anywhere_is_the_same_prompt(tmp_path: Path, gguf: Path) -> None:
    (tmp_path / "prompt").write_bytes("naïve 🎉\n".encode())
    args = ["run", "-m", gguf, "-n", "6", "--json"]
    answers = [
        json.loads(succeeds(*args, "-p", "naïve 🎉\n"))["token_ids"],
        json.loads(succeeds(*args, "-f", tmp_path / "prompt"))["token_ids"],
        json.loads(succeeds(*args, stdin="naïve 🎉\n".encode()))["token_ids"],
    ]
    assert answers[0] == answers[1] == answers[2]
    assert "not UTF-8" in fails(2, *args, stdin=b"caf\xe9")


@pytest.fixture
def answer(gguf: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """`warpsmith run --json` with the given flags, in this process because there are many."""

    def run(*flags: str) -> dict[str, Any]:
        assert main(["run", "-m", str(gguf), "--json", *flags]) == 0
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        return answer

    return run


def test_sampling_flags_reach_the_sampler(answer: Callable[..., dict[str, Any]]) -> None:
    def ids(*flags: str) -> list[int]:
        tokens: list[int] = answer("-p", "abc", "-n", "12", *ENDLESS, *flags)["token_ids"]
        return tokens

    greedy, sampled = ids(), ids("--temp", "1", "--top-k", "0", "--top-p", "1", "--seed", "1")
    assert sampled == ids("--temp", "1", "--top-k", "0", "--top-p", "1", "--seed", "1")
    assert sampled != ids("--temp", "1", "--top-k", "0", "--top-p", "1", "--seed", "2")
    assert ids("--temp", "1", "--top-k", "1", "--seed", "5") == greedy
    assert ids("--temp", "1", "--min-p", "1", "--seed", "5") == greedy
    assert ids("--logit-bias", "65+1000") == [65] * 12
    assert len(set(ids("--repeat-penalty", "1e9", "--repeat-last-n", "-1"))) == 12


def test_the_stats_tell_the_seed_that_was_drawn(gguf: Path) -> None:
    args = ["run", "-m", gguf, "-p", "abc", "-n", "12", *ENDLESS, "--temp", "1", "--top-k", "0", "--top-p", "1"]
    first, other = warpsmith(*args), warpsmith(*args)
    seed = re.search(r"\| seed (\d+) \|", first.stderr)
    assert seed
    assert succeeds(*args, "--seed", seed[1]) == first.stdout != other.stdout
    assert "seed" not in warpsmith("run", "-p", "x", "-n", "1").stderr, "greedy text has none"


def test_an_answer_that_shows_nothing_is_explained(gguf: Path) -> None:
    spaces = ["-m", gguf, "-n", "3", "--logit-bias", "32+1000"]
    assert "nothing to see: the 3 tokens" in warpsmith("run", "-p", "x", *spaces).stderr
    assert "nothing to see: the 3 tokens" in warpsmith("chat", *spaces, stdin=b"x\n").stderr
    assert "nothing to see" not in warpsmith("run", "-p", "x", "-n", "3").stderr


@pytest.mark.parametrize("verb", ["synth", "convert"])
def test_help_lists_the_weight_types(verb: str) -> None:
    page = " ".join(succeeds(verb, "--help").split())
    assert all(f"{recipe}" in page for recipe in RECIPES)


def test_bad_flags_are_one_sentence_and_one_fix() -> None:
    for args in ([], ["fly"], ["run", "--no-such-flag"], ["run", "-n", "many"], ["bench", "spec"], ["pull"]):
        lines = fails(2, *args).splitlines()
        assert len(lines) == 2, lines
        assert lines[0].startswith("error: ")
        assert lines[0].endswith(".")
        assert lines[1].startswith("  fix: `warpsmith ")


def test_stop_strings(answer: Callable[..., dict[str, Any]]) -> None:
    stopped = answer("-p", "x", "-s", "AAA", "--logit-bias", "65+1000")
    assert (stopped["text"], stopped["finish_reason"], len(stopped["token_ids"])) == ("", "stop", 3)


def test_chat_templates(answer: Callable[..., dict[str, Any]]) -> None:
    def prompt_tokens(*flags: str) -> int:
        return int(answer("-p", "x", "-n", "1", *flags)["stats"]["prompt_tokens"])

    plain, chat, system = prompt_tokens(), prompt_tokens("--chat"), prompt_tokens("--system", "be brief")
    assert plain == 1 < chat < system
    assert prompt_tokens("--chat", "--thinking", "on") < prompt_tokens("--chat", "--thinking", "off")


def test_an_interrupted_run_exits_130(gguf: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "run", "-m", str(gguf), "-p", "x", "-n", "-1", *ENDLESS, *SLOW],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_a_reader_may_close_the_pipe() -> None:
    with subprocess.Popen(
        [*COMMAND, "run", "-p", "x", "-n", "-1", *ENDLESS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read()
        assert process.wait(timeout=60) == 0
    assert b"Traceback" not in err
    assert b"Exception" not in err


# Chatting


def test_a_piped_chat_answers_every_line(gguf: Path) -> None:
    long = b"what is one and one? " * 5
    result = warpsmith(
        "chat", "-m", gguf, "-n", "3", *ENDLESS, stdin=b"%b\n\ntwo\n/clear\n%b\n/exit\nthree\n" % (long, long)
    )
    assert result.returncode == 0, result.stderr
    turns = [line for line in result.stderr.splitlines() if "generated" in line]
    prompts = [int(re.search(r"prompt (\d+) tokens", turn)[1]) for turn in turns]  # type: ignore[index]
    assert len(turns) == 3
    assert prompts[1] > prompts[0] == prompts[2]
    assert "cached" in turns[1]  # the second turn does not compute the first again


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(gguf: Path) -> None:
    terminal = Terminal("chat", "-m", str(gguf), *SLOW, "--logit-bias", "65+1000", NO_COLOR="1")  # AAAA...
    terminal.until(PROMPT)
    terminal.type("hello\r")
    at = terminal.until("A")
    # Pressed again until it is noticed: between printing a prompt and waiting for keys, Python misses a Ctrl-C.
    at = terminal.until(PROMPT, terminal.until("stopped", at, press="\x03"))
    at = terminal.until(PROMPT, terminal.until("/exit", at, press="\x03"))  # at the prompt it says how to leave
    terminal.type("\x04")
    assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen
    assert "\x1b[2m" not in terminal.seen  # NO_COLOR


def test_a_terminal_gets_colour_but_no_control_characters_of_the_model(gguf: Path) -> None:
    escape = ["-m", str(gguf), "--logit-bias", "27+1000"]  # a model that says nothing but ESC
    terminal = Terminal("run", "-p", "x", "-n", "5", *escape, NO_COLOR="")
    assert terminal.exit_code() == 0
    assert "\ufffd" * 5 in terminal.seen
    assert "\x1b\x1b" not in terminal.seen
    assert "\x1b[2m" in terminal.seen
    assert succeeds("run", "-p", "x", "-n", "5", *escape) == "\x1b" * 5  # a pipe gets what the model said


# Files


def test_show(gguf: Path, directory: Path) -> None:
    facts = json.loads(succeeds("show", gguf, "-c", "1000", "--json"))
    assert facts["config"]["layers"] == 2
    assert facts["config"]["vocab"] == 272
    assert set(facts["types"]) == {"F32", "Q4_K", "Q6_K"}
    assert sum(row["parameters"] for row in facts["types"].values()) == facts["parameters"]
    assert facts["bytes"] < gguf.stat().st_size < facts["bytes"] + 100_000
    memory = facts["memory"]
    assert memory["weights"] == facts["bytes"]
    assert memory["keys_and_values"] == 0  # both layers are DeltaNet
    assert memory["deltanet_states"] == 2 * (4 * 128 * 128 + 3 * 1024) * 4
    with_attention = json.loads(succeeds("show", directory, "-c", "1000", "--json"))["memory"]
    assert with_attention["keys_and_values"] == 2 * 1000 * 256 * 2  # the MTP layer's
    page = succeeds("show", gguf)
    assert "Q4_K" in page
    assert "qwen35.block_count = 2" in page
    assert len(page.splitlines()) < 70


def test_show_plans_for_a_gpu_that_is_not_here(gguf: Path) -> None:
    plan = json.loads(succeeds("show", gguf, "-c", "1000", "--chip", "rtx-3090", "--json"))["memory"]
    assert plan["total"] == sum(plan["parts"].values())
    assert plan["fits"]
    assert "fits in 22.35 GiB" in succeeds("show", gguf, "--chip", "rtx-3090")
    assert "rtx-4090" in fails(2, "show", gguf, "--chip", "rtx-1")
    assert "Use f16" in fails(2, "show", gguf, "--chip", "h200", "-ctk", "f32")


def test_show_plans_for_a_draft_beside_the_model(gguf: Path) -> None:
    alone = json.loads(succeeds("show", "--chip", "h200", "--json"))["memory"]
    plan = json.loads(succeeds("show", "--chip", "h200", "--draft", WISP_DRAFT, "--json"))["memory"]
    added = {part: nbytes for part, nbytes in plan["parts"].items() if part not in alone["parts"]}
    assert set(added) == {"draft", "draft's memory"}
    assert plan["total"] == alone["total"] + sum(added.values())
    assert "--device cuda" in fails(2, "show", "--draft", WISP_DRAFT)
    assert "hidden size" in fails(2, "show", gguf, "--chip", "h200", "--draft", WISP_DRAFT)


def test_a_memory_limit_is_a_number_of_bytes_for_a_gpu(gguf: Path) -> None:
    assert "such as 24G" in fails(2, "run", "-m", gguf, "-p", "x", "--memory-limit", "24Q")
    assert "the cuda device" in fails(2, "run", "-m", gguf, "-p", "x", "--device", "cpu", "--memory-limit", "1.5G")


def test_convert_keeps_what_a_model_says(tmp_path: Path, directory: Path) -> None:
    def ids(model: Path) -> list[int]:
        return json.loads(succeeds("run", "-m", model, "-p", "hello", "-n", "8", "--json", "--chat"))["token_ids"]

    file, back = tmp_path / "model.gguf", tmp_path / "back"
    succeeds("convert", directory, file)
    succeeds("convert", file, back, "--type", "f32")
    assert ids(directory) == ids(file) == ids(back)
    succeeds("convert", file, tmp_path / "small.gguf", "--type", "q8_0")
    assert set(json.loads(succeeds("show", tmp_path / "small.gguf", "--json"))["types"]) == {"F32", "Q8_0"}
    assert "exists already" in fails(2, "convert", directory, file)
    assert "again" in fails(2, "convert", tmp_path / "small.gguf", tmp_path / "smaller.gguf", "--type", "q4_0")
    assert not (tmp_path / "smaller.gguf").exists()


def test_missing_models_exit_3(tmp_path: Path) -> None:
    for args in (["run", "-p", "x", "-m"], ["bench", "-m"], ["show"]):
        message = fails(3, *args, tmp_path / "missing.gguf")
        assert "missing.gguf" in message
        assert "fix:" in message
    assert "offline" in fails(3, "run", "-p", "x", "-m", "someone/model", "--offline")


@pytest.mark.parametrize("damage", ["truncated", "scrambled", "empty", "text", "directory"])
def test_damaged_models_exit_1(tmp_path: Path, gguf: Path, damage: str) -> None:
    path, data = tmp_path / "model.gguf", gguf.read_bytes()
    if damage == "directory":
        path.mkdir()
        (path / "config.json").write_text("{")
    else:
        scrambled = data[:24] + b"\xff" * 64 + data[88:]
        path.write_bytes(
            {"truncated": data[:-5000], "scrambled": scrambled, "empty": b"", "text": b"hello" * 99}[damage]
        )
    for args in (["run", "-p", "x", "-m"], ["show"]):
        message = fails(1, *args, path)
        assert message.startswith("error: ")
        assert str(path) in message
        assert len(message.splitlines()) <= 2


def test_a_traceback_only_when_asked_for(tmp_path: Path) -> None:
    result = warpsmith("show", tmp_path / "missing.gguf", "--debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


def test_files_that_cannot_be_written_exit_1(gguf: Path, tmp_path: Path) -> None:
    assert "fix:" in fails(1, "convert", gguf, tmp_path / "no" / "such" / "folder.gguf")


# The machine


def test_doctor_knows_what_auto_would_use() -> None:
    facts = json.loads(succeeds("doctor", "--json"))
    assert facts["devices"]["reference"] is None
    assert facts["devices"][facts["device"]] is None
    page = succeeds("doctor")
    assert f"uses {facts['device']}" in page
    answer = json.loads(succeeds("run", "-p", "x", "-n", "1", "--json"))
    assert answer["stats"]["device"] == facts["device"]
    for device, problem in facts["devices"].items():
        if problem:
            said = fails(4, "run", "-p", "x", "-n", "1", "--device", device)
            assert problem in said.replace("\n  fix:", ""), "with the fix"
