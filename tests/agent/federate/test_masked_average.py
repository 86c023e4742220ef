"""What a secure round takes from its devices; its sums are compared with plain averages in `test_round`."""

from typing import Any, cast

import numpy as np
import pytest

from tests.agent.federate.jobs import gestures_bundle, needs_flower

flwr = pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict  # noqa: E402
from flwr.common import ndarray_to_bytes  # noqa: E402
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from port_agent.federate.grid import PeerGrid  # noqa: E402
from port_agent.federate.masked_average import MaskedAverage, _check_shares  # noqa: E402
from port_agent.federate.orders import EXPONENTS, LOSS, SAMPLES, RoundOrder  # noqa: E402
from port_agent.federate.replies import RoundAbandonedError  # noqa: E402
from port_agent.federate.tensors import Arrays, federated_tensors  # noqa: E402
from port_agent.federate.wire import FlowerMessageError  # noqa: E402

pytestmark = needs_flower

RECORD = "secaggplus_configs"


@pytest.fixture(autouse=True)
def identity() -> None:
    """Give Flower the sender of messages."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3


@pytest.fixture(scope="module")
def average(tmp_path_factory: pytest.TempPathFactory) -> MaskedAverage:
    folder = tmp_path_factory.mktemp("masked")
    bundle = gestures_bundle(folder, 0)
    order = RoundOrder(
        run_id=1,
        number=1,
        folder=str(folder),
        bundle=str(bundle),
        names={1: "a", 2: "b", 3: "c"},
        goal=3,
        timeout_s=1.0,
        min_share=0.5,
        secure=True,
    )
    return MaskedAverage(order, federated_tensors(bundle), cast(PeerGrid, None))


def tensors(average: MaskedAverage) -> int:
    return len(average._tensors.layouts)


def measured(exponents: Any) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({SAMPLES: 5, LOSS: 0.5, EXPONENTS: exponents})}), 1, "train")


@pytest.mark.slow
def test_sizes_of_a_change_are_one_for_each_tensor_and_numbers(average: MaskedAverage) -> None:
    asked = Message(RecordDict(), 1, "train")
    average.check(asked, measured([-3] * tensors(average)))
    for wrong in ([-3], [-3.0] * tensors(average), [130] * tensors(average), 7):
        with pytest.raises(FlowerMessageError, match="do not belong to the job's tensors"):
            average.check(asked, measured(wrong))


def test_masked_sums_have_the_jobs_shapes(average: MaskedAverage) -> None:
    asked = Message(RecordDict({RECORD: ConfigRecord({Key.STAGE: Stage.COLLECT_MASKED_VECTORS})}), 1, "train")
    sums = [ndarray_to_bytes(np.zeros(layout.shape, np.int64)) for layout in average._tensors.layouts.values()]
    reply = Message(RecordDict({RECORD: ConfigRecord({Key.MASKED_PARAMETERS: sums})}), 1, "train")
    with pytest.raises(FlowerMessageError, match="have other sizes"):
        average.check(asked, reply)


@pytest.mark.parametrize(("largest", "is_sum"), [(1.0, True), (-1.0, True), (1.5, False), (float("nan"), False)])
def test_a_sum_that_is_none_of_changes_is_no_average(largest: float, is_sum: bool) -> None:
    shares: Arrays = {"a": np.zeros(3), "b": np.array([0.5, largest])}
    if is_sum:
        _check_shares(shares)
        return
    with pytest.raises(RoundAbandonedError, match="a device sent false masks or shares"):
        _check_shares(shares)
