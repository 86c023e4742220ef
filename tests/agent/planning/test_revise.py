"""The process that makes plans again beside a worker, on this device or a paired one."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from port_agent.supervisor.job.plan_revision import PeerSolving, RevisedPlans, RevisionRequest
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.bundle.revision import read_revision, revision_path
from port_planner.ir.costs import Speeds
from tests.agent.jobs_small import small_bundle
from tests.agent.paired_agents import paired_agents

pytestmark = pytest.mark.process


def process(request: RevisionRequest) -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "port_agent.planning.revise"]
    return subprocess.run(command, input=msgspec.json.encode(request), capture_output=True, check=False)


def test_a_process_of_its_own_writes_it_and_says_what_it_saves(tmp_path: Path) -> None:
    bundle = tmp_path / "job.port"
    bundle.write_bytes(small_bundle().read_bytes())
    request = RevisionRequest(str(bundle), str(revision_path(bundle)), 1, Speeds(1.0, 1e5, 1e5))
    revised = msgspec.json.decode(process(request).stdout, type=RevisedPlans)
    revision = read_revision(revision_path(bundle))
    assert revision.speeds == Speeds(1.0, 1e5, 1e5) and revision.bundle_id == Bundle(bundle).id
    choice = revision.choices[1]
    assert revised.new_joules == choice.joules + choice.wear_joules < revised.old_joules
    bundle.write_bytes(b"not a valid bundle")
    failed = process(request)
    assert failed.returncode == 1 and b"is not a bundle" in failed.stderr and failed.stderr.count(b"\n") == 1


def test_the_process_needs_no_torch() -> None:
    program = "import sys, port_agent.planning.revise; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.long
def test_a_paired_device_solves(tmp_path: Path) -> None:
    """Both agents are real; the one that does not solve for others says so, and the plan is made here."""
    bundle = tmp_path / "job.port"
    bundle.write_bytes(small_bundle().read_bytes())
    with paired_agents(tmp_path, "solve = true", "") as (attic, cellar):
        report, refused = (
            msgspec.json.decode(
                process(
                    RevisionRequest(
                        str(bundle),
                        str(revision_path(bundle)),
                        0,
                        Speeds(1.0, 1e5, 1e5),
                        PeerSolving("any", str(agent.path.parent)),
                    )
                ).stdout,
                type=RevisedPlans,
            )
            for agent in (cellar, attic)
        )
    assert report.peers == ("1 plan solved on attic",)
    assert refused.peers == (
        "solved here: cellar: it solves for no other device (set solve = true under [peers] there)",
    )
    assert report.new_joules == refused.new_joules
