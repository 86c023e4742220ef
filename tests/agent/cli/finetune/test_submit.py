"""`port-agent finetune --submit`: a real daemon starts, ends and goes on with a fine-tuning, to
the bits of one left alone.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from port_agent.cli import main
from port_agent.control.client import ControlClient, ControlError
from port_agent.finetuning.inputs.options import FinetuneOptions
from tests import waiting
from tests.agent.finetuning.left_alone import WEIGHTS, adapter_left_alone
from tests.agent.finetuning.tiny_model import make_data, make_model
from tests.agent.live_daemon import CONFIG, start_agent
from tests.agent.trees import LAPTOP_BATTERY, MAINS, supply_tree

PATIENCE_S = 120.0
UPDATES = 120


class Rig:
    """A daemon with a plug, a model and data."""

    def __init__(self, root: Path) -> None:
        self.root, self.client = root, ControlClient(root / "run")
        self.place = ["--runtime-dir", str(root / "run")]
        (root / "config.toml").write_text(CONFIG)
        make_model(root / "model", hidden_size=128)
        make_data(root / "data.jsonl")
        self.plug(online=True)
        self.start()

    def start(self) -> None:
        folders = ("--state-dir", "state", "--runtime-dir", "run", "--config", "config.toml", "--sysfs-root", "sys")
        words = [str(self.root / word) if i % 2 else word for i, word in enumerate(folders)]
        self.daemon = start_agent(self.root, "port_agent.cli", "run", "--foreground", *words)

    def plug(self, *, online: bool) -> None:
        battery = LAPTOP_BATTERY.format(status="Charging" if online else "Discharging", capacity=80)
        supply_tree(self.root / "sys", ACAD=MAINS.format(online=int(online)), BAT0=battery)

    def submit(self, *words: str, updates: int = UPDATES) -> int:
        root = self.root
        asked: tuple[str, ...] = (
            "finetune",
            str(root / "model"),
            "--data",
            str(root / "data.jsonl"),
            "--out",
            str(root / "out"),
            "--ram",
            "700M",
        )
        asked += ("--seq-len", "32", "--updates", str(updates), "--cpus", "1", "--page-dir", str(root), "--submit")
        done = subprocess.run(
            [sys.executable, "-P", "-m", "port_agent.cli", *asked, *words, *self.place], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split()[1])

    def until(self, condition: Callable[[], Any]) -> Any:
        def look() -> Any:
            with contextlib.suppress(ControlError):
                return condition()
            return None

        return waiting.until(look, lambda: self.client.text("/v1/jobs/1/logs"), patience_s=PATIENCE_S)

    def job(self) -> Any:
        return self.client.get("/v1/jobs/1")

    def wait_for_step(self, step: int) -> Any:
        """Return the run once it trains and has done so many steps."""

        def look() -> Any:
            run = self.client.get("/v1/status")["job"]
            return run if run is not None and run["phase"] == "training" and run["step"] >= step else None

        return self.until(look)

    def wait_for_release(self, pid: int) -> None:
        self.until(lambda: self.client.get("/v1/status")["job"] is None)
        assert not Path(f"/proc/{pid}").exists()


@contextmanager
def rig(root: Path) -> Iterator[Rig]:
    made = Rig(root)
    try:
        yield made
    finally:
        made.daemon.terminate()
        made.daemon.wait(PATIENCE_S)


@pytest.mark.long  # `finetuning/job/test_worker.py` leaves, pauses and kills the worker without a daemon
def test_unplugged_paused_and_without_its_daemon_for_a_time_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        assert it.submit() == 1
        run = it.wait_for_step(10)
        assert (run["kind"], run["total_steps"], run["planned_peak_bytes"]) == ("finetune", UPDATES, 700 << 20)
        assert run["owner"] == it.job()["owner"] != "" and run["loss"] > 0

        it.plug(online=False)
        it.wait_for_release(run["pid"])
        left = it.job()
        assert left["state"] == "queued" and left["step"] >= 10 and (tmp_path / "out.state" / "checkpoint.pt").is_file()
        it.plug(online=True)
        run = it.wait_for_step(left["step"] + 1)
        assert "resumes after" in it.client.text("/v1/jobs/1/logs")

        it.daemon.kill()
        it.daemon.wait()
        waiting.until(
            lambda: not Path(f"/proc/{run['pid']}").exists(), lambda: "the worker stays", patience_s=PATIENCE_S
        )
        it.start()
        run = it.wait_for_step(run["step"] + 1)

        assert main(["pause", "1", *it.place]) == 0
        it.wait_for_release(run["pid"])
        assert it.job()["state"] == "paused"
        assert main(["resume", "1", *it.place]) == 0
        finished = it.until(lambda: (job := it.job())["state"] == "finished" and job)
        assert finished["step"] == UPDATES and finished["result"] == str(tmp_path / "out") and finished["attempts"] == 4
        with pytest.raises(ControlError, match=f"the result of job 1 .* is the directory {tmp_path / 'out'}"):
            it.client.get("/v1/jobs/1/result")
        report = it.client.get("/v1/energy?since=0")
        row = next(row for row in report["jobs"] if row["name"] == "1")
        assert row["steps"] > 0 and row["gross_joules"] > 0
    options = FinetuneOptions(
        str(tmp_path / "model"),
        (str(tmp_path / "data.jsonl"),),
        str(tmp_path / "plain"),
        sequence_tokens=32,
        updates=UPDATES,
    )
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == adapter_left_alone(options)


@pytest.mark.long  # `finetuning/job/test_worker.py` ends the worker without a daemon
def test_cancelled_it_ends_and_leaves_no_result(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        it.submit(updates=100_000)
        run = it.wait_for_step(1)
        assert main(["cancel", "1", *it.place]) == 0
        it.wait_for_release(run["pid"])
        assert it.job()["state"] == "cancelled" and not (tmp_path / "out").exists()


@pytest.mark.long
def test_files_that_changed_are_refused_by_name_until_they_are_put_back(tmp_path: Path) -> None:
    with rig(tmp_path) as it:
        it.plug(online=False)
        assert it.submit(updates=3) == 1
        (tmp_path / "data.jsonl").write_text('{"text": "others"}\n')
        it.plug(online=True)
        failed = it.until(lambda: (job := it.job())["state"] == "failed" and job)
        assert failed["reason"].startswith(
            f"{tmp_path / 'data.jsonl'} has changed since the job was submitted; restore it"
        )
        make_data(tmp_path / "data.jsonl")
        assert main(["resume", "1", *it.place]) == 0
        it.until(lambda: it.job()["state"] == "finished")
