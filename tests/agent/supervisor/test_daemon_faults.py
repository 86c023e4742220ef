"""What happens to the supervisor when its storage fails: a broken database, a full disk, a read-only directory."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from port_agent.control.client import ControlError
from port_agent.jobs.job import JobSpec, JobState
from port_agent.jobs.store import JobStore
from port_agent.supervisor.pause import BY_USER, LOST
from tests.agent.live_daemon import BUNDLE, LONG, go, running
from tests.agent.worker_program import undisturbed_weights

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]


@go
async def test_a_corrupt_database_costs_no_job(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        done = await live.submit(BUNDLE, "done")
        await live.until_state(done, JobState.FINISHED)
        await live.ask(live.client.post, "/v1/pause")
        held = await live.submit(BUNDLE, "held")
    database = tmp_path / "state/jobs.db"
    database.write_bytes(b"garbage" * 5000)
    async with running(tmp_path) as live:
        assert live.job(done).state is JobState.FINISHED
        assert "database" in live.health_codes()
        await live.until(lambda: live.daemon.context.admission.decision is not None)
        assert live.job(held).state is JobState.QUEUED
        status = await live.ask(live.client.get, "/v1/status")
        assert status["codes"] == ["user"] and BY_USER in status["conditions"][0], "the pause outlived the database"
        await live.ask(live.client.post, "/v1/resume")
        await live.until_state(held, JobState.FINISHED)
        status = await live.ask(live.client.get, "/v1/status")
        (item,) = [item for item in status["health"] if item["code"] == "database"]
        assert "jobs.db.corrupt-" in item["text"] and "SD cards" in item["remedy"]


@pytest.mark.parametrize("damage", [lambda database: database.write_bytes(b"garbage" * 5000), Path.unlink])
def test_a_lost_database_begins_paused_and_says_so(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    asyncio.run(_lose_the_database(tmp_path, damage))


async def _lose_the_database(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    async with running(tmp_path) as live:
        await live.until_state(await live.submit(BUNDLE, "done"), JobState.FINISHED)
    damage(tmp_path / "state/jobs.db")
    async with running(tmp_path) as live:
        await live.until(lambda: live.daemon.context.admission.decision is not None)
        status = await live.ask(live.client.get, "/v1/status")
        assert status["codes"] == ["user"] and LOST in status["conditions"][0]
        await live.ask(live.client.post, "/v1/resume")
        await live.until_state(await live.submit(BUNDLE, "next"), JobState.FINISHED)


@go
async def test_jobs_that_cannot_be_restored_keep_nobody_from_starting(tmp_path: Path) -> None:
    """Jobs as an agent without checks stored them: an impossible deadline, and endless steps."""
    store = JobStore(tmp_path / "state")
    for name, change in (("far", {"deadline_at": 8.64e12}), ("long", {"steps": 10**400})):
        store.save(replace(job := store.add(JobSpec(name, "b.json"), 1.0), spec=replace(job.spec, **change)))
    store.close()
    async with running(tmp_path) as live:
        done = await live.submit(BUNDLE, "done")
        await live.until_state(done, JobState.FINISHED)
        status = await live.ask(live.client.get, "/v1/status")
        told = [item["text"] for item in status["health"] if item["code"] == "job-set-aside"]
        assert len(told) == 2 and "1970 and 2100" in told[0] and "2^53" in told[1]
        jobs = await live.ask(live.client.get, "/v1/jobs")
        assert [(job["id"], job["state"]) for job in jobs["jobs"]] == [
            (3, "finished"),
            (1, "set aside"),
            (2, "set aside"),
        ]
        await live.ask(live.client.post, "/v1/jobs/1/cancel")
    async with running(tmp_path) as live:
        assert list(live.context.store.set_aside) == [2]


@go
async def test_what_no_agent_could_restore_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as live:
        for fields in ({"deadline_at": 8.64e12}, {"deadline_at": -1}, {"steps": 2**60}, {"data": "/tmp\0/x"}):
            with pytest.raises(ControlError) as caught:
                await live.submit(BUNDLE, "job", **fields)
            assert caught.value.status in range(400, 500)
        number = await live.submit(LONG)
        with pytest.raises(ControlError, match="1970 and 2100"):
            await live.ask(live.client.post, f"/v1/jobs/{number}/change", deadline_at=8.64e12)


def fill(path: Path) -> None:
    """Write until nothing fits any more."""
    with path.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(4096))
        except OSError:
            return


def remove(path: Path) -> None:
    """Make room again."""
    path.unlink()


async def fill_the_disk(root: Path) -> None:
    """Run on a file system of a few MB: nothing is trained while it is full, and everything goes on afterwards."""
    async with running(root) as live:
        number = await live.submit(LONG)
        await live.until_step(number, 3)
        fill(root / "filler")
        with pytest.raises(ControlError, match="cannot be written"):
            await live.ask(live.client.post, "/v1/jobs/job/change", priority=1)
        await live.until(
            lambda: live.context.runners.host.job is None and "state-unwritable" in live.health_codes(), "stopped"
        )
        with pytest.raises(ControlError) as caught:
            await live.ask(live.client.upload, "/v1/uploads", Path(__file__))
        assert caught.value.status == 507
        remove(root / "filler")
        live.daemon.retry_storage()
        await live.until(lambda: "state-unwritable" not in live.health_codes(), "writable again")
        assert live.job(number).spec.priority == 1
        await live.ask(live.client.post, f"/v1/jobs/{number}/resume")
        await live.until(lambda: live.context.runners.host.job is not None, "training again")


def remount(path: Path, how: str) -> None:
    """Make a file system read-only ("ro"; "abort": an error did, under open files) or writable ("rw")."""
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


def repair(image: Path, path: Path) -> None:
    """Take a file system that an error made read-only off its place, check it, and mount it again."""
    subprocess.run(["umount", str(path)], check=True)
    subprocess.run(["fsck.ext4", "-p", str(image)], check=False, stdout=subprocess.DEVNULL)
    subprocess.run(["mount", "-o", "loop", str(image), str(path)], check=True)


async def start_read_only(root: Path) -> None:
    """Start on a read-only state directory: jobs are shown, nothing is accepted or trained, until it is writable."""
    async with running(root) as live:
        await live.ask(live.client.post, "/v1/pause")
        number = await live.submit(BUNDLE)
    remount(root / "state", "ro")
    async with running(root) as live:
        await live.until(lambda: "state-unwritable" in live.health_codes(), "shown")
        assert live.job(number).state is JobState.QUEUED
        assert live.context.runners.host.job is None
        remount(root / "state", "rw")
        live.daemon.retry_storage()
        await live.until(lambda: "state-unwritable" not in live.health_codes(), "writable again")
        await live.ask(live.client.post, "/v1/resume")
        await live.until_state(number, JobState.FINISHED)


async def become_read_only(root: Path) -> None:
    """The kernel makes the file system read-only under a job that trains, as on an error of its medium.

    Nothing is lost that was acknowledged, and after a repair the job ends with the weights of an undisturbed one.
    """
    job = {**BUNDLE, "steps": 500}
    state = root / "state"
    async with running(root) as live:
        number = await live.submit(job)
        await live.until_step(number, 30)
        held = await live.submit(BUNDLE, "held")
        await live.ask(live.client.post, "/v1/jobs/held/pause")
        remount(state, "abort")
        await live.until(
            lambda: live.context.runners.host.job is None and "state-unwritable" in live.health_codes(), "stopped"
        )
        with pytest.raises(ControlError, match="cannot be written"):
            await live.ask(live.client.post, "/v1/jobs/held/cancel")
        with pytest.raises(ControlError):
            await live.ask(live.client.upload, "/v1/uploads", Path(__file__))
        assert (await live.ask(live.client.get, "/v1/status"))["health"]
    repair(root / _IMAGE, state)
    async with running(root) as live:
        assert live.job(held).state is JobState.PAUSED
        assert live.job(number).step >= 30
        await live.ask(live.client.post, f"/v1/jobs/{number}/resume")
        await live.until_state(number, JobState.FINISHED)
        await live.ask(live.client.download, f"/v1/jobs/{number}/result", root / "out")
        assert json.loads((root / "out").read_text())["weights"] == undisturbed_weights(job)


_IMAGE = "image"
_SMALL = "mount -t tmpfs -o size=4M none {place}"
_ON_A_MEDIUM = "truncate -s 32M {image} && mkfs.ext4 -q {image} && mount -o loop,errors=remount-ro {image} {place}"


@pytest.mark.root
@pytest.mark.parametrize(
    ("scenario", "place", "mount"),
    [
        pytest.param("fill_the_disk", "", _SMALL, id="full"),
        pytest.param("start_read_only", "state", _SMALL, id="read-only at the start"),
        pytest.param("become_read_only", "state", _ON_A_MEDIUM, id="read-only at once", marks=pytest.mark.long),
    ],
)
def test_storage_that_takes_nothing(tmp_path: Path, scenario: str, place: str, mount: str) -> None:
    """On a real small file system, in a mount namespace of its own."""
    if os.geteuid() != 0 or sys.platform != "linux":
        pytest.skip("needs root on Linux for a mount namespace")
    (tmp_path / place).mkdir(exist_ok=True)
    mounted = mount.format(place=tmp_path / place, image=tmp_path / _IMAGE)
    if mount is _ON_A_MEDIUM and subprocess.run(["unshare", "--mount", "sh", "-c", mounted], check=False).returncode:
        pytest.skip("needs mkfs.ext4, and loop devices that can be mounted")
    shell = f"{mounted} && exec {sys.executable} -m {__name__} {scenario} {tmp_path}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


if __name__ == "__main__":
    asyncio.run(globals()[sys.argv[1]](Path(sys.argv[2])))
