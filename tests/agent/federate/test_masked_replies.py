"""What a device may answer in each stage of secure aggregation; anything else is its own fault, and named."""

from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key

from tests.agent.federate.jobs import needs_flower

flwr = pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict  # noqa: E402
from flwr.common import Code, FitRes, Parameters, Status, ndarray_to_bytes  # noqa: E402
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage  # noqa: E402
from flwr.compat.common import recorddict_compat  # noqa: E402
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from port_agent.federate.masked_replies import check_stage_reply  # noqa: E402
from port_agent.federate.wire import FlowerMessageError  # noqa: E402

pytestmark = needs_flower

NODE, RECORD, SHAPES, SAMPLES = 5, "secaggplus_configs", [(1,), (2, 3)], {5: 9}
OTHER_CURVE = generate_private_key(SECP256R1()).public_key()
KEYS = [public_key_to_bytes(generate_key_pairs()[1]) for _ in range(2)]
SUMS = [ndarray_to_bytes(np.zeros(shape, np.int64)) for shape in SHAPES]
SHARE = bytes(4 + 16)

QUESTIONS: dict[str, dict[str, Any]] = {
    Stage.SETUP: {},
    Stage.SHARE_KEYS: {"5": KEYS, "6": KEYS, "7": KEYS},
    Stage.COLLECT_MASKED_VECTORS: {},
    Stage.UNMASK: {Key.ACTIVE_NODE_ID_LIST: [5, 6], Key.DEAD_NODE_ID_LIST: [7]},
}
RIGHT: dict[str, dict[str, Any]] = {
    Stage.SETUP: {Key.PUBLIC_KEY_1: KEYS[0], Key.PUBLIC_KEY_2: KEYS[1]},
    Stage.SHARE_KEYS: {Key.DESTINATION_LIST: [7, 6], Key.CIPHERTEXT_LIST: [b"a", b"b"]},
    Stage.COLLECT_MASKED_VECTORS: {Key.MASKED_PARAMETERS: SUMS},
    Stage.UNMASK: {Key.NODE_ID_LIST: [5, 6, 7], Key.SHARE_LIST: [SHARE] * 3},
}


@pytest.fixture(autouse=True)
def identity() -> None:
    """Give Flower the sender of messages."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3


def check(stage: str, answer: dict[str, Any], samples: int | None = 9) -> None:
    """Check an answer; `samples`: of the change, None for a reply without Flower's records of it."""
    question = ConfigRecord({Key.STAGE: stage, **QUESTIONS[stage]})
    asked = Message(RecordDict({RECORD: question}), NODE, "train")
    content = RecordDict()
    if samples is not None:
        told = FitRes(Status(Code.OK, ""), Parameters([], "numpy.ndarray"), samples, {})
        content = recorddict_compat.fitres_to_recorddict(told, keep_input=True)
    content.config_records[RECORD] = ConfigRecord(answer)
    check_stage_reply(asked, Message(content, reply_to=asked), SHAPES, SAMPLES)


@pytest.mark.parametrize("stage", [*RIGHT])
def test_what_flower_answers_is_taken(stage: str) -> None:
    check(stage, RIGHT[stage])


@pytest.mark.parametrize("stage", [*RIGHT])
def test_other_fields_are_refused(stage: str) -> None:
    with pytest.raises(FlowerMessageError, match=f"its reply to the stage {stage} has nothing"):
        check(stage, {})
    with pytest.raises(FlowerMessageError, match="more"):
        check(stage, RIGHT[stage] | {"more": 1})


@pytest.mark.parametrize(
    ("stage", "changed", "refusal"),
    [
        (Stage.SETUP, {Key.PUBLIC_KEY_1: b"junk"}, "a public key cannot be read"),
        (Stage.SETUP, {Key.PUBLIC_KEY_1: 7}, "a public key cannot be read"),
        (Stage.SETUP, {Key.PUBLIC_KEY_1: public_key_to_bytes(OTHER_CURVE)}, "not one of the curve secp384r1"),
        (Stage.SETUP, {Key.PUBLIC_KEY_1: KEYS[1]}, "its two public keys are the same"),
        (Stage.SHARE_KEYS, {Key.DESTINATION_LIST: [6]}, "for 1 devices, not for the 2"),
        (Stage.SHARE_KEYS, {Key.DESTINATION_LIST: [6, 8]}, "for 2 devices, not for the 2"),
        (Stage.SHARE_KEYS, {Key.DESTINATION_LIST: [6, 6]}, "for 2 devices, not for the 2"),
        (Stage.SHARE_KEYS, {Key.CIPHERTEXT_LIST: [b"a"]}, "1 contents for 2 devices"),
        (Stage.SHARE_KEYS, {Key.CIPHERTEXT_LIST: [1, 2]}, "2 contents for 2 devices"),
        (Stage.SHARE_KEYS, {Key.CIPHERTEXT_LIST: 7}, "0 contents for 2 devices"),
        (Stage.COLLECT_MASKED_VECTORS, {Key.MASKED_PARAMETERS: SUMS[1:]}, "have other sizes"),
        (
            Stage.COLLECT_MASKED_VECTORS,
            {Key.MASKED_PARAMETERS: [SUMS[0], ndarray_to_bytes(np.zeros((2, 3)))]},
            "have other sizes",
        ),
        (Stage.COLLECT_MASKED_VECTORS, {Key.MASKED_PARAMETERS: [SUMS[0], b"no array"]}, "cannot be read"),
        (Stage.UNMASK, {Key.NODE_ID_LIST: [5, 6, 8]}, "for 3 devices, not for the 3"),
        (Stage.UNMASK, {Key.SHARE_LIST: [SHARE] * 2}, "2 contents for 3 devices"),
        (Stage.UNMASK, {Key.SHARE_LIST: [SHARE, SHARE, b"short"]}, "a share of a key has 5 bytes"),
        (Stage.UNMASK, {Key.SHARE_LIST: [SHARE, SHARE, b""]}, "a share of a key has 0 bytes"),
    ],
)
def test_what_does_not_fit_the_stage_is_refused(stage: str, changed: dict[str, Any], refusal: str) -> None:
    with pytest.raises(FlowerMessageError, match=refusal):
        check(stage, RIGHT[stage] | changed)


def test_a_masked_change_is_of_the_samples_that_were_reported() -> None:
    stage = Stage.COLLECT_MASKED_VECTORS
    with pytest.raises(FlowerMessageError, match="is of 8 samples, and it reported 9"):
        check(stage, RIGHT[stage], samples=8)
    with pytest.raises(FlowerMessageError, match="lacks one of Flower's records"):
        check(stage, RIGHT[stage], samples=None)
