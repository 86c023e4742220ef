"""Until when the user paused everything, and that what tests replace is complete."""

import asyncio
import math
from pathlib import Path

import pytest

from port_agent.jobs.job import JobKind
from port_agent.jobs.store import JobStore
from port_agent.supervisor.context import PAUSE_SETTING, DaemonSeams
from port_agent.supervisor.job.worker_kinds import DEFAULT_KINDS
from tests.agent.live_daemon import go
from tests.agent.supervisor.parts import parts


@go
async def test_a_pause_ends_at_its_moment_on_the_wall_clock(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        context, clock = made.context, made.clock
        assert context.paused_until() is None
        end = clock.wall + 60.0
        context.store.remember(PAUSE_SETTING, repr(end))
        clock.now += 1e6
        assert context.paused_until() == end
        clock.wall = end
        assert context.paused_until() is None
        context.store.remember(PAUSE_SETTING, repr(math.inf))
        assert context.paused_until() == math.inf


YEAR_S, DAY_S = 365 * 86400.0, 86400.0


@pytest.mark.parametrize("jump_s", [-YEAR_S, DAY_S, 50 * YEAR_S])
def test_a_pause_of_an_hour_lasts_an_hour_whatever_happens_to_the_clock(tmp_path: Path, jump_s: float) -> None:
    """NTP after a boot without a clock of its own sets the date by decades."""
    asyncio.run(_pause_over_a_jump(tmp_path, jump_s))


async def _pause_over_a_jump(root: Path, jump_s: float) -> None:
    async with parts(root) as made:
        context, clock = made.context, made.clock
        context.store.remember(PAUSE_SETTING, repr(clock.wall + 3600.0))
        context.admission.clock_jump_s()
        clock.pass_time(600.0)
        clock.wall += jump_s
        context.move_pause(context.admission.clock_jump_s())
        assert context.paused_until() == pytest.approx(clock.wall + 3000.0)
        clock.pass_time(3001.0)
        assert context.paused_until() is None
        clock.wall += jump_s
        context.move_pause(context.admission.clock_jump_s())
        assert context.paused_until() is None, "what was over stays over"


@go
async def test_a_pause_that_cannot_be_read_is_a_pause(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        made.context.store.remember(PAUSE_SETTING, "in8")
        assert made.context.paused_until() == math.inf
        made.context.move_pause(DAY_S)
        assert made.context.store.setting(PAUSE_SETTING) == "in8"


@go
async def test_a_pause_survives_a_restart_to_the_digit(tmp_path: Path) -> None:
    async with parts(tmp_path) as made:
        end = made.clock.wall + 1 / 3
        made.context.store.remember(PAUSE_SETTING, repr(end))
    store = JobStore(tmp_path / "state")
    assert float(store.setting(PAUSE_SETTING) or 0) == end
    store.close()


@pytest.mark.parametrize("kind", [kind for kind in JobKind if kind is not JobKind.ATTACHED])
def test_without_a_test_every_kind_of_job_has_its_worker(kind: JobKind) -> None:
    assert DaemonSeams().kinds[kind] is DEFAULT_KINDS[kind]
