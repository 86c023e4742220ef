"""What a device refuses in secure aggregation, whoever leads it."""

from typing import Any

import numpy as np
import pytest

from tests.agent.federate.jobs import needs_flower

flwr = pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, RecordDict  # noqa: E402
from flwr.common.secure_aggregation.secaggplus_constants import Key, Stage  # noqa: E402

from port_agent.federate.masking import (  # noqa: E402
    MIN_EXPONENT,
    SUMMED_RANGE,
    SUMMED_STEPS,
    MaskingError,
    check_stage,
    exponent,
    keep_change,
    kept_change,
    safe_threshold,
    scaled,
)
from port_agent.federate.masks import SUMMED_MODULUS  # noqa: E402
from port_agent.federate.tensors import Arrays  # noqa: E402

pytestmark = needs_flower

STATE = ConfigRecord({"nid": 1, "sample_num": 3})
SETUP: dict[str, Any] = {
    Key.STAGE: Stage.SETUP,
    Key.MAX_WEIGHT: 9.0,
    Key.SAMPLE_NUMBER: 3,
    Key.SHARE_NUMBER: 3,
    Key.THRESHOLD: 3,
    Key.CLIPPING_RANGE: SUMMED_RANGE,
    Key.TARGET_RANGE: SUMMED_STEPS,
    Key.MOD_RANGE: SUMMED_MODULUS,
}
UNMASK: dict[str, Any] = {
    Key.STAGE: Stage.UNMASK,
    Key.ACTIVE_NODE_ID_LIST: [1, 2, 3],
    Key.DEAD_NODE_ID_LIST: [4],
}


@pytest.mark.parametrize(
    ("asked", "refusal"),
    [
        (SETUP, ""),
        (SETUP | {Key.THRESHOLD: 2}, "sums of fewer than 3 devices"),
        (SETUP | {Key.SAMPLE_NUMBER: 2}, "sums of fewer than 3 devices"),
        (SETUP | {Key.SHARE_NUMBER: 1}, "sums of fewer than 3 devices"),
        (SETUP | {Key.SAMPLE_NUMBER: 7, Key.SHARE_NUMBER: 7, Key.THRESHOLD: 6}, ""),
        (SETUP | {Key.SAMPLE_NUMBER: 7, Key.SHARE_NUMBER: 7, Key.THRESHOLD: 5}, "5 of 7 shares unmask .* not 6 of 7"),
        (SETUP | {Key.SAMPLE_NUMBER: 7}, "3 of 3 shares"),
        (SETUP | {Key.CLIPPING_RANGE: 16.0}, "not those of this version"),
        (SETUP | {Key.MAX_WEIGHT: 0.0}, "the largest number of samples is 0.0"),
        (SETUP | {Key.MAX_WEIGHT: np.inf}, "the largest number of samples is inf"),
        ({Key.STAGE: Stage.SHARE_KEYS, "1": [b"a", b"b"], "2": [b"c", b"d"], "3": [b"e", b"f"]}, ""),
        ({Key.STAGE: Stage.SHARE_KEYS, "1": [b"a", b"b"], "2": [b"c", b"d"]}, "2 devices are left"),
        ({Key.STAGE: Stage.SHARE_KEYS, **{str(node): [b"a", b"b"] for node in range(4)}}, "keys of 4 devices"),
        ({Key.STAGE: Stage.COLLECT_MASKED_VECTORS, Key.SOURCE_LIST: [2, 3]}, ""),
        ({Key.STAGE: Stage.COLLECT_MASKED_VECTORS, Key.SOURCE_LIST: [2, 2]}, "2 devices are left"),
        ({Key.STAGE: Stage.COLLECT_MASKED_VECTORS, Key.SOURCE_LIST: [1, 2]}, "2 devices are left"),
        (UNMASK, ""),
        (UNMASK | {Key.ACTIVE_NODE_ID_LIST: [1, 2]}, "2 devices are left"),
        (UNMASK | {Key.DEAD_NODE_ID_LIST: [3]}, "alive and silent at once"),
        (UNMASK | {Key.ACTIVE_NODE_ID_LIST: [1, 2, 2]}, "alive and silent at once, or twice"),
    ],
)
def test_a_stage_that_would_show_one_devices_change_is_refused(asked: dict[str, Any], refusal: str) -> None:
    if not refusal:
        assert check_stage(ConfigRecord(asked), STATE) == asked[Key.STAGE]
        return
    with pytest.raises(MaskingError, match=refusal):
        check_stage(ConfigRecord(asked), STATE)


def test_no_tales_of_who_fell_silent_show_one_change() -> None:
    """Count the words that a leader needs and can have, for every number of devices."""
    for devices in range(3, 200):
        needed = safe_threshold(devices)
        others_to_reveal, honest_words_for_each = needed - 2, needed - 1
        assert others_to_reveal * honest_words_for_each > (devices - 1) * (devices - needed)
        assert 2 * honest_words_for_each > devices - 1, "both shares of one device"
    assert [safe_threshold(devices) for devices in (3, 4, 5, 7, 10, 20)] == [3, 4, 4, 6, 7, 14]


@pytest.mark.parametrize(
    ("numbers", "power"),
    [
        ([1.0], 0),
        ([-1.0, 0.25], 0),
        ([1.5], 1),
        ([0.5], -1),
        ([3e-5], -15),
        ([0.0, 0.0], MIN_EXPONENT),
        ([], MIN_EXPONENT),
    ],
)
def test_an_exponent_is_the_least_that_holds_a_tensor(numbers: list[float], power: int) -> None:
    array = np.array(numbers, np.float32)
    assert exponent(array) == power
    assert np.abs(np.ldexp(array.astype(np.float64), -power)).max(initial=0.0) <= 1.0


def test_a_change_is_kept_for_the_weights_it_is_of_and_comes_back_to_the_bit() -> None:
    context = Context(1, 2, {}, RecordDict(), {})
    start: Arrays = {"w": np.array([1.0, 2.0], np.float32)}
    trained: Arrays = {"w": np.array([1.0 + 1e-4, 2.0 - 3e-5], np.float32)}
    powers = keep_change(context, start, trained, 7, 0.5)
    change, samples, loss = kept_change(context, start.values())
    assert (samples, loss) == (7, 0.5) and np.array_equal(
        np.add(start["w"].astype(np.float64), change["w"]), trained["w"]
    )
    (share,) = scaled(change, b"[%d]" % powers[0])
    assert np.array_equal(np.ldexp(share, powers[0]), change["w"])
    with pytest.raises(MaskingError, match="times the range of this round"):
        scaled(change, b"[%d]" % (powers[0] - 1))
    with pytest.raises(MaskingError, match="0 ranges arrived for 1 tensors"):
        scaled(change, b"[]")
    with pytest.raises(MaskingError, match="cannot be read"):
        scaled(change, b"no ranges")
    with pytest.raises(MaskingError, match="no change of these weights was measured"):
        kept_change(context, trained.values())
    for wrong in (np.nan, np.inf):
        with pytest.raises(MaskingError, match="its training gave w numbers that are not finite"):
            keep_change(context, start, {"w": np.array([1.0, wrong], np.float32)}, 7, 0.5)
