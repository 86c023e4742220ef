"""The meter inside the real daemon: reports over the socket, names of jobs, drift that corrects the plans, doctor."""

import json
from pathlib import Path

import pytest

from port_agent.cli import main
from tests.agent.live_daemon import BUNDLE, CONFIG, daemon

pytestmark = pytest.mark.process


def test_job_is_metered_reported_and_its_plan_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--runtime-dir", str(tmp_path / "run")]
    bundle = tmp_path / "birds.json"
    plans = [{"peak_bytes": 200 << 20, "seconds": 9.0, "joules": 5.0}]
    bundle.write_text(json.dumps({**BUNDLE, "steps": 400, "plans": plans}))
    with daemon(tmp_path) as client:
        assert main(["submit", str(bundle), *place]) == 0
        assert main(["logs", "-f", "1", *place]) == 0  # ends when the job is over
        assert client.get("/v1/jobs/1")["state"] == "finished"
        report = client.get("/v1/energy?since=0")
        assert report["labels"] == {"1": "1 (birds)"}
        job = next(row for row in report["jobs"] if row["name"] == "1")
        assert job["kind"] == "estimated" and job["gross_joules"] > 0 and job["steps"] >= 399
        capsys.readouterr()
        assert main(["energy", *place, "--csv"]) == 0
        assert "job,1,estimated," in capsys.readouterr().out
        main(["doctor", "--no-flash", *place])
        assert "energy: estimated" in capsys.readouterr().out
        texts = [entry["text"] for entry in client.get("/v1/jobs/1")["history"]]
        assert any("profile corrected (time x0." in text for text in texts), texts


def test_a_source_that_does_not_exist_is_named_and_training_goes_on(tmp_path: Path) -> None:
    bundle = tmp_path / "birds.json"
    bundle.write_text(json.dumps({**BUNDLE, "steps": 2}))
    with daemon(tmp_path, CONFIG + '\n[energy]\nsource = "wattmeter"\n') as client:
        (item,) = [item for item in client.get("/v1/health")["health"] if item["code"] == "no-meter"]
        assert "'wattmeter'; use one of auto," in item["text"] and "correct [energy]" in item["remedy"]
        assert main(["submit", str(bundle), "--runtime-dir", str(tmp_path / "run")]) == 0
        assert client.get("/v1/status")["energy"] is None
