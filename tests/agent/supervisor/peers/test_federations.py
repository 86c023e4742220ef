"""A federation of real agents with real workers."""

import asyncio
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from port_agent.control.client import ControlError
from port_agent.federate.orders import LEADER_FOLDER, FederationSettings, TensorsOf
from port_agent.federate.tensors import federated_tensors
from port_agent.jobs.job import Job, JobKind, JobSpec
from port_agent.jobs.store import JobStore
from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient
from port_agent.peers.federation_requests import Request, TaskAnswer, TaskState, node_number
from port_agent.peers.identity.keys import own_identity
from port_agent.supervisor.peers import federations
from port_agent.supervisor.peers.federations import FederationRun, Federations, RoundRecord
from port_agent.system.clock import SystemClock
from port_planner.ir.bundle.bundle import read_manifest
from tests.agent.federate.agents import JOB, local_devices
from tests.agent.federate.jobs import adapter_file, alike_bundle, averaged_by_hand, gestures_bundle, needs_flower
from tests.agent.live_daemon import ROOT
from tests.agent.live_daemon import until as eventually
from tests.waiting import until

pytestmark = pytest.mark.process


@needs_flower
def test_two_devices_average_what_they_trained_and_both_have_it(tmp_path: Path) -> None:
    bundles = [gestures_bundle(tmp_path, part) for part in (0, 1)]
    with local_devices(tmp_path, "attic", "cellar") as devices:
        attic = devices[0]
        for device, bundle in zip(devices, bundles, strict=True):
            device.submit(bundle, epochs=1)
        attic.lead(rounds=1, timeout_s=60.0)
        until(lambda: attic.federation()["state"] == "finished", attic.federation)
        (record,) = attic.federation()["history"]
        assert record["devices"] == 2 and record["lost"] == {} and record["loss"] > 0.0
        assert sorted(record["names"]) == ["cellar", "this device"]
        tensors = federated_tensors(bundles[0])
        averaged = tensors.read(Path(attic.federation()["weights"]))
        for device in devices:
            (member,) = device.client.get("/v1/federations")["memberships"]
            assert (member["round"], member["waits"]) == (None, "for its leader to begin a round")
            device.client.download(f"/v1/jobs/{JOB}/result", device.root / "out.safetensors")
            lines = tensors.read(device.root / "out.safetensors")
            assert all((averaged[name] == lines[name]).all() for name in averaged)
    alone = [tensors.read(trained_alone(bundle)) for bundle in bundles]
    samples = [read_manifest(bundle).samples for bundle in bundles]
    for name, array in averaged.items():
        expected = sum(np.multiply(one[name], count / sum(samples)) for one, count in zip(alone, samples, strict=True))
        assert np.allclose(array, expected, rtol=1e-5, atol=1e-7), name


@needs_flower
@pytest.mark.slow
def test_a_proximal_term_holds_each_round_near_its_own_beginning(tmp_path: Path) -> None:
    mu, epochs, term = 4.0, 6, {"strategy": "fedprox", "proximal_mu": 4.0}
    with local_devices(tmp_path, "attic", "cellar") as devices:
        attic = devices[0]
        for part, device in enumerate(devices):
            device.submit(alike_bundle(tmp_path, part, mu), epochs=epochs)
        for server in ({}, {**term, "proximal_mu": 0.5}):
            with pytest.raises(
                ControlError, match=r"trains with a proximal term of 4, .*--strategy fedprox --proximal-mu 4"
            ):
                attic.lead(rounds=2, server=server)
        attic.lead(rounds=2, timeout_s=600.0, min_share=1.0, server=term)
        until(lambda: attic.federation()["state"] == "finished", attic.federation, patience_s=600.0)
        assert attic.federation()["done"] == 2
        found = federated_tensors(tmp_path / "alike0.port").read(Path(attic.federation()["weights"]))
        nodes = [node_number(str(own_identity(device.root / "state").id)) for device in devices]
    by_hand = averaged_by_hand(2, sorted(range(2), key=nodes.__getitem__), epochs, mu)
    assert found.keys() == by_hand.keys()
    assert all(np.array_equal(found[name], by_hand[name]) for name in by_hand)


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        (TaskAnswer(state=TaskState.DONE, size=1 << 31), r"its reply has 2147483648 bytes; at most \d+ are accepted"),
        (TaskAnswer(state=TaskState.DONE, size=10), "its reply is incomplete"),
        (TaskAnswer(state=TaskState.DONE, size=2, data=b"ab", sha256="0" * 64), "the hash of its reply does not match"),
    ],
)
def test_a_huge_reply_and_one_without_an_end_are_not_taken(tmp_path: Path, answer: TaskAnswer, refusal: str) -> None:
    with pytest.raises(federations._LostError, match=refusal):
        federations._take_reply(tmp_path / "reply", answer, 1000)
    assert not (tmp_path / "reply").exists() or not (tmp_path / "reply").stat().st_size


