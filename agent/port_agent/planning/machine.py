"""The machine according to a request and the settings: energy, media, devices, numbers of threads, peers."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.control import places
from port_agent.energy.media import FlashPrices, Medium, medium_of, medium_under
from port_agent.energy.sources.power_models import power_with
from port_agent.planning.placement import names_teams, wanted_teams
from port_agent.planning.request import PlanRequest, RequestError
from port_planner.ir.boards import load_board
from port_planner.ir.device_kinds import CPU

if TYPE_CHECKING:
    from port_agent.backend.base import Backend
    from port_agent.energy.sources.estimated import PowerModel
    from port_agent.energy.sources.registry import EnergyConfig
    from port_agent.prepare.peers import PlanPeers
    from port_agent.prepare.pools import Pools
    from port_planner.job import TrainingJob


@dataclass(frozen=True, slots=True)
class PlanMachine:
    """This machine according to settings and request: its energy, its page directories, and their media."""

    energy: "EnergyConfig"
    page_dir: Path
    medium: Medium
    further: list[tuple[Path, Medium]]

    @property
    def scratch_dirs(self) -> tuple[Path, ...]:
        """The further page directories."""
        return tuple(folder for folder, _ in self.further)

    def power(self, threads: int) -> "PowerModel":
        """Return the watts with `threads` threads computing: measured or configured, otherwise those of its board."""
        energy = self.energy
        return power_with(threads, static_watts=energy.static_watts, full_watts=energy.full_watts, board=energy.board)


def all_page_dirs(request: PlanRequest) -> list[Path]:
    """Return the page directories, the first of which is for weights: the requested ones,
    otherwise the working directory.
    """
    return [*request.page_dirs] or [Path()]


def check_request(request: PlanRequest) -> None:
    """Raise RequestError for settings that contradict each other."""
    if request.step_joules is not None and not request.sparse_update:
        raise RequestError("--step-joules limits what --sparse-update trains; give both, or neither")
    on_gpu = request.device_ram_bytes is not None or request.recording_device_ram_bytes is not None
    if request.board is not None and request.place is None and (on_gpu or request.device not in (None, CPU)):
        raise RequestError(
            "--board: nothing is known about the GPU of a board that is not available; plan there, or without "
            "--board for the CPU"
        )
    if request.solve_on is not None and request.strategy == "greedy":
        raise RequestError("--solve-on: a greedy plan takes only a moment here; leave out --strategy")
    if request.solve_on is not None and request.iterations is not None:
        raise RequestError("--solve-on: a paired device searches for --time-limit seconds; leave out --iterations")
    if request.place is not None:
        _check_placement(request, request.place)


def _check_placement(request: PlanRequest, place: str) -> None:
    if names_teams(place):
        if request.threads is not None:
            raise RequestError(
                "--threads and --place exclude each other: --place sets the numbers of threads; leave out --threads"
            )
        if request.board is not None:
            raise RequestError(
                "--board and --place cpu: cannot be combined: only one core of an unavailable board is known"
            )
        wanted_teams(place)
    elif place == CPU or request.device not in (None, CPU, place):
        raise RequestError(
            f"--place {place}: operators are divided between the CPU and one other device; --device, if given, must "
            "name one of these"
        )


def plan_machine(request: PlanRequest) -> PlanMachine:
    """Return what is known about the machine without torch.

    Raises RequestError for settings that exclude each other.
    """
    check_request(request)
    energy, _ = places.energy_settings(request.config)
    page_dir, *scratch_dirs = all_page_dirs(request)
    return PlanMachine(
        energy, page_dir, _medium(request, energy, page_dir), _further_media(request, energy, scratch_dirs)
    )


def _further_media(request: PlanRequest, energy: "EnergyConfig", scratch_dirs: list[Path]) -> list[tuple[Path, Medium]]:
    """Return the media of further page directories, as reported by the kernel."""
    if scratch_dirs and request.board is not None:
        raise RequestError("--page-dir: a board that is not here has one medium; give one directory with --board")
    prices = FlashPrices(per_kwh=energy.price_per_kwh)  # the owner's other settings describe the first medium
    return [(folder, medium_under(folder, prices)) for folder in scratch_dirs]


def _medium(request: PlanRequest, energy: "EnergyConfig", page_dir: Path) -> Medium:
    """Return the medium of pages: the configured one, otherwise the board's, otherwise the one that the kernel
    reports for the page directory.
    """
    prices = FlashPrices(energy.flash_endurance_bytes, energy.flash_price, energy.price_per_kwh)
    kind = request.medium
    if kind is None and request.board is not None:
        kind = load_board(request.board).medium
    medium = medium_under(page_dir, prices) if kind is None else medium_of(kind, prices)
    if request.flash_life_s is not None and medium.endurance_bytes is None:
        raise RequestError(
            f"--flash-life: writing does not wear out a {medium.kind.value}; name the --medium of the device"
        )
    return medium


def computing_place(job: "TrainingJob", request: PlanRequest) -> "tuple[Backend, Pools]":
    """Move the job to the requested device; return where it computes and its memory budgets.

    Raises RequestError if `--place` asks for other devices.
    """
    from port_agent.backend.choose import backend_of
    from port_agent.prepare.pools import pools_of
    from port_planner.job_device import kind_of_job, move

    if request.device is not None:
        backend_of(request.device)
        move(job, request.device)
    backend = backend_of(kind_of_job(job))
    if names_teams(request.place) and backend.kind != CPU:
        raise RequestError(
            f"--place {request.place}: the model computes on {backend.kind}; --device cpu moves it to the CPU"
        )
    if request.place is not None and not names_teams(request.place):
        backend = _beside_the_cpu(request.place, backend)
    return backend, pools_of(backend, request.ram_bytes, request.device_ram_bytes, request.recording_device_ram_bytes)


def _beside_the_cpu(kind: str, where: "Backend") -> "Backend":
    """Return the device that shares operators with the CPU; raise RequestError if the job is on a third device."""
    from port_agent.backend.choose import backend_of

    if where.kind not in (CPU, kind):
        raise RequestError(f"--place {kind}: the model computes on {where.kind}; move it to the CPU or to {kind}")
    return backend_of(kind)


def thread_counts(request: PlanRequest, *, set_by_script: bool, on_device: bool) -> tuple[int, ...]:
    """Return the numbers of threads to measure: the one that was set, otherwise those up to all
    cores, and those of clusters.

    For another board, rates are scaled from those of one thread here. If a device computes, the CPU has little to do,
    so one thread is used unless the request says otherwise.
    """
    import torch

    from port_agent.facts.cpu_clusters import read_clusters
    from port_agent.facts.sysfs import Tree
    from port_agent.prepare.threads import thread_choices
    from port_agent.worker.thread_limit import usable_core_numbers, usable_cores

    if request.threads is not None:
        return (request.threads,)
    if set_by_script or "OMP_NUM_THREADS" in os.environ:
        return (torch.get_num_threads(),)
    if request.board is not None or on_device:
        return (1,)
    clusters = read_clusters(Tree(), usable_core_numbers())
    return thread_choices(usable_cores(), [len(cluster.cores) for cluster in clusters])


def plan_peers(request: PlanRequest) -> "PlanPeers | None":
    """Return what paired devices may contribute: solving if requested, and sharing if the agent's settings allow it."""
    from port_agent.control.client import ControlError
    from port_agent.control.peer_exchange import PeerExchange
    from port_agent.prepare.peers import PlanPeers

    client = places.connect(request.runtime_dir)
    try:
        shares = bool(client.get("/v1/peers").get("shares"))
    except ControlError:
        shares = False
    if not shares and request.solve_on is None:
        return None
    return PlanPeers(PeerExchange(client, request.solve_on or ""), shares=shares, solves=request.solve_on is not None)
