"""Devices are told apart from the CPU, and who counts what is taken of their memory is measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.backend.enforcement import ALLOCATOR, ALLOWED, DATA, GROUP, KILLED, PROBE_BYTES, REFUSED
from port_agent.health import doctor
from tests.simulated_device import CONTEXT_BYTES, NAME, installed


def test_the_doctor_judges_by_what_is_taken() -> None:
    assert doctor.PROBE_BYTES == PROBE_BYTES


@pytest.mark.process
def test_each_device_is_reported_and_the_cpu_is_none(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "port_agent.backend.examine"]
    done = subprocess.run(words, env=installed(tmp_path), capture_output=True, text=True, cwd="/", check=True)
    version, reports = json.loads(done.stdout)
    assert version.startswith("2.")
    (sim,) = (report for report in reports if report["kind"] == NAME)
    assert (sim["unified"], sim["outside_bytes"], sim["reordered"]) == (False, CONTEXT_BYTES, 0)
    assert sim["enforced"][ALLOCATOR] == sim["enforced"][DATA] == REFUSED and sim["bounded"]
    assert sim["enforced"][GROUP] in (KILLED, ALLOWED) or sim["enforced"][GROUP].startswith("was not tested: ")
    assert sim["seen_by"]["resident memory"] > PROBE_BYTES // 2, "the simulated device lies in this process"
    assert "cpu" not in {report["kind"] for report in reports}
