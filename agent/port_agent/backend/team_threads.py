"""Operators of the CPU on teams of threads. A team is a number of threads, or the cores of one cluster.

A team that may run on any core is the calling thread with another number of threads. Setting the number is cheap, and
if it is one or all, the OpenMP library keeps its threads. A team with cores of its own is a thread bound to them,
because the threads that it starts inherit this; each operator is handed to it.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import torch

from port_planner.base.errors import ExitCode, PortError
from port_planner.ir.devices.cpu_teams import CpuTeam


class CpuTeamError(PortError):
    """The operators need cores on which this process may not run."""

    exit_code = ExitCode.IMPOSSIBLE


class CpuTeams:
    """Runs operators on the teams of a step. Number 0 is the calling thread with `threads` threads; the others
    are `teams`, from number 1.

    Raises CpuTeamError if the cores of a team are not available.
    """

    def __init__(self, threads: int, teams: Sequence[CpuTeam] = ()) -> None:
        self.threads, self.teams = threads, tuple(teams)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset[int]()
        for team in self.teams:
            if not usable.issuperset(team.cores):
                raise CpuTeamError(
                    f"operators of this step are for {team.text}, but this process may run on {sorted(usable)}; plan "
                    "the job again here"
                )
        self._tied = {
            number: ThreadPoolExecutor(1, f"cpu-team-{number}", _tie, (team,))
            for number, team in enumerate(self.teams, 1)
            if team.cores
        }
        for tied in self._tied.values():
            tied.submit(int).result()  # now, and not between two operators
        if self._tied:
            torch.set_num_threads(threads)  # set by each of them for future threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def runs(self, team: int, run: Callable[[], Any]) -> Callable[[], Any]:
        """Return the function that runs `run` on a team."""
        if not team:
            return run
        if team in self._tied:
            tied = self._tied[team]
            return lambda: tied.submit(run).result()
        count, usual = self.teams[team - 1].threads, self.threads

        def with_threads() -> Any:
            torch.set_num_threads(count)
            try:
                return run()
            finally:
                torch.set_num_threads(usual)

        return with_threads

    def close(self) -> None:
        """End the threads that are tied to cores."""
        for tied in self._tied.values():
            tied.shutdown()


def _tie(team: CpuTeam) -> None:
    """Bind a team's thread to its cores, and disable autograd, which is a setting of each thread."""
    os.sched_setaffinity(0, team.cores)
    torch.set_num_threads(team.threads)
    torch.set_grad_enabled(False)
