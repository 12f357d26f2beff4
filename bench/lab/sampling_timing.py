"""What drawing a token on the device adds to a greedy one, and what the best k of a tree take. On a random 0.8B.

PYTHONPATH=src python bench/lab/sampling_timing.py

A random model's distributions are flatter than a trained one's, so more is left to the host here than would be.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from forward_timing import bushy_tree, fake_length, median_ms, random_bf16

from warpsmith.backend.base import ARGMAX, Want
from warpsmith.backend.cuda.memory.driver import Event
from warpsmith.backend.cuda.weights_first import WeightsFirstBackend
from warpsmith.backend.sampling import Sampling
from warpsmith.model.config import SIZES

TOKENS, DEPTH = 128, 520
SETTINGS: dict[str, Sampling | None] = {
    "greedy": None,
    "penalties": Sampling(repeat_penalty=1.1, presence_penalty=0.5),
    "top-k 20, top-p 0.95": Sampling(temperature=0.8, top_k=20, top_p=0.95),
    "llama.cpp's defaults": Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05),
    "with penalties": Sampling(temperature=0.8, top_k=20, top_p=0.95, repeat_penalty=1.1, presence_penalty=0.5),
    "penalties on all text": Sampling(temperature=0.8, top_k=20, repeat_penalty=1.1, repeat_last_n=-1),
    "min-p 0.5": Sampling(temperature=0.8, min_p=0.5),
    "top-p 0.001": Sampling(temperature=0.8, top_p=0.001),
    "temperature alone, sharp": Sampling(temperature=0.15),
}


def main() -> None:
    config = replace(SIZES["0.8B"], context=2048)
    backend = WeightsFirstBackend(config, random_bf16(config), context=2048)
    print(backend.chip.name)
    history = [i * 7919 % config.vocab for i in range(DEPTH + 1)]
    state = fake_length(backend, DEPTH)
    greedy = 0.0
    for name, sampling in SETTINGS.items():

        def decode(sampling: Sampling | None = sampling) -> None:
            state.length = DEPTH
            for _ in backend.decode(state, history[-1], TOKENS, frozenset(), sampling, history):
                pass

        backend.undecided = 0
        us = median_ms(decode) / TOKENS * 1e3
        greedy = greedy or us
        host = f"{backend.undecided} of {8 * TOKENS} left to the host" if sampling else ""
        print(f"  {name:26} {us:7.1f} us a token, {greedy / us:6.1%} of greedy's speed; {host}", flush=True)

    for nodes in (1, 22, 64):
        backend.forward([(state, bushy_tree(nodes))], Want("top", 22))
        times, begin, end = [], Event(backend.device), Event(backend.device)
        for _ in range(9):
            begin.record()
            backend.outputs.top.of(nodes, 22)
            end.record()
            end.wait()
            times.append(end.seconds_since(begin) * 1e6)
        wants = (ARGMAX, Want("top", 22))
        ms = [median_ms(partial(backend.forward, [(state, bushy_tree(nodes))], want)) for want in wants]
        print(f"  top 22 of {nodes:2} nodes: {statistics.median(times):.1f} us with its copy; ", end="")
        print(f"forward for argmax {ms[0] * 1e3:.0f} us, for top {ms[1] * 1e3:.0f} us", flush=True)


if __name__ == "__main__":
    main()
