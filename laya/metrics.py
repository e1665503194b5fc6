"""Owns: what Laya counts, as plain numbers, and their Prometheus form under names that are promised to users.

The hot path adds to plain attributes; prometheus_client turns them into text when a scrape comes. Labels are bounded:
model ids that exist, endpoint kinds, outcomes. Never a key, a session or a request id.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from laya.types import ModelStatus

OUTCOMES = ("served", "refused", "failed", "cancelled")
MICROSECONDS = tuple(base * 10.0**power for power in (-6, -5, -4, -3) for base in (1, 2, 5))
SECONDS = (*(base * 10.0**power for power in (-3, -2, -1, 0, 1) for base in (1, 2.5, 5)), 100.0, 300.0)
_STATES = ("unloaded", "loading", "ready", "degraded", "draining", "failed")


class Histogram:
    """Counts of observations by upper bound, in seconds."""

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum_s += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        total, out = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            out.append(("+Inf" if bound == float("inf") else f"{bound:g}", float(total)))
        return out


class ModelStats:
    """What is counted for one model."""

    __slots__ = ("inter_token", "outcomes", "queue_wait", "tokens_in", "tokens_out", "ttft")

    def __init__(self) -> None:
        self.outcomes: dict[tuple[str, str], int] = {}  # (endpoint kind, outcome) -> requests
        self.tokens_in = 0
        self.tokens_out = 0
        self.queue_wait = Histogram(SECONDS)
        self.ttft = Histogram(SECONDS)
        self.inter_token = Histogram(SECONDS)

    def count(self, kind: str, outcome: str) -> None:
        key = (kind, outcome)
        self.outcomes[key] = self.outcomes.get(key, 0) + 1

    def count_tokens(self, n_prompt: int, n_generated: int, answering_s: float) -> None:
        """Of a request that was served. answering_s: from the first token to the last, 0 where that is not known."""
        self.tokens_in += n_prompt
        self.tokens_out += n_generated
        if n_generated > 1 and answering_s > 0:
            self.inter_token.observe(answering_s / (n_generated - 1))


class GatewayStats:
    """Everything the gateway counts. `arrivals` = in flight + the four outcomes, at any moment."""

    def __init__(self) -> None:
        self.arrivals = 0
        self.in_flight = 0
        self.outcomes = dict.fromkeys(OUTCOMES, 0)
        self.route = Histogram(MICROSECONDS)
        self.added = Histogram(MICROSECONDS)
        self.models: dict[str, ModelStats] = {}
        self.unknown = ModelStats()  # requests that named no model there is
        self.guard_steps: dict[str, int] = {}
        self.unloads: dict[tuple[str, str], int] = {}  # (model, reason) -> engines that went
        self.retries: dict[str, int] = {}  # model -> requests that another replica got
        self.engine_errors: dict[str, int] = {}  # model -> requests that an engine failed
        self.gpus: list[tuple[str, dict[str, int]]] = []  # (index, {free, own, others} -> bytes), as last read

    def model(self, model_id: str) -> ModelStats:
        return self.models.setdefault(model_id, ModelStats())

    def count_guard_step(self, step: str) -> None:
        self.guard_steps[step] = self.guard_steps.get(step, 0) + 1

    def count_unload(self, model_id: str, reason: str) -> None:
        """reason: idle, evicted, pressure, oom, crashed, start_failed, stuck, drained or requested."""
        key = (model_id, reason)
        self.unloads[key] = self.unloads.get(key, 0) + 1

    def count_retry(self, model_id: str) -> None:
        self.retries[model_id] = self.retries.get(model_id, 0) + 1

    def count_engine_error(self, model_id: str) -> None:
        self.engine_errors[model_id] = self.engine_errors.get(model_id, 0) + 1


class LayaCollector(Collector):
    """Prometheus reads the counters through this."""

    def __init__(
        self,
        stats: GatewayStats,
        statuses: Callable[[], Iterable[ModelStatus]],
        budget_bytes: Callable[[], int],
        kv_tokens: Callable[[], dict[str, tuple[int, int]]],
    ) -> None:
        self._stats = stats
        self._statuses = statuses
        self._budget_bytes = budget_bytes
        self._kv_tokens = kv_tokens

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._times()
        yield from self._memory()
        yield from self._guard()

    def _requests(self) -> Iterator[Metric]:
        stats = self._stats
        yield CounterMetricFamily("laya_arrivals", "Requests whose head was read on an inference path", stats.arrivals)
        yield GaugeMetricFamily("laya_requests_in_flight", "Requests without an outcome yet", stats.in_flight)
        requests = CounterMetricFamily(
            "laya_requests", "Requests by how they ended", labels=("model", "endpoint", "outcome")
        )
        tokens = CounterMetricFamily("laya_tokens", "Tokens read and written", labels=("model", "kind"))
        for model_id, model in [*stats.models.items(), ("", stats.unknown)]:
            for (kind, outcome), count in model.outcomes.items():
                requests.add_metric((model_id, kind, outcome), count)
            if model_id:
                tokens.add_metric((model_id, "prompt"), model.tokens_in)
                tokens.add_metric((model_id, "generated"), model.tokens_out)
        yield requests
        yield tokens
        retries = CounterMetricFamily("laya_retries", "Requests that another replica got", labels=("model",))
        errors = CounterMetricFamily("laya_engine_errors", "Requests that an engine failed", labels=("model",))
        for family, counts in ((retries, stats.retries), (errors, stats.engine_errors)):
            for model_id, count in counts.items():
                family.add_metric((model_id,), count)
        yield retries
        yield errors

    def _times(self) -> Iterator[Metric]:
        stats = self._stats
        for name, text, histogram in (
            ("laya_route_seconds", "Choosing an endpoint", stats.route),
            ("laya_gateway_added_seconds", "From the last byte of a request to its first byte sent on", stats.added),
        ):
            family = HistogramMetricFamily(name, text)
            family.add_metric((), histogram.cumulative(), histogram.sum_s)
            yield family
        queue = HistogramMetricFamily("laya_queue_wait_seconds", "Waiting for a sequence", labels=("model",))
        ttft = HistogramMetricFamily("laya_time_to_first_token_seconds", "Arrival to first token", labels=("model",))
        inter = HistogramMetricFamily("laya_inter_token_latency_seconds", "Between tokens", labels=("model",))
        for model_id, model in stats.models.items():
            for family, histogram in ((queue, model.queue_wait), (ttft, model.ttft), (inter, model.inter_token)):
                family.add_metric((model_id,), histogram.cumulative(), histogram.sum_s)
        yield from (queue, ttft, inter)

    def _memory(self) -> Iterator[Metric]:
        budget = GaugeMetricFamily("laya_memory_budget_bytes", "What engines may use", labels=("device",))
        budget.add_metric(("cpu",), self._budget_bytes())
        reserved = GaugeMetricFamily(
            "laya_memory_reserved_bytes", "Planned bytes of running engines", labels=("device", "model", "term")
        )
        measured = GaugeMetricFamily("laya_memory_measured_bytes", "Peak resident bytes", labels=("device", "model"))
        ratio = GaugeMetricFamily("laya_plan_to_peak_ratio", "Planned bytes / measured peak", labels=("model",))
        state = GaugeMetricFamily("laya_model_state", "1 for the state a model is in", labels=("model", "state"))
        engines = GaugeMetricFamily("laya_engines", "Engines of a model by their state", labels=("model", "state"))
        layers = GaugeMetricFamily(
            "laya_gpu_layers", "Layers planned for GPUs, and on them", labels=("model", "where")
        )
        for status in self._statuses():
            if status.gpu_layers is not None:
                layers.add_metric((status.id, "planned"), status.gpu_layers.planned)
                layers.add_metric((status.id, "gpu"), status.gpu_layers.loaded)
            for (model_id, name), count in _engines(status).items():
                engines.add_metric((model_id, name), count)
            for name in _STATES:
                state.add_metric((status.id, name), float(status.state == name))
            if status.plan is None:
                continue
            for device in status.plan.devices:
                for term, n_bytes in device.terms.items():
                    reserved.add_metric((device.device, status.id, term), n_bytes)
            if status.measured_bytes:
                measured.add_metric(("cpu", status.id), status.measured_bytes)
                ratio.add_metric((status.id,), status.plan.ram.total_bytes / status.measured_bytes)
        yield from (budget, reserved, measured, ratio, state, engines, layers)
        promised = GaugeMetricFamily("laya_kv_tokens_promised", "Tokens promised to live requests", labels=("model",))
        capacity = GaugeMetricFamily("laya_kv_tokens_capacity", "Tokens that can be held", labels=("model",))
        for model_id, (n_promised, n_capacity) in self._kv_tokens().items():
            promised.add_metric((model_id,), n_promised)
            capacity.add_metric((model_id,), n_capacity)
        yield from (promised, capacity)

    def _guard(self) -> Iterator[Metric]:
        steps = CounterMetricFamily("laya_guard_steps", "Steps taken to give memory back", labels=("step",))
        for step, count in self._stats.guard_steps.items():
            steps.add_metric((step,), count)
        unloads = CounterMetricFamily("laya_model_unloads", "Engines that went, by why", labels=("model", "reason"))
        for labels, count in self._stats.unloads.items():
            unloads.add_metric(labels, count)
        gpus = GaugeMetricFamily("laya_gpu_memory_bytes", "Memory of a GPU by who holds it", labels=("gpu", "holder"))
        for index, parts in self._stats.gpus:
            for holder, n_bytes in parts.items():
                gpus.add_metric((index, holder), n_bytes)
        yield from (steps, unloads, gpus)


def _engines(status: ModelStatus) -> Counter[tuple[str, str]]:
    """(model, state) -> how many of its engines are in it."""
    replicas = status.extra.get("replicas") or [{"state": status.state}]
    return Counter((status.id, replica["state"]) for replica in replicas)
