"""That what tests replace is complete."""

import pytest

from port_agent.jobs.job import JobKind
from port_agent.supervisor.context import DaemonSeams
from port_agent.supervisor.job.worker_kinds import DEFAULT_KINDS


@pytest.mark.parametrize("kind", [kind for kind in JobKind if kind is not JobKind.ATTACHED])
def test_without_a_test_every_kind_of_job_has_its_worker(kind: JobKind) -> None:
    assert DaemonSeams().kinds[kind] is DEFAULT_KINDS[kind]
