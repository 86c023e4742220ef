"""What a reply in a round may contain, and how many replies complete a round."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import Message

from port_agent.federate.orders import ARRAYS, LATE, LOSS, SAMPLES, RoundOrder
from port_agent.federate.tensors import Arrays
from port_agent.federate.wire import FlowerMessageError
from port_planner.base.errors import PortError

if TYPE_CHECKING:
    from flwr.app import MetricRecord

_MAX_SAMPLES = 1 << 40
"""The largest number of samples that a device may report."""
_MAX_LOSS = float.fromhex("0x1.fffffep+127")
"""The largest 32-bit number."""
_FARTHEST = 2.0**20
"""Largest change or count of one device, as a multiple of the median; beyond it, the average would contain
hardly a bit of the others.
"""
_FEWEST_COMPARED = 3


class RoundAbandonedError(PortError):
    """Too few devices replied; the weights stay unchanged."""


def check_records(reply: Message, *arrays: str) -> None:
    """Raise FlowerMessageError unless a reply contains exactly metrics and the array records of these names."""
    content = reply.content
    found = {*content.array_records, *content.metric_records, *content.config_records}
    if set(content.array_records) != {*arrays} or not found <= {*arrays, "metrics"}:
        raise FlowerMessageError(f"its records are not the requested ones: {', '.join(sorted(found)) or 'none'}")


def check_metrics(reply: Message, *names: str) -> "MetricRecord":
    """Return the metrics of a reply: samples, and the given ones.

    Raises FlowerMessageError for others, and for a loss that is not finite.
    """
    metrics = reply.content.metric_records.get("metrics")
    if metrics is None or set(metrics) != {SAMPLES, *names}:
        found = "none" if metrics is None else ", ".join(sorted(metrics))
        raise FlowerMessageError(f"its metrics are not the requested ones: {found}")
    samples = metrics[SAMPLES]
    if not isinstance(samples, int) or not 0 < samples < _MAX_SAMPLES:
        raise FlowerMessageError(f"it trained on {samples} samples")
    loss = metrics.get(LOSS, 0.0)
    if not isinstance(loss, float) or not abs(loss) <= _MAX_LOSS:
        raise FlowerMessageError(f"its loss is {loss}")
    return metrics


def check_average(averaged: Arrays, replies: Sequence[Message]) -> None:
    """Raise RoundAbandonedError unless the weights equal the average of the replies by samples, summed again in
    64 bits, within rounding.
    """
    counts = [int(str(reply.content.metric_records["metrics"][SAMPLES])) for reply in replies]
    records = [reply.content.array_records[ARRAYS] for reply in replies]
    for name, array in averaged.items():
        shares = [
            np.multiply(record[name].numpy(), count / sum(counts), dtype=np.float64)
            for count, record in zip(counts, records, strict=True)
        ]
        expected, most = np.sum(shares, axis=0), np.sum(np.abs(shares), axis=0)
        kind = np.finfo(array.dtype.name)
        allowed = (len(counts) + 2) * (kind.eps * most + kind.smallest_subnormal)
        if not (np.abs(np.subtract(array, expected, dtype=np.float64)) <= allowed).all():
            raise RoundAbandonedError(f"the sum of {name} is not the average of the replies")


def too_large(what: str, sizes: Mapping[int, float]) -> dict[int, str]:
    """Return the devices whose `what`, by node, would dominate the average, and the reason to leave them out."""
    middle = statistics.median(sizes.values()) if len(sizes) >= _FEWEST_COMPARED else 0.0
    return {
        node: f"its {what} is {size / middle:.1e} times the median of all devices"
        for node, size in sizes.items()
        if middle and size > _FARTHEST * middle
    }


def require_replies(replied: int, order: RoundOrder, lost: Mapping[int, str], *, fewest: int = 1) -> None:
    """Raise RoundAbandonedError if fewer devices replied than are worth averaging, or than `fewest`.

    `lost`: why, by node.
    """
    needed = max(fewest, math.ceil(order.min_share * len(order.nodes)))
    if replied < needed:
        remedy = "; if training takes longer, lead with a longer --round-timeout" if LATE in lost.values() else ""
        raise RoundAbandonedError(
            f"{replied} of {len(order.nodes)} devices replied, {needed} are needed ({reasons(order, lost)}){remedy}"
        )


def reasons(order: RoundOrder, lost: Mapping[int, str]) -> str:
    """Return why devices are missing from a round, by their names."""
    return "; ".join(f"{order.names[node]}: {why}" for node, why in sorted(lost.items()))
