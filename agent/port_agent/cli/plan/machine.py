"""What `plan`'s command line and the settings say of the machine: its energy, its media, its devices, its numbers of threads, its peers."""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.cli import places
from port_agent.cli.arguments import UsageError, page_dirs
from port_agent.cli.plan.placement import names_teams
from port_agent.energy.media import FlashPrices, Medium, medium_of, medium_under
from port_agent.energy.sources.power_models import power_with
from port_planner.ir.boards import load_board
from port_planner.ir.costs import MediumKind
from port_planner.ir.devices.kinds import CPU

if TYPE_CHECKING:
    from port_agent.backend.base import Backend
    from port_agent.energy.sources.estimated import PowerModel
    from port_agent.energy.sources.registry import EnergyConfig
    from port_agent.prepare.peers import PlanningPeers
    from port_agent.prepare.pools import Pools
    from port_planner.job import TrainingJob


@dataclass(frozen=True, slots=True)
class PlanningMachine:
    """What settings and command line say of this one: its energy, where pages go, and what media lie there."""

    energy: "EnergyConfig"
    page_dir: Path
    medium: Medium
    further: list[tuple[Path, Medium]]

    @property
    def scratch_dirs(self) -> tuple[Path, ...]:
        """The further page directories."""
        return tuple(folder for folder, _ in self.further)

    def power(self, threads: int) -> "PowerModel":
        """Return what it draws, in watts, with so many threads computing: as measured or said, else as its board does."""
        energy = self.energy
        return power_with(threads, static_watts=energy.static_watts, full_watts=energy.full_watts, board=energy.board)


def all_page_dirs(arguments: argparse.Namespace) -> list[Path]:
    """Return where pages go, the first directory with the weights among them: as said, else where the command runs."""
    return page_dirs(arguments.page_dirs) or [Path()]


def planning_machine(arguments: argparse.Namespace) -> PlanningMachine:
    """Return what is known of the machine without torch. Raises UsageError for what the arguments forbid each other."""
    energy, _ = places.energy_settings(arguments.config)
    page_dir, *scratch_dirs = all_page_dirs(arguments)
    return PlanningMachine(
        energy, page_dir, _medium(arguments, energy, page_dir), _further_media(arguments, energy, scratch_dirs)
    )


def _further_media(
    arguments: argparse.Namespace, energy: "EnergyConfig", scratch_dirs: list[Path]
) -> list[tuple[Path, Medium]]:
    """Return the media of further page directories, as the kernel tells."""
    if scratch_dirs and arguments.board is not None:
        raise UsageError("--page-dir: a board that is not at hand has one medium; give one directory with --board")
    prices = FlashPrices(per_kwh=energy.price_per_kwh)  # what else the owner says is of the first
    return [(folder, medium_under(folder, prices)) for folder in scratch_dirs]


def _medium(arguments: argparse.Namespace, energy: "EnergyConfig", page_dir: Path) -> Medium:
    """Return what pages are written to: as said, else of the board, else as the kernel tells of the page directory."""
    prices = FlashPrices(energy.flash_endurance_bytes, energy.flash_price, energy.price_per_kwh)
    kind = None if arguments.medium is None else MediumKind[arguments.medium.upper()]
    if kind is None and arguments.board is not None:
        kind = load_board(arguments.board).medium
    medium = medium_under(page_dir, prices) if kind is None else medium_of(kind, prices)
    if arguments.flash_life is not None and medium.endurance_bytes is None:
        raise UsageError(
            f"--flash-life: writing does not wear out a {medium.kind.value}; name the --medium of the device"
        )
    return medium


def computing_place(job: "TrainingJob", arguments: argparse.Namespace) -> "tuple[Backend, Pools]":
    """Move the job to the device that was asked for, and return where it computes and what it may take there. Raises UsageError where `--place` asks for others."""
    from port_agent.backend.choose import backend_of
    from port_agent.prepare.pools import pools_of
    from port_planner.job_device import kind_of_job, move

    if arguments.device is not None:
        backend_of(arguments.device)
        move(job, arguments.device)
    backend = backend_of(kind_of_job(job))
    if names_teams(arguments.place) and backend.kind != CPU:
        raise UsageError(
            f"--place {arguments.place}: the model computes on {backend.kind}; --device cpu moves it to the CPU"
        )
    if arguments.place is not None and not names_teams(arguments.place):
        backend = _beside_the_cpu(arguments.place, backend)
    return backend, pools_of(backend, arguments.ram, arguments.gpu_ram, arguments.recording_gpu_ram)


def _beside_the_cpu(kind: str, where: "Backend") -> "Backend":
    """Return the device that operators are divided with; raise UsageError for a job that lies on a third."""
    from port_agent.backend.choose import backend_of

    if where.kind not in (CPU, kind):
        raise UsageError(f"--place {kind}: the model computes on {where.kind}; move it to the CPU or to {kind}")
    return backend_of(kind)


def thread_counts(arguments: argparse.Namespace, *, set_by_script: bool, on_device: bool) -> tuple[int, ...]:
    """Return the numbers of threads to measure: the one that somebody set, else those up to all cores and of clusters of them.

    A board's rates are scaled from one thread's here, and beside a device the CPU has little to compute, unless told otherwise.
    """
    import torch

    from port_agent.facts.cpu_clusters import read_clusters
    from port_agent.facts.sysfs import Tree
    from port_agent.prepare.threads import tried_counts
    from port_agent.worker.thread_room import usable_core_numbers, usable_cores

    if arguments.threads is not None:
        return (arguments.threads,)
    if set_by_script or "OMP_NUM_THREADS" in os.environ:
        return (torch.get_num_threads(),)
    if arguments.board is not None or on_device:
        return (1,)
    clusters = read_clusters(Tree(), usable_core_numbers())
    return tried_counts(usable_cores(), [len(cluster.cores) for cluster in clusters])


def planning_peers(arguments: argparse.Namespace) -> "PlanningPeers | None":
    """Return what paired devices may do here: solve where that was asked for, share where the agent's settings say so."""
    from port_agent.control.client import ControlError
    from port_agent.control.peer_exchange import PeerExchange
    from port_agent.prepare.peers import PlanningPeers

    client = places.connect(arguments.runtime_dir)
    try:
        shares = bool(client.get("/v1/peers").get("shares"))
    except ControlError:
        shares = False
    if not shares and arguments.solve_on is None:
        return None
    return PlanningPeers(
        PeerExchange(client, arguments.solve_on or ""), shares=shares, solves=arguments.solve_on is not None
    )
