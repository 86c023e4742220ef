"""The execution of a bundle's programs: an executor for each, and their shared constants, scratch files,
thread teams and transfers.
"""

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from port_agent.backend.base import Backend
from port_agent.backend.raw_bytes import placed
from port_agent.backend.team_threads import CpuTeams
from port_agent.backend.transfer_ring import TransferRing
from port_agent.paging.pager import BURST, Pager
from port_agent.training.executor import Executor, Gate, StepContents, no_gate
from port_agent.training.packing_probe import PackingProbe
from port_agent.training.programs import Programs
from port_agent.training.state.checkpoint import StateStore
from port_agent.training.state.resident_state import Persistents, initial_contents
from port_agent.training.step_paging import Scratch
from port_planner.ir.bundle.bundle import Bundle
from port_planner.ir.graph import Role, storage_key

_CONSTANT = storage_key(Role.CONSTANT, "")


class Executors:
    """Executors by the names of graphs, each created on first use; they pass a common gate when the run is interrupted.

    `page_dirs`: a directory on each medium to which plans page, in their order. `probe_packing`: measure
    the cost of packing tensors.
    """

    def __init__(
        self,
        bundle: Bundle,
        programs: Programs,
        persistents: Persistents,
        store: StateStore,
        pager: Pager,
        backend: Backend,
        page_dirs: Sequence[Path],
        *,
        probe_packing: bool,
    ) -> None:
        self._programs, self._persistents, self._store, self._pager = programs, persistents, store, pager
        self._backend, self._page_dirs, self._probe_packing = backend, page_dirs, probe_packing
        manifest = bundle.manifest
        self._packs = [target.packs_pages for target in next(iter(bundle.costs.values())).device.targets]
        self._teams = CpuTeams(manifest.threads, manifest.teams)
        through_ring = manifest.placed and not backend.unified
        self._ring = TransferRing(backend, BURST) if through_ring else None
        self.constants = _constants(bundle)
        self.scratch: dict[str, tuple[Scratch, ...]] = {}
        self.probes: dict[str, PackingProbe] = {}
        self._made: dict[tuple[int, str], Executor] = {}
        self.interrupted = False
        self.gate: Gate = no_gate

    def of(self, name: str) -> Executor:
        """Return the executor of one graph's program under the current plan. Raises what `Programs.of` does."""
        program, key = self._programs.of(name), (self._programs.plan_index, name)
        if key not in self._made or self._made[key].program is not program:
            if name not in self.scratch:
                pairs = itertools.zip_longest(self._page_dirs, self._packs[: len(self._page_dirs)])
                self.scratch[name] = tuple(Scratch(folder, packs=packed) for folder, packed in pairs)
            if self._probe_packing:
                self.probes[name] = PackingProbe(program.graph)
            watchers = self.probes[name].watchers() if name in self.probes else {}
            contents = StepContents(self.constants, self._persistents.resident, self._store, self._persistents.dirty)
            self._made[key] = Executor(
                program, contents, self._pager, self.scratch[name], self._backend, watchers, self._teams, self._ring
            )
        executor = self._made[key]
        executor.interrupted, executor.gate = self.interrupted, self.pass_gate
        return executor

    def interrupt(self) -> None:
        """Make `gate` be called before the next instruction; any thread may do so."""
        self.interrupted = True
        for executor in list(self._made.values()):
            executor.interrupted = True

    def pass_gate(self) -> None:
        """Call `gate`, which blocks for a pause and raises to leave; the interruption is then cleared."""
        self.gate()
        self.interrupted = False
        for executor in self._made.values():
            executor.interrupted = False

    def close(self) -> None:
        """Delete scratch files, and end teams and the transfer thread."""
        for scratch in itertools.chain(*self.scratch.values()):
            scratch.close()
        self._teams.close()
        if self._ring is not None:
            self._ring.close()


def _constants(bundle: Bundle) -> dict[str, torch.Tensor]:
    """Return the constants that graphs use, each on the device that uses it."""
    devices = {s.key: s.device for graph in bundle.graphs.values() for s in graph.storages}
    sizes = {
        key: member.nbytes for key, member in bundle.tensors.items() if key in devices and key.startswith(_CONSTANT)
    }
    nothing = torch.empty(0, dtype=torch.uint8)
    return {
        key: placed(torch.cat([nothing, *initial_contents(bundle, key, nbytes)]), devices[key], nbytes)
        for key, nbytes in sizes.items()
    }
