# SPDX-License-Identifier: Apache-2.0
"""What a server has done, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from utio_jax.engine.requests import Finished
from utio_jax.serving.backend import Backend

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server. Names begin with `utio_`; times are in seconds."""

    def __init__(self, worker: Backend, *, layers: int) -> None:
        """Counts from nothing; `layers` are the model's."""
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "utio_http_requests",
            "Requests that were answered, by address and status",
            ["path", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "utio_http_request_seconds",
            "From a request to the end of its answer",
            ["path"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first = Histogram(
            "utio_time_to_first_token_seconds",
            "From a request to its first token, the queue included",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._between = Histogram(
            "utio_time_between_tokens_seconds",
            "Mean of each request",
            buckets=_SECONDS,
            registry=self.registry,
        )
        depths = tuple(range(1, layers + 1))
        self._depth = Histogram(
            "utio_mean_depth_layers",
            "Layers behind a request's new tokens, on average",
            buckets=depths,
            registry=self.registry,
        )
        self.registry.register(_Engine(worker))

    def request(self, path: str, status: int, seconds: float) -> None:
        """Notes an answer."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def finished(self, found: Finished) -> None:
        """Notes a choice that ended."""
        if found.seconds_to_first_token is not None:
            self._first.observe(found.seconds_to_first_token)
        if found.seconds_between_tokens is not None:
            self._between.observe(found.seconds_between_tokens)
        if found.token_ids.size:
            self._depth.observe(float(found.decided.mean()))

    def text(self) -> bytes:
        """Returns it all in Prometheus' format."""
        return generate_latest(self.registry)


class _Engine:
    """What the engine's own thread has last told."""

    def __init__(self, worker: Backend) -> None:
        self._worker = worker

    def describe(self) -> list:
        return []

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        worker, stats = self._worker, self._worker.stats
        gauges = {
            "utio_open_tasks": ("Choices that were let in and have not ended", worker.open_tasks),
            "utio_queued": ("Choices that wait for a slot", stats.queued),
            "utio_running": ("Choices that have one", stats.running),
            "utio_slots": ("Choices that can run at once", stats.slots),
            "utio_waiting_prompt_tokens": ("Of what waits", worker.waiting_tokens),
            "utio_tokens_per_second": ("Prompt and new tokens, lately", worker.tokens_per_second),
        }
        for name, (about, value) in gauges.items():
            yield GaugeMetricFamily(name, about, value=value)
        counters = {
            "utio_blocks": ("Blocks of steps that were run", stats.blocks),
            "utio_prompt_tokens": ("Of prompts that were read", stats.prompt_tokens),
            "utio_new_tokens": ("Handed out", worker.new_tokens),
        }
        for name, (about, value) in counters.items():
            yield CounterMetricFamily(name, about, value=value)
        ended = CounterMetricFamily("utio_ended", "Choices that ended, by why", labels=["reason"])
        for reason, value in worker.ended.items():
            ended.add_metric([reason], value)
        yield ended