def test_a_device_that_takes_nothing_is_not_sent_it_at_full_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says again and again that it has the first byte; then, that it has it all and its part is done."""
    (tmp_path / "message").write_bytes(b"message")
    rests = list[float]()

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    async def ask(member: object, request: Request) -> TaskAnswer:
        if len(rests) < 20:
            return TaskAnswer(state=TaskState.RECEIVING, size=1)
        return TaskAnswer(state=TaskState.DONE, size=2, data=b"ab")

    monkeypatch.setattr(asyncio, "sleep", rest)
    order = cast(Any, SimpleNamespace(number=1, timeout_s=60.0))
    post = federations._Outbox(JOB, "ab" * 16, "cd" * 32, order, tmp_path, {}, ask)
    cellar = federations._Member(5, "cellar", "C")
    asyncio.run(post._exchange(cellar, tmp_path / "message", "ef" * 32, tmp_path / "reply"))
    assert (tmp_path / "reply").read_bytes() == b"ab" and len(rests) >= 20


def test_what_a_round_waits_for_is_told_of_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "message").write_bytes(b"message")
    answers: list[TaskAnswer | NotAnsweredError] = [
        NotAnsweredError("cellar: it is not connected"),
        TaskAnswer(state=TaskState.RECEIVING, size=6),
        TaskAnswer(state=TaskState.WORKING),
        TaskAnswer(state=TaskState.WORKING, reason="not charging"),
        TaskAnswer(state=TaskState.WORKING),
        TaskAnswer(state=TaskState.DONE, size=2, data=b"ab"),
    ]
    told = list[dict[str, str]]()

    async def rest(seconds: float) -> None:
        pass

    async def ask(member: object, request: Request) -> TaskAnswer:
        told.append(dict(post.awaited))
        if isinstance(answer := answers.pop(0), NotAnsweredError):
            raise answer
        return answer

    monkeypatch.setattr(asyncio, "sleep", rest)
    order = cast(Any, SimpleNamespace(number=1, timeout_s=60.0))
    post = federations._Outbox(JOB, "ab" * 16, "cd" * 32, order, tmp_path, {}, ask)
    asyncio.run(post._deliver(federations._Member(5, "cellar", "C"), tmp_path / "message", "ef" * 32))
    assert [one.get("cellar") for one in told] == [
        None,
        "not reached: it is not connected",
        "receives the weights",
        "receives the weights",
        "not charging",
        "works on it",
    ] and post.awaited == {}


class Alone:
    """A fleet without others, and jobs that would train."""

    async def own_id(self) -> str:
        return "own"

    def rows(self) -> list[dict[str, object]]:
        return []

    async def tensors_of(self, job: Job) -> TensorsOf:
        return TensorsOf("ab" * 32, 8, "cd" * 32, 9)

    async def respond(self, leader: PeerClient, request: Request) -> TaskAnswer:
        return TaskAnswer(state=TaskState.READY)


def submit(folder: Path) -> None:
    adapter_file(folder / "bundle.port")


@needs_flower
def test_stopped_in_a_round_it_ends_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(federations, "ROUND_MODULE", "tests.agent.supervisor.peers.sleeping_solver")

    async def work() -> None:
        store, audits, alone = JobStore(tmp_path), list[str](), Alone()
        spec = JobSpec(JOB, "bundle.port", kind=JobKind.FINETUNE, federated=True)
        store.add(spec, 0.0, submit)
        led = Federations(store, SystemClock(), cast(Any, alone), cast(Any, alone), audits.append)
        led.start(JOB, FederationSettings(rounds=3, min_devices=1))
        await eventually(lambda: bool(led.describe(JOB)["training"]))
        (line,) = led.overview()
        assert (line["done"], line["rounds"], line["training"]) == (0, 3, ["this device"])
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        stopped = await led.stop_leading(JOB)
        gc.collect()
        assert led.overview() == []
        assert (stopped["state"], stopped["done"], led._led, faults) == ("stopped", 0, {}, [])
        assert audits[-1] == "the federation of job 1 (gestures) was stopped after 0 rounds"
        store.close()

    asyncio.run(work())


def test_who_took_part_and_has_not_received_the_average_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result of an earlier federation would look like this one's there."""

    async def handed_out(led: Federations, job: Job, run: FederationRun, members: object, *, final: bool) -> object:
        assert final
        return RoundRecord(number=2, at=0.0, seconds=1.0, devices=1, names=("this device",)), False

    async def work() -> None:
        store, audits, alone = JobStore(tmp_path), list[str](), Alone()
        spec = JobSpec(JOB, "bundle.port", kind=JobKind.FINETUNE, federated=True)
        job = store.add(spec, 0.0, submit)
        led = Federations(store, SystemClock(), cast(Any, alone), cast(Any, alone), audits.append)
        (store.job_dir(job.id) / LEADER_FOLDER).mkdir()
        averaged = RoundRecord(number=1, at=0.0, seconds=1.0, devices=2, names=("this device", "shed"))
        led._note(job, FederationRun(run="ab" * 16, settings=FederationSettings(rounds=1), done=1, history=(averaged,)))
        led.go_on()
        await eventually(lambda: led.describe(JOB)["state"] == "finished")
        assert led.describe(JOB)["without"] == ("shed",)
        assert audits[-1].endswith("is finished: 1 rounds; shed did not receive the average")
        store.close()

    monkeypatch.setattr(Federations, "_round", handed_out)
    asyncio.run(work())


