"""Replies of a round: their metrics, and how many are enough."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.agent.federate.jobs import needs_flower

flwr = pytest.importorskip("flwr")

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.serverapp.strategy import FedAvg  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from port_agent.federate.orders import ARRAYS, LATE, LOSS, SAMPLES, RoundOrder  # noqa: E402
from port_agent.federate.replies import (  # noqa: E402
    RoundAbandonedError,
    check_average,
    check_metrics,
    check_records,
    require_replies,
    too_large,
)
from port_agent.federate.tensors import Arrays  # noqa: E402
from port_agent.federate.wire import FlowerMessageError, array_record, plain_arrays  # noqa: E402

pytestmark = needs_flower


@pytest.fixture(autouse=True)
def identity() -> None:
    """Give Flower the sender of messages."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3


def reply(**metrics: Any) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({SAMPLES: 5, **metrics})}), 1, "train")


@pytest.mark.parametrize(
    ("metrics", "refusal"),
    [
        ({LOSS: 0.5}, ""),
        ({}, "its metrics are not the requested ones"),
        ({LOSS: 0.5, "spy": 1}, "its metrics are not the requested ones"),
        ({LOSS: float("nan")}, "its loss is nan"),
        ({LOSS: float("-inf")}, "its loss is -inf"),
        ({LOSS: 1e308}, r"its loss is 1e\+308"),
        ({LOSS: 1}, "its loss is 1"),
        ({LOSS: 0.5, SAMPLES: 0}, "it trained on 0 samples"),
        ({LOSS: 0.5, SAMPLES: 1 << 50}, "it trained on"),
        ({LOSS: 0.5, SAMPLES: 2.5}, "it trained on 2.5 samples"),
    ],
)
def test_metrics_are_those_that_were_asked_for(metrics: dict[str, Any], refusal: str) -> None:
    if not refusal:
        assert check_metrics(reply(**metrics), LOSS)[LOSS] == 0.5
        return
    with pytest.raises(FlowerMessageError, match=refusal):
        check_metrics(reply(**metrics), LOSS)


def test_a_reply_without_metrics_is_refused() -> None:
    with pytest.raises(FlowerMessageError, match="requested ones: none"):
        check_metrics(Message(RecordDict(), 1, "train"), LOSS)


def test_a_reply_has_the_records_that_were_asked_for_and_no_others() -> None:
    metrics, arrays = MetricRecord({SAMPLES: 5}), ArrayRecord()
    cases: tuple[tuple[dict[str, ArrayRecord | MetricRecord | ConfigRecord], str | None], ...] = (
        ({"metrics": metrics, "arrays": arrays}, None),
        ({"metrics": metrics}, "metrics"),
        ({}, "none"),
        ({"metrics": metrics, "arrays": arrays, "more": ArrayRecord()}, "arrays, metrics, more"),
        ({"metrics": metrics, "arrays": arrays, "more": MetricRecord()}, "arrays, metrics, more"),
        ({"metrics": metrics, "arrays": arrays, "more": ConfigRecord()}, "arrays, metrics, more"),
    )
    for records, refused in cases:
        sent = Message(RecordDict(records), 1, "train")
        if refused is None:
            check_records(sent, "arrays")
            continue
        with pytest.raises(FlowerMessageError, match=f"its records are not the requested ones: {refused}$"):
            check_records(sent, "arrays")


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [
        ({1: 1.0, 2: 2.0, 3: 3e6}, {3}),
        ({1: 1.0, 2: 2.0, 3: 2e6}, set()),
        ({1: 1.0, 2: 3e30}, set()),
        ({1: 0.0, 2: 0.0, 3: 5.0}, set()),
        ({1: 0.0, 2: 1.0, 3: 1.5, 4: 1e9, 5: 1e10}, {4, 5}),
    ],
)
def test_what_would_be_the_average_alone_is_left_out(sizes: dict[int, float], left_out: set[int]) -> None:
    found = too_large("change", sizes)
    assert found.keys() == left_out and all("its change is" in why and "the median" in why for why in found.values())


@dataclass
class Case:
    replied: int
    fewest: int
    needed: int | None


@pytest.mark.parametrize("case", [Case(2, 1, None), Case(1, 1, 2), Case(2, 3, 3), Case(3, 3, None)])
def test_a_round_needs_its_share_and_no_fewer_than_the_fewest(case: Case) -> None:
    order = RoundOrder(
        run_id=1,
        number=1,
        folder="",
        bundle="",
        names={1: "attic", 2: "cellar", 3: "loft"},
        goal=3,
        timeout_s=1.0,
        min_share=0.5,
    )
    if case.needed is None:
        require_replies(case.replied, order, {}, fewest=case.fewest)
        return
    told = rf"^{case.replied} of 3 devices replied, {case.needed} are needed \(attic: no reply; loft: late\)$"
    with pytest.raises(RoundAbandonedError, match=told):
        require_replies(case.replied, order, {3: "late", 1: "no reply"}, fewest=case.fewest)
    with pytest.raises(RoundAbandonedError, match=r"; if training takes longer, lead with a longer --round-timeout$"):
        require_replies(case.replied, order, {3: LATE}, fewest=case.fewest)


@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_an_average_is_held_against_one_of_its_own(kind: str) -> None:
    draw, messages = np.random.default_rng(3), []
    for samples in (3, 70, 1):
        arrays: Arrays = {"w": (10.0 ** draw.integers(-45, 3, 2000) * draw.standard_normal(2000)).astype(kind)}
        messages.append(reply(**{SAMPLES: samples}))
        messages[-1].content.array_records[ARRAYS] = array_record(arrays)
    averaged, _ = FedAvg(min_train_nodes=3, min_available_nodes=3).aggregate_train(1, messages)
    assert averaged is not None
    found = plain_arrays(averaged)
    check_average(found, messages)
    with pytest.raises(RoundAbandonedError, match="the sum of w is not the average"):
        check_average(found, messages[:2])
    found["w"][7] = np.nan
    with pytest.raises(RoundAbandonedError, match="the sum of w is not the average"):
        check_average(found, messages)
