"""The public interface, on the tiny random model and on small ones made for the occasion."""

from __future__ import annotations

import dataclasses
import doctest
import subprocess
import sys
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
import pytest

import warpsmith
import warpsmith.engine.text
import warpsmith.llm
from warpsmith.backend.base import Want
from warpsmith.backend.devices import backend_for
from warpsmith.backend.tree import Tree
from warpsmith.checkpoint.canonical import Checkpoint
from warpsmith.draft.base import Context, Proposer
from warpsmith.errors import BadRequest, ModelNotFound
from warpsmith.llm import LLM, Completion, load
from warpsmith.model.chat import render
from warpsmith.model.config import SIZES
from warpsmith.model.synthetic import random_checkpoint, synthesize, tiny_model
from warpsmith.model.weights import read_config

TINY = tiny_model()


def make(checkpoint: Checkpoint = TINY, context: int = 512, draft: Proposer | None = None) -> LLM:
    return LLM(backend_for("reference", checkpoint, read_config(checkpoint)), checkpoint, context, draft)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


class Knows(Proposer):
    """Drafts what it was told would come, four tokens at a time."""

    name = "knows"

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)

    def propose(self, memory: Any, context: Context) -> Tree:
        coming = self.tokens[len(context.ids) :][:4]
        return Tree.chain([context.root, *coming])


@pytest.mark.parametrize("module", [warpsmith.llm, warpsmith.engine.text])
def test_the_examples_in_the_documentation_run(module: Any) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_text_is_what_the_tokens_say(llm: LLM) -> None:
    completion = llm.generate("Grüße, 世界", max_tokens=60, stop_ids=[], temperature=1.0, seed=3)
    assert isinstance(completion, Completion)
    assert completion.text == llm.tokenizer.decode(completion.token_ids, skip_special=True)
    assert (len(completion.token_ids), completion.finish_reason) == (60, "length")
    assert completion.stats.prompt_tokens == len("Grüße, 世界".encode())


def test_a_stream_adds_up_to_the_completion_and_ends_with_the_reason(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "stop_ids": [], "temperature": 0.9, "seed": 8}
    whole = llm.generate("abc", **options)
    chunks = list(llm.stream("abc", **options))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * 19 + ["length"]
    assert chunks[0].stats is None
    assert chunks[-1].stats is not None
    assert chunks[-1].stats.generated_tokens == 20


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_strings_cut_the_text_and_hold_no_more_state_than_needed(drafted: bool, temperature: float) -> None:
    prompt = list(b"tell me")
    options: dict[str, Any] = {"max_tokens": 50, "stop_ids": [], "temperature": temperature, "seed": 4}
    free = make().generate(prompt, **options)
    llm = make(draft=Knows(prompt + free.token_ids) if drafted else None)
    for start in (0, 9, 21):
        stop = free.text[start : start + 3]
        found = free.text.find(stop)
        shown = ""
        for chunk in llm.stream(prompt, stop=[stop, "never this"], **options):
            shown += chunk.text
            assert free.text[:found].startswith(shown), "nothing of the stop string is ever shown"
        assert shown == free.text[:found]
        assert chunk.finish_reason == "stop"
        assert chunk.stats is not None
        assert chunk.stats.mode == ("knows" if drafted else "plain")
        count = chunk.stats.generated_tokens
        (state,) = llm.scheduler._states
        assert state.length == len(prompt) + count - 1
    assert llm.generate(prompt, stop="never this", **options).text == free.text, (
        "what was held back is given at the end"
    )


