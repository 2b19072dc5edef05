"""The metrics of one process: each is defined once, with the code that counts or reads its figure."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Generic, TypeVar

from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = CONTENT_TYPE_LATEST

PREFIX = "spool_"

# prometheus_client adds a sample with the time at which each counter began.
_BEGINNING = "_created"

R = TypeVar("R")
C = TypeVar("C", Counter, Gauge, Histogram)
Figures = float | Mapping[str, float] | Mapping[tuple[str, ...], float]
"""One figure, or one for each value of the metric's label, or for each combination of values of several labels."""


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """What the documentation says of a metric. `name` is the exported one; a counter's ends with `_total`."""

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """The name that prometheus_client wants: it adds `_total` itself."""
        return self.name.removesuffix("_total") if self.kind is Kind.COUNTER else self.name


class MetricSet(Generic[R]):
    """Metrics in the order of their definitions, all names with `spool_` in front.

    `counter`, `gauge` and `histogram` return objects of prometheus_client, to be changed when something happens. What
    is counted elsewhere is not counted again, but read at each scrape from a reading of type R: `table` has a line for
    each such metric, with its kind, its name, the attribute of the reading that holds the figure, and its labels,
    separated by commas, for which the attribute holds a mapping from values of the label, or tuples of them. For a
    histogram it is a mapping from values to numbers of observations, and the last word names one of `bounds`. Indented
    lines below it say what the metric means.
    """

    def __init__(self, table: str = "", bounds: Mapping[str, tuple[float, ...]] | None = None) -> None:
        self._entries: list[tuple[Metric, Callable[[R], Iterable[Family]]]] = []
        for entry in re.split(r"\n(?=\S)", table.strip()) if table else ():
            first, *lines = entry.splitlines()
            kind, name, path, *last = first.split()
            labels = last[0].split(",") if last and Kind(kind) is not Kind.HISTOGRAM else []
            metric = self._define(name, Kind(kind), " ".join(line.strip() for line in lines), *labels)
            figure = attrgetter(path)
            if metric.kind is Kind.HISTOGRAM:
                self._entries.append((metric, functools.partial(_histogram, metric, (bounds or {})[last[0]], figure)))
            else:
                self._entries.append((metric, functools.partial(_family, metric, figure)))

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(metric for metric, _ in self._entries)

    def counter(self, name: str, meaning: str, label: str | None = None, values: Iterable[str] = ()) -> Counter:
        """The label's `values` are there from the start, so that a first increase is seen as one."""
        metric = self._define(name, Kind.COUNTER, meaning, *([] if label is None else [label]))
        counter = Counter(metric.family, meaning, metric.labels, registry=None)
        for value in values:
            counter.labels(value)
        return self._collected(metric, counter)

    def gauge(self, name: str, meaning: str) -> Gauge:
        metric = self._define(name, Kind.GAUGE, meaning)
        return self._collected(metric, Gauge(metric.family, meaning, registry=None))

    def histogram(self, name: str, meaning: str, bounds: tuple[float, ...]) -> Histogram:
        metric = self._define(name, Kind.HISTOGRAM, meaning)
        return self._collected(metric, Histogram(metric.family, meaning, buckets=bounds, registry=None))

    def families(self, reading: R) -> Iterator[Family]:
        for _, collect in self._entries:
            for family in collect(reading):
                family.samples = [sample for sample in family.samples if not sample.name.endswith(_BEGINNING)]
                yield family

    def _define(self, name: str, kind: Kind, meaning: str, *labels: str) -> Metric:
        return Metric(f"{PREFIX}{name}", kind, meaning, labels)

    def _collected(self, metric: Metric, collector: C) -> C:
        self._entries.append((metric, lambda reading: collector.collect()))
        return collector


def exposition(families: Iterable[Family]) -> bytes:
    """In Prometheus' text form; CONTENT_TYPE says so."""
    return generate_latest(_Families(families))


class _Families(Collector):
    """Families in the place of a registry."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def _family(metric: Metric, figure: Callable[[R], Figures], reading: R) -> list[Family]:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.family, metric.meaning, labels=metric.labels)
    figures = figure(reading)
    for value, number in figures.items() if isinstance(figures, Mapping) else [((), figures)]:
        family.add_metric([value] if isinstance(value, str) else value, number)
    return [family]


def _histogram(
    metric: Metric, bounds: tuple[float, ...], figure: Callable[[R], Mapping[int, int]], reading: R
) -> list[Family]:
    counts = figure(reading)
    buckets = [
        (floatToGoString(bound), sum(count for value, count in counts.items() if value <= bound))
        for bound in (*bounds, float("inf"))
    ]
    family = HistogramMetricFamily(metric.family, metric.meaning)
    family.add_metric([], buckets, sum(value * count for value, count in counts.items()))
    return [family]
