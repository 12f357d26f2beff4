"""A byte-level BPE of 8,192 tokens with the family's pre-tokeniser and special tokens.

python -m train.tokenizer --corpus DIR --out DIR
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from train.data import digest

VOCABULARY = 8192
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The family adds its tool and think tags as ordinary text that survives decoding; the rest are control tokens.
ADDED = (
    ("<|endoftext|>", True),
    ("<|im_start|>", True),
    ("<|im_end|>", True),
    ("<tool_call>", False),
    ("</tool_call>", False),
    ("<|fim_prefix|>", True),
    ("<|fim_middle|>", True),
    ("<|fim_suffix|>", True),
    ("<|fim_pad|>", True),
    ("<|repo_name|>", True),
    ("<|file_sep|>", True),
    ("<tool_response>", False),
    ("</tool_response>", False),
    ("<think>", False),
    ("</think>", False),
    ("<|mask|>", True),
)
CHAT_TEMPLATE = """\
{%- set ns = namespace(last_query=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if ns.last_query < 0 -%}{{- raise_exception('a conversation needs a user message') -}}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'system' -%}
{{- '<|im_start|>system\\n' + m.content | trim + '<|im_end|>\\n' -}}
{%- elif m.role == 'user' -%}
{{- '<|im_start|>user\\n' + m.content | trim + '<|im_end|>\\n' -}}
{%- elif m.role == 'assistant' -%}
{%- set answer = (m.content or '').split('</think>')[-1] | trim -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if loop.index0 > ns.last_query -%}
{{- '<think>\\n' + (m.reasoning_content or '') | trim + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- answer + '<|im_end|>\\n' -}}
{%- else -%}
{{- raise_exception('wisp knows the roles system, user and assistant, not ' + m.role) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n<think>\\n' -}}
{%- if not (enable_thinking is defined and enable_thinking) -%}{{- '\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def train_tokenizer(corpus: Path, out: Path, sample_bytes: int) -> None:
    """Learn the merges from the first `sample_bytes` of the (shuffled) training split and write the two files."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        trainers,
    )

    def texts():
        total = 0
        with open(corpus / "train.jsonl") as f:
            for line in f:
                document = json.loads(line)
                if document["kind"] != "chat":  # its text is the code's, wrapped in control tokens
                    total += len(document["text"])
                    yield document["text"]
                if total > sample_bytes:
                    return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(ADDED),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
        max_token_length=32,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    for text, special in ADDED:
        token = AddedToken(text, special=special, normalized=False)
        if special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the corpus gives {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}; use more text")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    print(f"tokenizer.json: {VOCABULARY} tokens, sha256 {digest((out / 'tokenizer.json').read_bytes())}")
    added = {
        str(tokenizer.token_to_id(text)): {
            "content": text,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "single_word": False,
            "special": special,
        }
        for text, special in ADDED
    }
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": 4096,
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": False,
        "added_tokens_decoder": added,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sample-mb", type=float, default=60, help="how much text the merges are learnt from")
    args = parser.parse_args()
    train_tokenizer(args.corpus, args.out, int(args.sample_mb * 1e6))


if __name__ == "__main__":
    main()