def test_a_draft_changes_the_stats_and_nothing_else() -> None:
    prompt = list(b"the quick brown fox")
    for options in ({"temperature": 0.0}, {"temperature": 1.3, "top_k": 0, "top_p": 1.0, "seed": 12}):
        free = make().generate(prompt, max_tokens=30, **options)  # type: ignore[arg-type]
        drafted = make(draft=Knows(prompt + free.token_ids)).generate(prompt, max_tokens=30, **options)  # type: ignore[arg-type]
        assert (drafted.text, drafted.token_ids, drafted.finish_reason) == (
            free.text,
            free.token_ids,
            free.finish_reason,
        )
        assert (free.stats.mode, free.stats.speculation_off) == ("plain", "no draft")
        assert drafted.stats.mode == "knows"
        assert drafted.stats.acceptance_length > 2


def test_end_tokens_end_the_text_and_do_not_show(llm: LLM) -> None:
    end = llm.tokenizer.eos_id
    assert end is not None
    completion = llm.generate("abc", max_tokens=9, logit_bias={end: 1000.0})
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [end], "stop")
    completion = llm.generate("abc", max_tokens=9, logit_bias={65: 1000.0}, stop_ids=[65])
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("", [65], "stop")
    assert llm.generate("abc", max_tokens=9, logit_bias={end: 1000.0}, stop_ids=[]).finish_reason == "length"


def test_what_is_held_back_comes_out_at_the_end(llm: LLM) -> None:
    always_a = {"max_tokens": 5, "logit_bias": {ord("a"): 1000.0}}
    assert llm.generate("x", stop="aaab", **always_a).text == "aaaaa"  # type: ignore[arg-type]
    assert llm.generate("x", stop="aaa", **always_a).text == ""  # type: ignore[arg-type]
    half_a_character = llm.generate("x", max_tokens=1, logit_bias={0xE4: 1000.0})
    assert half_a_character.text == "\ufffd"


def test_special_tokens_do_not_show(llm: LLM) -> None:
    start = llm.tokenizer.token_id("<|im_start|>")
    assert start is not None
    completion = llm.generate("x", max_tokens=2, logit_bias={start: 1000.0})
    assert (completion.text, completion.token_ids) == ("", [start, start])


def test_messages_go_through_the_chat_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    assert TINY.chat_template is not None
    for options in ({}, {"enable_thinking": True}, {"enable_thinking": False}, {"tools": tools}):
        stats = llm.generate(messages, max_tokens=1, **options).stats  # type: ignore[arg-type]
        text = render(TINY.chat_template, messages, **options)  # type: ignore[arg-type]
        assert stats.prompt_tokens == len(llm.tokenizer.encode(text))
        assert llm._ids(messages, options.get("enable_thinking"), options.get("tools"))[0] == llm.tokenizer.encode(text)  # type: ignore[arg-type]


def test_a_model_without_a_template_chats_with_the_familys() -> None:
    llm = make(dataclasses.replace(TINY, chat_template=None))
    text = llm.tokenizer.decode(llm._ids([{"role": "user", "content": "Hi"}], None, None)[0])
    assert text.startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert text.endswith("</think>\n\n"), "a small model does not think unless asked"


def test_a_conversation_computes_only_what_is_new(llm: LLM) -> None:
    messages = [{"role": "system", "content": "You are brief. " * 10}, {"role": "user", "content": "Hello there!"}]
    first = llm.generate(messages, max_tokens=8, stop_ids=[])
    assert llm.generate(messages, max_tokens=8, stop_ids=[]).text == first.text
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Go on."}]
    second = llm.generate(messages, max_tokens=8, stop_ids=[])
    assert second.stats.cached_tokens >= 128
    assert second.stats.prompt_tokens > first.stats.prompt_tokens
    assert second.text == make().generate(messages, max_tokens=8, stop_ids=[]).text


def test_a_stream_may_be_left_in_the_middle(llm: LLM) -> None:
    expected = llm.generate("left", max_tokens=10, stop_ids=[]).token_ids
    stream = llm.stream("left", max_tokens=10, stop_ids=[])
    taken = next(stream).token_ids + next(stream).token_ids
    stream.close()  # type: ignore[attr-defined]
    assert llm.generate("left", max_tokens=10, stop_ids=[]).token_ids == expected
    assert taken == expected[:2]


