"""The values of `--place`: a kind of device other than the CPU, or teams of CPU threads."""

import re

from port_agent.facts.cpu_clusters import CpuCluster, clusters_text, read_clusters
from port_agent.facts.sysfs import Tree
from port_agent.planning.request import RequestError
from port_agent.worker.thread_limit import usable_core_numbers, usable_cores
from port_planner.ir.device_kinds import CPU
from port_planner.ir.devices.cpu_teams import MAX_TEAMS, CpuTeam

_TEAM = re.compile(rf"{CPU}:(\d+)(?:x([\w-]+))?")
_ANY_NAME = re.compile(r"cluster(\d+)")
"""Name of a cluster whose cores the kernel does not name: its number, beginning with the fastest."""


def names_teams(place: str | None) -> bool:
    """Return whether operators are divided among teams of threads rather than between two devices."""
    return place is not None and place.startswith(f"{CPU}:")


def wanted_teams(place: str | None) -> tuple[CpuTeam, ...]:
    """Return the teams that `--place cpu:1,cpu:4xA76` names; none if it names a device.

    Raises RequestError for impossible teams.
    """
    if place is None or not names_teams(place):
        return ()
    clusters = read_clusters(Tree(), usable_core_numbers())
    teams = tuple(dict.fromkeys(_team(part, clusters) for part in place.split(",")))
    if not 2 <= len(teams) <= MAX_TEAMS:
        raise RequestError(
            f"--place {place}: operators are divided among 2 to {MAX_TEAMS} teams, such as cpu:1,cpu:{usable_cores()}"
        )
    return teams


def _team(part: str, clusters: tuple[CpuCluster, ...]) -> CpuTeam:
    match = _TEAM.fullmatch(part)
    if match is None:
        raise RequestError(
            f"--place {part}: a team is cpu:N, or cpu:NxCLUSTER; here there are {clusters_text(clusters)}"
        )
    threads, name = int(match[1]), match[2]
    cores = () if name is None else _cores(name, clusters)
    most = len(cores) or usable_cores()
    if not 1 <= threads <= most:
        raise RequestError(f"--place {part}: there are {most} such cores; name a number of threads from 1 to {most}")
    return CpuTeam(threads, cores)


def _cores(name: str, clusters: tuple[CpuCluster, ...]) -> tuple[int, ...]:
    """Return the cores of the cluster with this name, the end of it (`A76`), or this number."""
    number = _ANY_NAME.fullmatch(name)
    if number is not None and 1 <= int(number[1]) <= len(clusters):
        return clusters[int(number[1]) - 1].cores
    for cluster in clusters:
        if cluster.name is not None and name.lower() in (cluster.name.lower(), cluster.name.lower().rpartition("-")[2]):
            return cluster.cores
    known = ", ".join(f"cluster{i}, {cluster.text}" for i, cluster in enumerate(clusters, 1))
    raise RequestError(f"--place: there is no cluster {name}; the kernel reports {known or 'none'}")
