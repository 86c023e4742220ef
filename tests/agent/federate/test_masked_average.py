"""What a secure round takes from its devices; its sums are compared with plain averages in `test_round`."""

from typing import Any, cast

import numpy as np
import pytest

from tests.agent.federate.jobs import gestures_bundle, needs_flower

flwr = pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.common import ndarray_to_bytes  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from port_agent.federate.grid import PeerGrid  # noqa: E402
from port_agent.federate.masked_average import MaskedAverage  # noqa: E402
from port_agent.federate.orders import EXPONENTS, LOSS, SAMPLES, RoundOrder  # noqa: E402
from port_agent.federate.tensors import federated_tensors  # noqa: E402
from port_agent.federate.wire import FlowerMessageError  # noqa: E402

pytestmark = needs_flower


@pytest.fixture(autouse=True)
def identity() -> None:
    """Give Flower the sender of messages."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3


@pytest.fixture(scope="module")
def average(tmp_path_factory: pytest.TempPathFactory) -> MaskedAverage:
    folder = tmp_path_factory.mktemp("masked")
    bundle = gestures_bundle(folder, 0)
    order = RoundOrder(
        run_id=1, number=1, folder=str(folder), bundle=str(bundle), names={1: "a", 2: "b", 3: "c"}, goal=3, timeout_s=1.0,
        min_share=0.5, secure=True,
    )  # fmt: skip
    return MaskedAverage(order, federated_tensors(bundle), cast(PeerGrid, None))


def tensors(average: MaskedAverage) -> int:
    return len(average._tensors.layouts)


def measured(exponents: Any) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({SAMPLES: 5, LOSS: 0.5, EXPONENTS: exponents})}), 1, "train")


@pytest.mark.slow
def test_sizes_of_a_change_are_one_for_each_tensor_and_numbers(average: MaskedAverage) -> None:
    average.check(measured([-3] * tensors(average)))
    for wrong in ([-3], [-3.0] * tensors(average), [4000] * tensors(average), 7):
        with pytest.raises(FlowerMessageError, match="do not belong to the job's tensors"):
            average.check(measured(wrong))


def test_masked_sums_are_whole_numbers_in_the_jobs_shapes(average: MaskedAverage) -> None:
    shapes = [(1,), *(layout.shape for layout in average._tensors.layouts.values())]
    right = [ndarray_to_bytes(np.zeros(shape, np.int64)) for shape in shapes]
    for sums, refusal in (
        (right, ""),
        (right[1:], "have other sizes"),
        ([*right[:-1], ndarray_to_bytes(np.zeros(shapes[-1]))], "have other sizes"),
        ([*right[:-1], b"no array"], "cannot be read"),
    ):
        reply = Message(RecordDict({"secaggplus_configs": ConfigRecord({"masked_params": sums})}), 1, "train")
        if not refusal:
            average.check(reply)
            continue
        with pytest.raises(FlowerMessageError, match=refusal):
            average.check(reply)
