"""Hands a replica's metric families on to Ray, whose own Prometheus endpoint then has them with `ray_` in front."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from prometheus_client.core import Metric as Family
from ray.serve.metrics import Gauge

logger = logging.getLogger(__name__)

# Ray collects about as often.
_PERIOD_SECONDS = 5.0


class RayMirror:
    """Repeats what `families` gives, every few seconds, for as long as the `async with` block lasts.

    Ray's counters and histograms take increments and observations only, so every sample goes there as a gauge of the
    sample's own name (with `_total`, `_bucket`, `_sum` or `_count`).
    """

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families
        self._gauges: dict[str, Gauge] = {}
        self._run: asyncio.Task[None] | None = None

    def repeat(self) -> None:
        """Once."""
        for family in self._families():
            for sample in family.samples:
                gauge = self._gauges.get(sample.name)
                if gauge is None:
                    # Ray takes no colon. vLLM's own names have an underscore there too when they go through Ray.
                    name = sample.name.replace(":", "_")
                    gauge = self._gauges[sample.name] = Gauge(name, family.documentation, (*sample.labels,))
                gauge.set(float(sample.value), dict(sample.labels))

    async def __aenter__(self) -> Self:
        self._run = asyncio.create_task(self._repeat_always())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._run.cancel()
            await asyncio.gather(self._run, return_exceptions=True)

    async def _repeat_always(self) -> None:
        while True:
            try:
                self.repeat()
            except Exception:  # whatever Ray's metrics raise: serving goes on without them
                logger.exception("metrics were not handed to Ray")
            await asyncio.sleep(_PERIOD_SECONDS)
