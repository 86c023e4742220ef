"""What a device does with a message: trains first, refuses what is not of its job, keeps what was averaged."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.differential_privacy import KEY_CLIPPING_NORM
from flwr.supercore.task_identity import TaskIdentity

from port_agent.federate.client import answer_message, main
from port_agent.federate.orders import (
    ARRAYS,
    CONFIG,
    MEASURED,
    MESSAGE_FILE,
    MODEL_FILE,
    NOISE,
    REPLY_FILE,
    START_FILE,
    ClientEnded,
    ClientOrder,
)
from port_agent.federate.tensors import federated_tensors
from port_agent.federate.wire import array_record, message_bytes, read_message
from port_agent.jobs.job import FederationTerms
from tests.agent.federate.jobs import gestures_bundle
from tests.agent.federate.supervisor import client_order


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gestures_bundle(tmp_path_factory.mktemp("bundle"), 0)


def put(
    folder: Path, bundle: Path, kind: str, shift: float = 0.0, drop: str = "", config: Mapping[str, float] | None = None
) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 3
    arrays = {
        name: np.add(array, np.float32(shift))
        for name, array in federated_tensors(bundle).initial().items()
        if name != drop
    }
    records = RecordDict({ARRAYS: array_record(arrays), CONFIG: ConfigRecord({**(config or {})})})
    (folder / MESSAGE_FILE).write_bytes(message_bytes(Message(records, 5, kind)))


def order(folder: Path, bundle: Path, terms: FederationTerms | None = None) -> ClientOrder:
    return client_order(folder, bundle, terms or FederationTerms(), folder)


@pytest.mark.slow
def test_training_comes_before_the_reply(tmp_path: Path, bundle: Path) -> None:
    put(tmp_path, bundle, "train", shift=0.5)
    assert answer_message(order(tmp_path, bundle)).trains_first and not (tmp_path / REPLY_FILE).exists()
    begun, initial = federated_tensors(bundle).read(tmp_path / START_FILE), federated_tensors(bundle).initial()
    assert all(np.array_equal(begun[name], np.add(initial[name], np.float32(0.5))) for name in initial)


@pytest.mark.parametrize("kind", ["train.default", "evaluate.default", "train.other", "query"])
def test_no_other_name_of_a_message_passes_the_owners_terms_by(tmp_path: Path, bundle: Path, kind: str) -> None:
    """To Flower's client app, train.default is the same as train."""
    put(tmp_path, bundle, kind)
    ended = answer_message(order(tmp_path, bundle, FederationTerms(require_secure=True)))
    assert ended == ClientEnded(refused=f"a leader sends no messages of type '{kind}'")
    assert not (tmp_path / START_FILE).exists() and not (tmp_path / MODEL_FILE).exists()


@pytest.mark.parametrize(
    ("terms", "config"),
    [
        (FederationTerms(require_secure=True), {}),
        (FederationTerms(require_clip=1.0), {}),
        (FederationTerms(require_clip=1.0), {KEY_CLIPPING_NORM: 2.0}),
        (FederationTerms(require_clip=1.0), {KEY_CLIPPING_NORM: 1.0, MEASURED: True}),
    ],
)
def test_a_message_that_its_owner_does_not_allow_is_not_trained(
    tmp_path: Path, bundle: Path, terms: FederationTerms, config: dict[str, float]
) -> None:
    put(tmp_path, bundle, "train", config=config)
    ended = answer_message(order(tmp_path, bundle, terms))
    assert "its owner" in ended.refused and not (tmp_path / START_FILE).exists()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({KEY_CLIPPING_NORM: float("nan"), NOISE: 1.0}, "its clipping norm is nan, not a finite number above 0"),
        ({KEY_CLIPPING_NORM: float("inf"), NOISE: 1.0}, "its clipping norm is inf, not a finite number above 0"),
        ({KEY_CLIPPING_NORM: -1.0, NOISE: 1.0}, "its clipping norm is -1.0, not a finite number above 0"),
        ({KEY_CLIPPING_NORM: 1, NOISE: 1.0}, "its clipping norm is 1, not a finite number above 0"),
        ({KEY_CLIPPING_NORM: 1.0, NOISE: 1e200}, "its noise is 1e+200 times the norm"),
    ],
)
@pytest.mark.parametrize("terms", [FederationTerms(), FederationTerms(require_clip=2.0)])
def test_clipping_and_noise_that_protect_nothing_are_refused_and_count_as_no_privacy(
    tmp_path: Path, bundle: Path, terms: FederationTerms, config: dict[str, float], reason: str
) -> None:
    put(tmp_path, bundle, "train", config=config)
    assert reason in answer_message(order(tmp_path, bundle, terms)).refused
    assert not (tmp_path / START_FILE).exists()


def test_tensors_of_another_job_are_refused_by_name(tmp_path: Path, bundle: Path) -> None:
    put(tmp_path, bundle, "train", drop="head.bias")
    reason = "it has 5 tensors, not the 6 of this job"
    assert answer_message(order(tmp_path, bundle)) == ClientEnded(refused=reason)
    assert reason in str(read_message((tmp_path / REPLY_FILE).read_bytes()).error.reason)
    assert not (tmp_path / START_FILE).exists()


def test_what_was_averaged_is_kept(tmp_path: Path, bundle: Path) -> None:
    put(tmp_path, bundle, "evaluate", shift=2.0)
    assert answer_message(order(tmp_path, bundle)) == ClientEnded()
    kept, initial = federated_tensors(bundle).read(tmp_path / MODEL_FILE), federated_tensors(bundle).initial()
    assert all(np.array_equal(kept[name], np.add(initial[name], np.float32(2.0))) for name in initial)


def test_a_message_that_is_none_is_told(tmp_path: Path, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / MESSAGE_FILE).write_bytes(b"\xff" * 20)
    assert main([msgspec.json.encode(order(tmp_path, bundle)).decode()]) == 1
    assert "not a Flower message (20 bytes)" in capsys.readouterr().err