def test_sampling_without_a_seed_can_be_repeated_with_the_one_it_drew(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "top_k": 0, "top_p": 1.0}
    first, second = (llm.generate("x", **options) for _ in range(2))
    assert first.stats.seed != second.stats.seed
    assert first.token_ids != second.token_ids
    assert llm.generate("x", seed=first.stats.seed, **options).token_ids == first.token_ids
    assert llm.generate("x", max_tokens=2, temperature=0).stats.seed is None


def test_the_models_own_sampling_is_the_default() -> None:
    declared = make(dataclasses.replace(TINY, metadata={**TINY.metadata, "general.sampling.temp": 1.0}))
    assert declared.generate("x", max_tokens=2).stats.seed is not None
    assert declared.generate("x", max_tokens=2, temperature=0).stats.seed is None
    assert make().generate("x", max_tokens=2).stats.seed is None, "greedy when the file says nothing"


def test_score_gives_the_logits_after_every_token(llm: LLM) -> None:
    ids = np.random.default_rng(0).integers(0, llm.config.vocab, 300)
    scores = llm.score(ids)
    backend = llm.backend
    expected = backend.prefill(backend.new_state(300), ids, Want("logits", every_row=True)).logits.numpy()
    assert scores.dtype == np.float32
    assert scores.shape == (300, llm.config.vocab)
    assert np.array_equal(scores, expected)
    assert llm.generate(ids[:100], max_tokens=1, stop_ids=[]).token_ids == [llm.score(ids[:100])[-1].argmax()]
    for bad in ([], [llm.config.vocab], [-1], "text"):
        with pytest.raises(BadRequest):
            llm.score(bad)  # type: ignore[arg-type]


