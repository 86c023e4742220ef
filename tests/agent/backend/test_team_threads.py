"""Operators run with as many threads as their team has, on its cores, and leave the calling thread as it was."""

import os
import threading

import pytest
import torch

from port_agent.backend.team_threads import CpuTeamError, CpuTeams
from port_planner.ir.devices.cpu_teams import CpuTeam

USABLE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
needs_cores = pytest.mark.skipif(not USABLE, reason="the system ties no thread to cores")


def test_an_operator_runs_with_its_teams_threads_and_the_next_with_all() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with CpuTeams(1, (CpuTeam(2),)) as teams:
            assert teams.runs(1, torch.get_num_threads)() == 2
            assert teams.runs(0, torch.get_num_threads)() == torch.get_num_threads() == 1
            with pytest.raises(ZeroDivisionError):
                teams.runs(1, lambda: 1 / 0)()
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@needs_cores
def test_a_team_with_cores_of_its_own_computes_there_without_autograd_and_lets_others_be() -> None:
    before, last = torch.get_num_threads(), USABLE[-1]
    torch.set_num_threads(1)
    try:
        with CpuTeams(1, (CpuTeam(1, (last,)),)) as teams:
            here = threading.get_native_id()
            assert teams.runs(1, lambda: os.sched_getaffinity(0))() == {last}
            assert teams.runs(1, threading.get_native_id)() != here == teams.runs(0, threading.get_native_id)()
            weight = torch.ones(3, requires_grad=True)
            assert not teams.runs(1, lambda: weight * 2)().requires_grad and (weight * 2).requires_grad
            with pytest.raises(ZeroDivisionError):
                teams.runs(1, lambda: 1 / 0)()
        assert sorted(os.sched_getaffinity(0)) == USABLE and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@needs_cores
def test_cores_that_are_not_there_are_refused() -> None:
    with pytest.raises(CpuTeamError, match=r"1 thread on cores 4000, .* plan the job again here"):
        CpuTeams(1, (CpuTeam(1, (4000,)),))
