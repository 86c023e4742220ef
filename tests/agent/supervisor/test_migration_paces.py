"""How steps compare with their plans, from what was measured."""

import asyncio
from dataclasses import replace
from pathlib import Path

from port_agent.jobs.job import Guest, JobMeasurements, JobPromise
from port_agent.supervisor.migration_paces import paces
from tests.agent.supervisor.parts import Parts, parts


def trained(made: Parts, name: str, planned_s: float, step_s: float, guest: Guest | None = None) -> None:
    job = made.add(name, guest=guest)
    promise = JobPromise(0, 1, planned_s, 1.0, 0)
    made.context.store.save(replace(job, promise=promise, measured=JobMeasurements(step_s=step_s)))


def test_the_middle_of_what_was_measured_or_of_the_asker_s_own_jobs(tmp_path: Path) -> None:
    async def work() -> None:
        async with parts(tmp_path / "here") as made:
            assert paces(made.context) == (1.0, 1.0)
            for number, step_s in enumerate((2.0, 3.0, 100.0)):
                trained(made, f"own{number}", 1.0, step_s)
            assert paces(made.context)[0] == 3.0
            trained(made, "theirs", 4.0, 1.0, Guest("attic", "ab" * 16, "A"))
            assert paces(made.context)[0] == 3.0
            assert paces(made.context, "A")[0] == 0.25 and paces(made.context, "B")[0] == 3.0

    asyncio.run(work())
