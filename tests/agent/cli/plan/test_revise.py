"""The process that makes plans again beside a worker, on this device or a paired one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.revision import read_revision, revision_path
from port_planner.ir.costs import Speeds
from tests.agent.jobs_small import small_bundle
from tests.agent.paired_agents import paired_agents

pytestmark = pytest.mark.process


def test_a_process_of_its_own_writes_it_and_says_what_it_saves(tmp_path: Path) -> None:
    bundle = tmp_path / "job.port"
    bundle.write_bytes(small_bundle().read_bytes())
    command = [
        sys.executable,
        "-m",
        "port_agent.cli.plan.revise",
        str(bundle),
        str(revision_path(bundle)),
        "--plan",
        "1",
    ]
    told = subprocess.run([*command, "--read", "1e5", "--write", "1e5"], capture_output=True, check=True, text=True)
    said, revision = json.loads(told.stdout), read_revision(revision_path(bundle))
    assert revision.speeds == Speeds(1.0, 1e5, 1e5) and revision.bundle_id == Bundle(bundle).id
    assert said["new"]["joules"] == revision.choices[1].joules < said["old"]["joules"]
    bundle.write_bytes(b"no bundle")
    failed = subprocess.run(command, capture_output=True, check=False, text=True)
    assert failed.returncode == 1 and "is not a bundle" in failed.stderr and failed.stderr.count("\n") == 1


def test_the_process_needs_no_torch() -> None:
    program = "import sys, port_agent.cli.plan.revise; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.long
def test_a_paired_device_solves(tmp_path: Path) -> None:
    """Both agents are real; the one that does not solve for others says so, and the plan is made here."""
    bundle = tmp_path / "job.port"
    bundle.write_bytes(small_bundle().read_bytes())
    with paired_agents(tmp_path, "solve = true", "") as (attic, cellar):
        command = [
            sys.executable, "-m", "port_agent.cli.plan.revise", str(bundle), str(revision_path(bundle)), "--plan", "0", "--read", "1e5",
            "--write", "1e5", "--solve-on", "any", "--runtime-dir",
        ]  # fmt: skip
        told, refused = (
            json.loads(subprocess.run([*command, str(agent.path.parent)], capture_output=True, check=True).stdout)
            for agent in (cellar, attic)
        )
    assert told["peers"] == ["1 plan solved on attic"]
    assert refused["peers"] == [
        "solved here: cellar: it solves for no other device (solve = true under [peers] there would)"
    ]
    assert told["new"]["joules"] == refused["new"]["joules"]
