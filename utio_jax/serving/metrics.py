# SPDX-License-Identifier: Apache-2.0
"""Metrics of an engine for Prometheus. Names begin with `utio_`; times are in seconds."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from utio_jax.decoding.requests import Completion
from utio_jax.serving.worker import Worker

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counters of one server. Requests by address and status are a proxy's to count."""

    def __init__(self, worker: Worker, *, layers: int) -> None:
        """Starts at zero; `layers` are the model's."""
        self._worker, self._registry = worker, CollectorRegistry()

        def histogram(name: str, about: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(name, about, buckets=buckets, registry=self._registry)

        about = "From a request to its first token, the queue included"
        self._first = histogram("utio_time_to_first_token_seconds", about)
        self._between = histogram("utio_time_between_tokens_seconds", "Mean of each request")
        about = "Layers of a request's new tokens, on average"
        self._depth = histogram("utio_mean_depth_layers", about, tuple(range(1, layers + 1)))
        self._registry.register(self)

    def finished(self, result: Completion) -> None:
        """Records a finished choice."""
        if result.seconds_to_first_token is not None:
            self._first.observe(result.seconds_to_first_token)
        if result.seconds_between_tokens is not None:
            self._between.observe(result.seconds_between_tokens)
        if result.token_ids.size:
            self._depth.observe(float(result.decided.mean()))

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the engine's latest statistics, for Prometheus' client."""
        stats, count, gauge = self._worker.stats, CounterMetricFamily, GaugeMetricFamily
        open_tasks = len(self._worker.open_tasks)
        yield gauge("utio_open_tasks", "Choices that were let in, not ended", value=open_tasks)
        yield gauge(
            "utio_queued", "Choices without a slot or with a prompt being read", value=stats.queued
        )
        yield gauge("utio_running", "Choices whose prompts were read", value=stats.running)
        yield gauge("utio_slots", "Choices that can run at once", value=stats.slots)
        yield count("utio_blocks", "Blocks of steps that were run", value=stats.blocks)
        yield count("utio_prompt_tokens", "Of prompts that were read", value=stats.prompt_tokens)
        about = "Prompt tokens that came from the prefix cache"
        yield count("utio_prefix_cache_tokens", about, value=stats.cached_tokens)
        about = "Blocks of K/V in the prefix cache"
        yield gauge("utio_prefix_cache_blocks", about, value=stats.prefix_blocks)
        about = "Blocks that made room for others"
        yield count("utio_prefix_cache_evictions", about, value=stats.prefix_evictions)
        yield count("utio_new_tokens", "Handed out", value=stats.new_tokens)
        ended = CounterMetricFamily("utio_ended", "Choices that ended, by why", labels=["reason"])
        for reason, value in stats.ended.items():
            ended.add_metric([reason], value)
        yield ended
