"""Counts of what comes with every message: plain numbers, read off at each scrape.

A counter of prometheus_client takes a lock for every step, and a histogram takes two. These belong
to one thread, as the event loop; a scrape in another may miss the newest step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally(Collector):
    """A counter without labels."""

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self._name, self._text = name, text
        self.count = 0
        registry.register(self)

    def inc(self, more: int = 1) -> None:
        self.count += more

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, self.count)


class TallyByLabels(Collector):
    """Counters of one name, by the values of its labels. ``counts`` is changed by its owner."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self.counts: dict[tuple[str, ...], int] = {}
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, count in list(self.counts.items()):
            family.add_metric(values, count)
        yield family


class Spread:
    """A quantity's distribution over buckets. ``bounds``: the buckets' inclusive upper ends."""

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds
        self._bounds = tuple(map(float, bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str] = ()) -> None:
        """As a series of ``family``."""
        ends = map(floatToGoString, (*self._bounds, inf))
        family.add_metric(labels, list(zip(ends, accumulate(self._counts), strict=True)), self._sum)


class Spreads(Collector):
    """A histogram, by the values of a label or without one: ``values`` is what it can be."""

    def __init__(
        self,
        name: str,
        text: str,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        label: str = "",
        values: Sequence[str] = ("",),
    ) -> None:
        self._name, self._text = name, text
        self._labels = (label,) if label else ()
        self.by_value = {value: Spread(bounds) for value in values}
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for value, spread in self.by_value.items():
            spread.add_to(family, (value,) if self._labels else ())
        yield family


def histogram(name: str, text: str, bounds: Sequence[float], registry: CollectorRegistry) -> Spread:
    """A histogram without labels."""
    return Spreads(name, text, bounds, registry).by_value[""]
