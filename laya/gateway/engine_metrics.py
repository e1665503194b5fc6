"""Owns: what engines say of themselves at their own `/metrics`, passed on with the model's name. Adds no figure.

An engine that has no such page, does not answer in time or says what is no Prometheus text is left out: a scrape tells
of those that work, and never wakes, loads or holds one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from laya.gateway.endpoint import Endpoint
    from laya.gateway.fleet import Fleet

logger = logging.getLogger(__name__)
ANSWER_S = 2.0


async def engine_metrics(fleet: Fleet) -> bytes:
    """The text of all engines that run, each sample with the labels `model` and `engine`."""
    running = [
        endpoint for endpoint in fleet.endpoints.values() if endpoint.pool is not None and not endpoint.is_remote
    ]
    texts = await asyncio.gather(*(_text_of(endpoint) for endpoint in running))
    families: dict[str, Metric] = {}
    for endpoint, text in zip(running, texts, strict=True):
        try:
            found = list(text_string_to_metric_families(text))
        except ValueError as error:
            logger.info("the metrics of '%s' cannot be read: %s", endpoint.name, error)
            continue
        for family in found:
            known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                labels = {**sample.labels, "model": endpoint.model_id, "engine": endpoint.name}
                known.samples.append(sample._replace(labels=labels))
    registry = CollectorRegistry()
    registry.register(_Read(list(families.values())))
    return generate_latest(registry)


async def _text_of(endpoint: Endpoint) -> str:
    pool = endpoint.pool
    if pool is None:
        return ""
    try:
        status, body = await pool.fetch("GET", "/metrics", deadline_s=ANSWER_S)
    except OSError as error:
        logger.info("the engine of '%s' tells no metrics: %s", endpoint.name, error)
        return ""
    return body.decode("utf-8", "replace") if status == 200 else ""


class _Read(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
