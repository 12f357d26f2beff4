"""Counters for Prometheus, in the names that llama.cpp and vLLM use, with a prefix of our own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from warpsmith.engine.stats import Stats
from warpsmith.llm import LLM
from warpsmith.measure.energy import Meter, meters_of
from warpsmith.serve.engine import Worker
from warpsmith.serve.job import Job

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class _Joules(Collector):
    """What the machine's meters say at the moment of asking."""

    def __init__(self) -> None:
        self.meters: list[Meter] = []

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily("warpsmith_energy_joules", "Energy used, by meter", labels=["meter"])
        for meter in self.meters:
            with suppress(OSError):
                family.add_metric([meter.name], meter.joules())
        if family.samples:
            yield family


class Metrics:
    """One server's numbers. The worker's thread counts, and a request for /metrics reads."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"warpsmith_{name}", help, labels, registry=self.registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"warpsmith_{name}", help, registry=self.registry, buckets=buckets)

        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens computed")
        self.prompt_seconds = counter("prompt_seconds_total", "Seconds spent on prompts")
        self.predicted_tokens = counter("tokens_predicted_total", "Tokens generated")
        self.predicted_seconds = counter("tokens_predicted_seconds_total", "Seconds spent generating")
        self.cached_tokens = counter("prefix_cache_hits_total", "Prompt tokens taken from an earlier request")
        self.asked_tokens = counter("prefix_cache_queries_total", "Prompt tokens asked for")
        self.drafts = counter("spec_decode_num_drafts_total", "Steps with a draft")
        self.drafted = counter("spec_decode_num_draft_tokens_total", "Tokens drafted")
        self.accepted = counter("spec_decode_num_accepted_tokens_total", "Drafted tokens that became text")
        self.by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos_total", "Drafted tokens that became text", ("position",)
        )
        self.requests = counter("requests_total", "Requests that ended", ("outcome",))
        self.first_token = histogram("time_to_first_token_seconds", "From the request to its first token")
        self.token = histogram(
            "inter_token_latency_seconds", "Mean time of a token after the first", (0.0005, 0.001, 0.002, *_SECONDS)
        )
        self.whole = histogram("e2e_request_latency_seconds", "From the request to its end")
        self.energy = _Joules()
        self.registry.register(self.energy)

    def watch(self, worker: Worker) -> None:
        """Show how full the queue is, and count joules from the moment that the model is there."""

        def meter(loaded: Future[LLM]) -> None:
            if loaded.exception() is None:
                self.energy.meters = meters_of(loaded.result().device)

        worker.loaded.add_done_callback(meter)
        for name, help, read in (
            ("requests_processing", "Requests at work", lambda: worker.processing),
            ("requests_deferred", "Requests that wait", lambda: worker.waiting),
        ):
            Gauge(f"warpsmith_{name}", help, registry=self.registry).set_function(read)

    def finished(self, job: Job, stats: Stats | None) -> None:
        """The worker's thread tells of a request that ended; without stats it was broken off."""
        now = perf_counter()
        list(self.energy.collect())  # meters come round: they are not left alone for long
        self.requests.labels("finished" if stats else "broken off").inc()
        if job.first_token is not None:
            self.first_token.observe(job.first_token - job.submitted)
        if stats is None:
            return
        self.whole.observe(now - job.submitted)
        self.asked_tokens.inc(stats.prompt_tokens)
        self.cached_tokens.inc(stats.cached_tokens)
        self.prompt_tokens.inc(stats.prompt_tokens - stats.cached_tokens)
        self.prompt_seconds.inc(stats.prefill_seconds)
        self.predicted_tokens.inc(stats.generated_tokens)
        self.predicted_seconds.inc(stats.decode_seconds)
        self.drafts.inc(stats.drafted_steps)
        self.drafted.inc(stats.drafted_tokens)
        self.accepted.inc(stats.accepted_tokens)
        for position in range(1, len(stats.histogram)):
            self.by_position.labels(position - 1).inc(sum(stats.histogram[position:]))
        if stats.generated_tokens > 1:
            self.token.observe(stats.decode_seconds / (stats.generated_tokens - 1))

    def text(self) -> bytes:
        return generate_latest(self.registry)
