# SPDX-License-Identifier: Apache-2.0
"""A collector of prometheus-client over the live managers of the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeHistogramMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector as BaseCollector

from kvpass.metrics.series import SERIES, Series
from kvpass.runtime import roster
from kvpass.runtime.metrics import Snapshot

COMMON = ("manager", "device")
BALANCE_BOUNDS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0)


class Collector(BaseCollector):
    """All series, read anew at each scrape; those of a manager end with it.

    Managers are told apart by the label ``manager``, a number never used twice in a process. The
    collector keeps none of them alive. A scrape locks one manager at a time for as long as its
    blocks take to be counted.
    """

    def describe(self) -> list[Metric]:
        """Nothing: what there is depends on the caches, and registering needs no scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Metric families of every live manager."""
        snapshots = [manager.snapshot() for manager in roster.managers()]
        yield GaugeMetricFamily("kvpass_managers", "Live managers.", value=len(snapshots))
        for series in SERIES:
            yield _family(series, snapshots)
        yield _balance(snapshots)


def _common(snapshot: Snapshot) -> list[str]:
    return [str(snapshot.manager), snapshot.device]


def _family(series: Series, snapshots: Sequence[Snapshot]) -> Metric:
    kind = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
    family = kind(series.name, series.help, labels=[*COMMON, *series.labels])
    for snapshot in snapshots:
        for labels, number in series.values(snapshot):
            if number is not None:
                family.add_metric([*_common(snapshot), *labels], number)
    return family


def _balance(snapshots: Sequence[Snapshot]) -> Metric:
    family = GaugeHistogramMetricFamily(
        "kvpass_weight_balance_ratio",
        "Sequences by their share of the hot tier over their fair share; once a window has passed.",
        labels=COMMON,
    )
    for snapshot in snapshots:
        found = [use.balance for use in snapshot.by_sequence]
        known = [balance for balance in found if balance is not None]
        if known:
            buckets = [(str(bound), sum(b <= bound for b in known)) for bound in BALANCE_BOUNDS]
            family.add_metric(_common(snapshot), [*buckets, ("+Inf", len(known))], sum(known))
    return family