@needs_flower
@pytest.mark.long
def test_three_devices_average_secretly_then_with_noise_and_one_has_its_job_paused(tmp_path: Path) -> None:
    bundles = [gestures_bundle(tmp_path, part) for part in range(3)]
    with local_devices(tmp_path, "attic", "cellar", "shed") as devices:
        attic, cellar, _ = devices
        for device, bundle in zip(devices, bundles, strict=True):
            device.submit(bundle, epochs=1)
        attic.lead(rounds=1, min_devices=3, secure=True, timeout_s=120.0)
        until(lambda: attic.federation()["state"] == "finished", attic.federation)
        tensors = federated_tensors(bundles[0])
        averaged = tensors.read(Path(attic.federation()["weights"]))
        alone = [tensors.read(trained_alone(bundle)) for bundle in bundles]
        samples = [read_manifest(bundle).samples for bundle in bundles]
        for name, array in averaged.items():
            expected = sum(
                np.multiply(one[name], count / sum(samples)) for one, count in zip(alone, samples, strict=True)
            )
            assert np.allclose(array, expected, atol=5e-3), name
        cellar.client.post(f"/v1/jobs/{JOB}/pause")
        attic.lead(rounds=1, min_devices=2, clip=1.0, noise=0.01, timeout_s=120.0)
        until(lambda: attic.federation()["state"] == "finished", attic.federation)
        (record,) = attic.federation()["history"]
        assert record["devices"] == 2, record
        attic.lead(rounds=1, min_devices=3)
        until(
            lambda: "2 of 3 devices are ready; cellar: its job is paused" in attic.federation()["waits"],
            attic.federation,
        )


def trained_alone(bundle: Path) -> Path:
    """Return what one epoch makes of the bundle's own weights, without any agent."""
    out = bundle.with_suffix(".safetensors")
    words = ["--state-dir", str(bundle.with_suffix(".state")), "--epochs", "1", "--out", str(out)]
    command = [sys.executable, "-m", "port_agent.training.worker", "--bundle", str(bundle), *words]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    return out
