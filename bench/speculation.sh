#!/bin/sh
# Prints the tables of the section "Speculation" of docs/benchmarks.md, each after the command that makes it:
#
#     sh bench/speculation.sh [auto] [trees] [texts]
#
# auto: each draft with the automatic budget on every set of prompts; trees: wisp's draft with fixed budgets; texts: 80
# texts of 256 tokens against plain decoding with every draft. Without a word all of them. PROMPTS names a folder with
# humaneval.jsonl, gsm8k.jsonl and math500.jsonl (a prompt a line); without it the sets come from the Hub. Speeds mean
# something on an idle machine only.
set -eu
cd "$(dirname "$0")/.."
dflash=src/warpsmith/wisp/wisp-dflash.gguf

set_of() {
    if [ -n "${PROMPTS:-}" ]; then echo "$PROMPTS/$1.jsonl"; else echo "$1"; fi
}

spec() {
    echo
    echo "\$ warpsmith bench spec --device cpu $*" | sed "s|${PROMPTS:-^}/||g"
    echo
    ${PYTHON:-python} -m warpsmith.cli bench spec --device cpu "$@"
}

for table in ${*:-auto trees texts}; do
    case $table in
    auto)
        for draft in ngram mtp $dflash auto; do
            spec --prompts "$(set_of humaneval)" --prompts "$(set_of gsm8k)" --prompts "$(set_of math500)" \
                --prompts bench/prompts/quotes.jsonl --prompts bench/prompts/edits.jsonl -n 256 --samples 24 --draft $draft
        done
        ;;
    trees)
        spec --prompts "$(set_of humaneval)" -n 128 --samples 80 --draft $dflash --sweep 8,16,22,32
        ;;
    texts)
        for draft in ngram mtp $dflash auto; do
            spec --prompts "$(set_of humaneval)" -n 256 --samples 80 --draft $draft --sweep 8,22,auto
        done
        ;;
    *)
        echo "There is no table $table: auto, trees or texts." >&2
        exit 2
        ;;
    esac
done
