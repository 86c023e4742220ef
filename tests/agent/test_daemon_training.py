"""The daemon with the real training worker: interrupted and killed, it ends with the weights of plain training."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from agent.cli import main
from agent.control_client import ControlClient
from tests.agent.test_daemon import CONFIG

ROOT = Path(__file__).resolve().parents[2]
STEPS = 400


def make_bundle(directory: Path) -> Path:
    """Return a bundle of a two-layer classifier, planned on this machine."""
    bundle = directory / "tiny.port"
    words = ["plan", str(ROOT / "tests/systemd/tiny_job.py"), "--ram", "450M", "--strategy", "greedy"]
    command = [sys.executable, "-m", "agent.cli", *words, "--page-dir", str(directory), "-o", str(bundle)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return bundle


def wait_for(client: ControlClient, test: Any) -> dict[str, Any]:
    """Return the job once it passes a test."""
    end = time.monotonic() + 120.0
    while not test(job := client.get("/v1/jobs/tiny")):
        assert time.monotonic() < end, job
        time.sleep(0.02)
    return dict(job)


@pytest.mark.long
def test_interrupted_training_gives_the_weights_of_plain_training(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    plain = tmp_path / "plain.safetensors"
    words = ["--state-dir", str(tmp_path / "plain"), "--steps", str(STEPS), "--out", str(plain)]
    command = [sys.executable, "-m", "agent.train.worker", "--bundle", str(bundle), *words]
    assert subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode == 0
    (tmp_path / "config.toml").write_text(CONFIG)
    places = ["--state-dir", str(tmp_path / "s"), "--runtime-dir", str(tmp_path / "r")]
    words = ["run", *places, "--config", str(tmp_path / "config.toml"), "--sysfs-root", str(tmp_path)]
    daemon = subprocess.Popen([sys.executable, "-m", "agent.cli", *words], cwd=ROOT)
    try:
        client = ControlClient(tmp_path / "r")
        while not client.path.exists():
            assert daemon.poll() is None
            time.sleep(0.01)
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
        daemon.wait(30.0)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (plain, tmp_path / "daemon.safetensors")]
    assert digests[0] == digests[1]
