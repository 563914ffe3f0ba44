"""The use of chips as metrics of Prometheus, with names and units by its conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from tpu_ops.runs import usage
from tpu_ops.runs.usage import Row, Use

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

#: Labels of the metrics of a core, of a run on a worker, and of a worker.
_CORE = ("node", "worker", "core", "run", "person")
_RUN = ("node", "worker", "run", "person")
_WORKER = ("node", "worker")


class _Metric(NamedTuple):
    """One metric: its name, help text, labels, and its value in a row; rows without a value have no sample."""

    name: str
    text: str
    labels: tuple[str, ...]
    value: Callable[[Row], float | None]


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


METRICS = (
    _Metric("tpu_hbm_used_bytes", "Memory of the core in use.", _CORE, lambda row: row.hbm_used),
    _Metric("tpu_hbm_total_bytes", "Memory of the core.", _CORE, lambda row: row.hbm_total),
    _Metric(
        "tpu_duty_cycle_ratio", "Part of the time in which the core was busy.", _CORE, lambda row: _ratio(row.duty)
    ),
    _Metric(
        "tpu_hbm_bandwidth_ratio", "Part of the memory bandwidth in use.", _CORE, lambda row: _ratio(row.bandwidth)
    ),
    _Metric("tpu_idle_seconds", "Time since the core was busy.", _CORE, lambda row: row.idle),
    _Metric("tpu_queued_programs", "Number of programs that wait for the core.", _CORE, lambda row: row.queued),
    _Metric(
        "tpu_core_error",
        "Whether libtpu reports an error of the core.",
        _CORE,
        lambda row: None if row.queued is None and not row.error else float(bool(row.error)),
    ),
    _Metric(
        "tpu_run_last_output_timestamp_seconds",
        "When the run's rank on the worker last wrote output.",
        _RUN,
        lambda row: row.last_output if row.run else None,
    ),
    _Metric(
        "tpu_run_stalled",
        "Whether the supervisor of the run's rank sees a stall.",
        _RUN,
        lambda row: float(bool(row.stall)) if row.run and row.state != usage.LOST else None,
    ),
    _Metric("tpu_worker_up", "Whether the worker answers.", _WORKER, lambda row: float(row.state != usage.LOST)),
    _Metric("tpu_worker_chips", "Number of the worker's chips.", _WORKER, lambda row: row.chips or None),
    _Metric(
        "tpu_worker_last_answer_timestamp_seconds", "When the worker last answered.", _WORKER, lambda row: row.answered
    ),
    _Metric(
        "tpu_worker_metrics_state", "1 for each state of the worker's metrics.", (*_WORKER, "state"), lambda row: 1
    ),
)


class Collector:
    """Gives a registry of prometheus_client the metrics of the last answers, so that a scrape asks no worker.

    Args:
        uses: Returns the uses of all workers.
    """

    def __init__(self, uses: Callable[[], Iterable[Use]]) -> None:
        self._uses = uses

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics."""
        from prometheus_client.core import GaugeMetricFamily

        rows = [row for use in self._uses() for row in use.rows]
        for metric in METRICS:
            family = GaugeMetricFamily(metric.name, metric.text, labels=metric.labels)
            samples: dict[tuple[str, ...], float] = {}
            for row in rows:
                if (value := metric.value(row)) is not None and ("core" not in metric.labels or row.core is not None):
                    # Prometheus refuses a sample that occurs twice.
                    samples.setdefault(tuple(_text(getattr(row, label)) for label in metric.labels), value)
            for labels, value in samples.items():
                family.add_metric(labels, value)
            yield family


def _text(value: object) -> str:
    """Return the value of a label. Names that are not UTF-8 on a worker must not make a scrape fail."""
    return str(value).encode(errors="replace").decode()
