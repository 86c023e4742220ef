"""Jobs that move between real agents: there and back, refused, recalled, cut at any instant, with
the same weights as at home.
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.control.client import ControlError
from port_agent.jobs.job import Away, AwayPhase, JobSpec, JobState, Migratable
from port_agent.peers.migration_requests import MigrationAnswer, MigrationState
from port_agent.supervisor.migrations import Migrations
from tests.agent.federate.jobs import gestures_bundle
from tests.agent.live_daemon import BUNDLE, ROOT, go
from tests.agent.supervisor.migration.agents import TAKES, Mover, TorchMover, at_home, offer_all, settled, two_movers
from tests.agent.supervisor.parts import parts
from tests.waiting import until, wait_until_drawn_moment

SLOW = {**BUNDLE, "steps": 500}
"""Some seconds of training."""
PULLS = 6


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Mover, Mover]]:
    """Give two agents that tests use one after the other."""
    with two_movers(tmp_path_factory.mktemp("movers")) as both:
        yield both


@pytest.fixture
def movers(pair: tuple[Mover, Mover]) -> tuple[Mover, Mover]:
    """Give them as they were at first: the owner on battery, the other takes jobs, and no job goes on."""
    attic, cellar = pair
    attic.plug(online=False)
    cellar.allow(TAKES)
    cellar.client.post("/v1/reload")
    for job in attic.all():
        if job["state"] not in ("finished", "cancelled"):
            attic.client.post(f"/v1/jobs/{job['id']}/cancel")
    until(lambda: settled(attic, cellar))
    return pair


@pytest.mark.process
def test_a_job_that_cannot_run_here_is_trained_there_and_its_result_comes_back(
    tmp_path: Path, movers: tuple[Mover, Mover]
) -> None:
    expected = at_home(tmp_path, BUNDLE)
    attic, cellar = movers
    attic.give(BUNDLE)
    done = attic.until(JobState.FINISHED)
    assert attic.result() == expected
    assert done["step"] == done["total_steps"] == BUNDLE["steps"] and done["reason"] == "trained on cellar"
    assert [entry["text"] for entry in done["history"] if entry["kind"] == "moved"] == [
        "is moving to cellar",
        "is now on cellar",
        "was trained on cellar",
    ]
    until(lambda: settled(attic, cellar), attic.own)


@pytest.mark.process
def test_a_job_never_moves_unless_its_owner_and_the_other_device_s_say_so(movers: tuple[Mover, Mover]) -> None:
    attic, cellar = movers
    cellar.allow("")
    cellar.client.post("/v1/reload")
    attic.give(BUNDLE)
    attic.give(BUNDLE, "stays", movable="never")
    assert attic.own()["state"] == "queued" and cellar.all() == []
    cellar.allow(TAKES)
    cellar.client.post("/v1/reload")
    assert attic.until(JobState.FINISHED)["reason"] == "trained on cellar"
    offer_all(attic)
    assert attic.own("stays")["state"] == "queued" and not attic.own("stays")["away"]


@pytest.mark.process
def test_a_job_that_reads_files_of_the_users_stays_and_says_so_once(movers: tuple[Mover, Mover]) -> None:
    attic, _ = movers
    attic.give({**SLOW, "reads": ["/home/user/model.safetensors"]})

    def told() -> list[str]:
        return [entry["text"] for entry in attic.own()["history"]]

    why = "cannot move: it reads /home/user/model.safetensors during training, which other devices do not have"
    until(lambda: why in told(), attic.own)
    offer_all(attic)
    assert told().count(why) == 1
    assert attic.own()["state"] == "queued" and not attic.own()["away"]


@pytest.mark.process
def test_recalled_it_goes_on_here_where_it_was_there(tmp_path: Path, movers: tuple[Mover, Mover]) -> None:
    bundle = {**SLOW, "steps": 200}
    expected = at_home(tmp_path, bundle)
    attic, cellar = movers
    attic.give(bundle, checkpoint_every=5)
    until(lambda: attic.own()["on"] == "cellar" and attic.own()["step"] >= 20, attic.own)
    (guest,) = cellar.all()
    assert guest["guest_of"] == "attic" and guest["priority"] == -100
    with pytest.raises(ControlError, match=r"is on cellar; take it back with port-agent job recall \d+"):
        attic.client.post("/v1/jobs/job/resume")
    attic.client.post("/v1/jobs/job/recall")
    back = attic.until(JobState.QUEUED)
    assert 20 <= back["step"] < back["total_steps"] == 200 and back["spec"]["movable"] == "never"
    attic.plug(online=True)
    attic.until(JobState.FINISHED)
    assert attic.result() == expected
    until(lambda: settled(attic, cellar), attic.own)


@go
async def test_recalled_before_the_worker_there_told_its_total_it_keeps_the_one_that_is_known(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        store, away = made.context.store, Away("ab" * 32, "cellar", "cd" * 16, AwayPhase.THERE, recalled=True)
        queued = store.add(JobSpec("job", "bundle", movable=Migratable.SOONEST), 0.0)
        job = replace(queued, state=JobState.AWAY, step=20, total_steps=1200, away=away)
        store.save(job)
        moves = Migrations(made.context)
        moves._progress(job, MigrationAnswer(state=MigrationState.STOPPING, step=30, reason="stops"))
        assert (store.get(1).step, store.get(1).total_steps) == (30, 1200)
        await moves._take_checkpoint(job, away, MigrationAnswer(state=MigrationState.STOPPED, step=30, trained_s=2.0))
        back = store.get(1)
        assert (back.state, back.step, back.total_steps) == (JobState.QUEUED, 20, 1200), "no checkpoint came with it"
        assert back.reason == "cellar: came back" and back.trained_s == 2.0
        store.save(job)
        await moves._take_checkpoint(
            job, away, MigrationAnswer(state=MigrationState.STOPPED, step=30, total_steps=1300)
        )
        assert store.get(1).total_steps == 1300


@pytest.mark.long
def test_a_lost_device_does_not_keep_the_job_from_who_forces_it_back(tmp_path: Path) -> None:
    expected = at_home(tmp_path, SLOW)
    with two_movers(tmp_path) as (attic, cellar):
        attic.give(SLOW)
        until(lambda: attic.own()["on"] == "cellar" and attic.own()["step"] >= 5, attic.own)
        cellar.kill()
        attic.client.post("/v1/jobs/job/recall", force=True)
        attic.plug(online=True)
        attic.until(JobState.FINISHED)
        assert attic.result() == expected
        cellar.start()  # it goes on with what nobody wants, until it is told
        until(lambda: settled(attic, cellar), attic.own)


@pytest.mark.process
def test_cancelled_here_it_ends_there(movers: tuple[Mover, Mover]) -> None:
    attic, cellar = movers
    attic.give(SLOW)
    until(lambda: attic.own()["step"] >= 5, attic.own)
    attic.client.post("/v1/jobs/job/cancel")
    until(lambda: settled(attic, cellar), attic.own)
    assert attic.own()["state"] == "cancelled"


@pytest.mark.process
def test_unpaired_there_is_nothing_left_of_it_and_it_goes_on_at_home(tmp_path: Path) -> None:
    with two_movers(tmp_path) as (attic, cellar):
        attic.give({**SLOW, "steps": 2000})
        until(lambda: attic.own()["step"] >= 5, attic.own)
        attic.client.post("/v1/unpair", device="cellar")
        cellar.client.post("/v1/unpair", device="attic")
        attic.until(JobState.QUEUED)
        until(lambda: not cellar.all())


@pytest.mark.long
def test_either_side_is_cut_off_at_any_instant(tmp_path: Path) -> None:
    expected = at_home(tmp_path, SLOW)
    draw = random.Random(20)
    with two_movers(tmp_path) as (attic, cellar):
        attic.give(SLOW)
        for pull in range(PULLS):
            wait_until_drawn_moment(draw, 1.5)
            (attic if pull % 2 else cellar).restart()
        attic.plug(online=True)  # whether there or here
        attic.until(JobState.FINISHED)
        assert attic.result() == expected
        until(lambda: settled(attic, cellar), attic.own)


def submit_movable(attic: Mover, bundle: Path, epochs: int) -> None:
    """Submit it as a user does."""
    words = ["submit", str(bundle), "--name", "job", "--movable", "--epochs", str(epochs)]
    command = [sys.executable, "-m", "port_agent.cli", *words, "--runtime-dir", str(attic.root / "run")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def trained_at_home(bundle: Path, epochs: int) -> bytes:
    """Return the weights that the torch worker makes where nothing moves."""
    out = bundle.with_suffix(".safetensors")
    words = ["--bundle", str(bundle), "--state-dir", str(bundle.with_suffix(".state"))]
    words += ["--epochs", str(epochs), "--out", str(out)]
    command = [sys.executable, "-m", "port_agent.training.worker", *words]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out.read_bytes()


@pytest.mark.long
def test_the_real_worker_s_weights_are_those_of_a_run_at_home(tmp_path: Path) -> None:
    bundle, epochs = gestures_bundle(tmp_path, 0), 20
    expected = trained_at_home(bundle, epochs)
    with two_movers(tmp_path, kind=TorchMover) as (attic, cellar):
        submit_movable(attic, bundle, epochs)
        assert attic.until(JobState.FINISHED)["reason"] == "trained on cellar"
        attic.client.download("/v1/jobs/job/result", tmp_path / "fetched")
        assert (tmp_path / "fetched").read_bytes() == expected
        until(lambda: settled(attic, cellar), attic.own)