def test_a_model_without_a_tokenizer_scores_and_takes_ids() -> None:
    bare = {key: value for key, value in TINY.metadata.items() if not key.startswith("tokenizer.")}
    llm = make(dataclasses.replace(TINY, metadata=bare))
    assert llm.score([1, 2, 3]).shape == (3, llm.config.vocab)
    completion = llm.generate([1, 2, 3], max_tokens=4)
    assert (completion.text, len(completion.token_ids)) == ("", 4)
    for prompt, options in (("text", {}), ([{"role": "user", "content": "Hi"}], {}), ([1], {"stop": "x"})):
        with pytest.raises(BadRequest, match="tokenizer"):
            llm.generate(prompt, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "empty"),
        ([], {}, "empty"),
        ("x" * 600, {}, "no room"),
        ({"role": "user"}, {}, "dict"),
        (b"bytes", {}, "bytes"),
        (5, {}, "int"),
        (["a", "b"], {}, "role"),
        ("x", {"enable_thinking": True}, "chats"),
        ([1, 2], {"tools": []}, "chats"),
        ("x", {"stop": ["a", ""]}, "stop string"),
        ("x", {"max_tokens": 0}, "max_tokens"),
        ("x", {"top_p": 3.0}, "top_p"),
        ("x", {"temperature": "warm"}, "temperature"),
        ("x", {"seed": -1}, "seed"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(llm: LLM, prompt: Any, options: dict, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        llm.stream(prompt, **options)


def test_unknown_keywords_are_errors(llm: LLM) -> None:
    with pytest.raises(TypeError, match="temprature"):
        llm.generate("x", temprature=0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="contxt"):
        load(contxt=5)  # type: ignore[call-arg]


def test_a_closed_model_says_so() -> None:
    with make() as llm:
        llm.generate("x", max_tokens=1)
    for use in (lambda: llm.generate("x"), lambda: llm.score([1]), lambda: llm.backend):
        with pytest.raises(BadRequest, match="closed"):
            use()


# -- loading ----------------------------------------------------------------------------------------------------------


def test_a_file_loads_as_the_model_it_holds(tmp_path: Any) -> None:
    synthesize(SIZES["tiny"], tmp_path / "tiny.gguf", recipe="f32", seed=5)
    llm = warpsmith.load(tmp_path / "tiny.gguf", device="reference", context=64)
    ids = [1, 2, 3, 300]
    assert np.array_equal(llm.score(ids), make(random_checkpoint(SIZES["tiny"], seed=5)).score(ids))
    assert llm.generate("hello", max_tokens=3, stop_ids=[]).stats.prompt_tokens == 5
    synthesize(SIZES["tiny"], tmp_path / "dir", recipe="f32", seed=5, format="safetensors")
    # a directory stores norms less one and the logarithms of decays: they come back a rounding apart
    np.testing.assert_allclose(load(tmp_path / "dir", device="reference").score(ids), llm.score(ids), atol=1e-4)


def test_a_model_that_is_not_there(tmp_path: Any) -> None:
    with pytest.raises(ModelNotFound, match="nothing"):
        load(tmp_path / "nothing.gguf")
    with pytest.raises(ModelNotFound):
        load("nobody/nothing", offline=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"context": 1}, "context"), ({"context": 1 << 40}, "context"), ({"draft": "no-such-draft"}, "draft")],
)
def test_load_refuses_what_it_cannot_do(options: dict, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        load(device="reference", **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stop": [1]}, "stop must be a string"),
        ({"stop": 7}, "stop must be a string"),
        ({"stop": b"x"}, "stop must be a string"),
        ({"stop_ids": "x"}, "stop_ids must be a list"),
        ({"stop_ids": 3}, "stop_ids must be a list"),
        ({"stop_ids": [1.5]}, "a stop id must be a whole number"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"max_tokens": "3"}, "max_tokens must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number"),
        ({"logit_bias": [1]}, "logit_bias must map"),
        ({"logit_bias": {1: 1e300}}, "logit_bias of token 1"),
        ({"logit_bias": dict.fromkeys(range(TINY.tensors["token_embd.weight"].shape[0]), -inf)}, "bans every token"),
        ({"temperature": "hot"}, "temperature must be a finite number"),
    ],
)
def test_wrong_kinds_of_options_are_refused_by_name(llm: LLM, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadRequest, match=says) as raised:
        llm.generate("x", **({"max_tokens": 1} | options))
    assert raised.value.fix


def test_no_stop_string_is_none(llm: LLM) -> None:
    options: dict[str, Any] = {"max_tokens": 4, "stop_ids": []}
    assert llm.generate("x", stop=None, **options).text == llm.generate("x", **options).text


def test_a_context_is_a_whole_number() -> None:
    with pytest.raises(BadRequest, match="context must be a whole number"):
        load(context=100.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_scoring_stays_inside_the_context_and_the_memory(device: str) -> None:
    with load(device=device, context=16) as small:
        assert small.score([1] * 16).shape[0] == 16
        with pytest.raises(BadRequest, match="17 tokens do not fit in the context of 16"):
            small.score([1] * 17)


def test_scoring_more_than_the_memory_holds_is_refused() -> None:
    program = (
        "import resource, warpsmith; llm = warpsmith.load(context=4096); "
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), -1)); "
        "llm.score([1] * 4096)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "DoesNotFit: The logits of 4096 tokens would take 134 MB of memory" in result.stderr


TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}


def test_tools_that_a_template_ignores_are_refused() -> None:
    deaf = dataclasses.replace(TINY, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": "hello"}]
    with pytest.raises(BadRequest, match="template ignores tools"):
        make(deaf).generate(messages, tools=[TOOL], max_tokens=1)
    make(deaf).generate(messages, tools=[], max_tokens=1)
    make(TINY).generate(messages, tools=[TOOL], max_tokens=1)
    for wrong in ("f", [1], {"f": 1}):
        with pytest.raises(BadRequest, match="tools is not a list of objects"):
            make(TINY).generate(messages, tools=wrong, max_tokens=1)  # type: ignore[arg-type]
