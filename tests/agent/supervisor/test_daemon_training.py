"""The daemon with the real training worker: interrupted and killed, it ends with the weights of plain training."""

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from port_agent.cli import main
from port_agent.control.client import ControlClient
from port_agent.jobs.job import JobState
from port_agent.supervisor.job.worker_kinds import DEFAULT_KINDS
from tests.agent.live_daemon import CONFIG, go, running, start_agent
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
STEPS = 400


def make_bundle(directory: Path) -> Path:
    """Return a bundle of a two-layer classifier, planned on this machine."""
    bundle = directory / "tiny.port"
    words = ["plan", str(ROOT / "tests/systemd/tiny_job.py"), "--ram", "450M", "--strategy", "greedy"]
    command = [sys.executable, "-m", "port_agent.cli", *words, "--page-dir", str(directory), "-o", str(bundle)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return bundle


def digest(path: Path) -> str:
    """Return a file's checksum."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wait_for(client: ControlClient, test: Any) -> dict[str, Any]:
    """Return the job once it passes a test."""

    def job() -> dict[str, Any] | None:
        found = dict(client.get("/v1/jobs/tiny"))
        return found if test(found) else None

    return until(job, lambda: client.get("/v1/jobs/tiny"))


@pytest.mark.long
def test_interrupted_training_gives_the_weights_of_plain_training(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    plain = tmp_path / "plain.safetensors"
    words = ["--state-dir", str(tmp_path / "plain"), "--steps", str(STEPS), "--out", str(plain)]
    command = [sys.executable, "-m", "port_agent.training.worker", "--bundle", str(bundle), *words]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    (tmp_path / "config.toml").write_text(CONFIG)
    places = ["--state-dir", str(tmp_path / "s"), "--runtime-dir", str(tmp_path / "r")]
    words = ["run", *places, "--config", str(tmp_path / "config.toml"), "--sysfs-root", str(tmp_path / "sys")]
    daemon = start_agent(tmp_path, "port_agent.cli", *words)
    try:
        client = ControlClient(tmp_path / "r")
        assert main(["submit", str(bundle), "--steps", str(STEPS), "--runtime-dir", str(tmp_path / "r")]) == 0
        wait_for(client, lambda job: job["step"] >= 60)
        client.post("/v1/jobs/tiny/pause")
        wait_for(client, lambda job: client.get("/v1/status")["job"] is None)
        client.post("/v1/jobs/tiny/resume")
        wait_for(client, lambda job: job["state"] == "running" and job["step"] >= 140)
        os.kill(client.get("/v1/status")["job"]["pid"], signal.SIGKILL)
        wait_for(client, lambda job: job["state"] == "backoff")
        client.post("/v1/jobs/tiny/resume")
        job = wait_for(client, lambda job: job["state"] == "finished")
        assert job["attempts"] == 3
        client.download("/v1/jobs/tiny/result", tmp_path / "daemon.safetensors")
    finally:
        daemon.terminate()
        daemon.wait(PATIENCE_S)
    assert digest(tmp_path / "daemon.safetensors") == digest(plain)


def make_arrival(path: Path, rows: int, seed: int) -> None:
    """Write samples of the tiny job's shape, as a sensor's program would."""
    numbers = np.random.default_rng(seed)
    points = numbers.standard_normal((rows, 16)).astype(np.float32)
    np.savez(path, points, points[:, :4].argmax(1))


def train_on(bundle: Path, state: Path, data: Path, number: int) -> Path:
    """Return the weights of an undisturbed worker that trains one round on a directory."""
    out = state / f"round-{number}.safetensors"
    words = ["--state-dir", str(state), "--data", str(data), "--round", str(number), "--epochs", "2", "--out", str(out)]
    command = [sys.executable, "-m", "port_agent.training.worker", "--bundle", str(bundle), *words]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    return out


@pytest.mark.long
@go
async def test_arriving_data_is_trained_on_in_rounds_that_survive_a_kill(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    async with running(tmp_path, kinds=DEFAULT_KINDS) as live:
        words = ["submit", str(bundle), "--inbox", "--epochs", "2", "--checkpoint-every", "20", "--runtime-dir"]
        assert await live.ask(main, [*words, str(live.settings.runtime_dir)]) == 0
        inbox = live.settings.state_dir / "inbox/tiny"
        make_arrival(inbox / "monday.npz", 64, seed=1)
        await live.until(lambda: live.job(1).rounds == 1, "first round")
        assert live.job(1).total_steps == 8
        assert live.job(1).state is JobState.WAITING_DATA
        make_arrival(inbox / "tuesday.npz", 3200, seed=2)
        await live.until(lambda: live.job(1).rounds == 1 and 100 <= live.job(1).step < 350, "in the second round")
        os.kill(live.context.runners.host.pid, signal.SIGKILL)
        await live.until_state(1, JobState.BACKOFF)
        await live.ask(live.client.post, "/v1/jobs/1/resume")  # do not wait 30 s
        await live.until(lambda: live.job(1).rounds == 2, "second round")
        assert live.job(1).total_steps == 400
        result = digest(Path(str(live.job(1).result)))
        (inbox / "broken.npz").write_bytes(b"PK\x03\x04 not really")
        failed = await live.until_state(1, JobState.FAILED)
        assert "broken.npz" in failed.reason and "copy it again" in failed.reason
        make_arrival(inbox / "broken.npz", 64, seed=3)
        await live.ask(live.client.post, "/v1/jobs/1/resume")
        await live.until(lambda: live.job(1).rounds == 3, "third round")
    for number, name, rows in ((1, "monday", 64), (2, "tuesday", 3200)):
        (tmp_path / name).mkdir()
        make_arrival(tmp_path / name / f"{name}.npz", rows, seed=number)
        plain = train_on(bundle, tmp_path, tmp_path / name, number)
    assert digest(plain) == result
