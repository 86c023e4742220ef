"""Costs and plans of paired devices, for one run of planning.

Their costs are used only if a sample measured here agrees.
"""

import platform
import time
from pathlib import Path

from port_agent.energy.sources.power_models import machine_name
from port_agent.malloc import PreloadMode, preload_mode
from port_agent.peers.exchange.answers import NotAnsweredError, PeerContent, Topic
from port_agent.prepare.peer_plans import PeerLine, PeerPlans
from port_planner.profiling import kept_costs
from port_planner.profiling.cpu_cache import last_level_bytes
from port_planner.profiling.operator_profile import MeasuredCosts
from port_planner.profiling.shared_costs import SharedCostsError, pack_shared, shared_name, unpack_shared


class PlanPeers(PeerPlans):
    """What paired devices contribute to one run of planning: plans, and costs if `shares`."""

    def __init__(self, line: PeerLine, *, shares: bool, solves: bool) -> None:
        super().__init__(line, shares=shares, solves=solves)
        self._costs_of: PeerContent | None = None

    def costs(self, threads: int) -> bytes:
        """Return the costs of operators on another device like this one, with only their form checked; empty if none
        are shared.
        """
        self._costs_of = None
        if not self._shares:
            return b""
        try:
            found = self._line.shared(Topic.COSTS, _costs_name(threads))
            unpack_shared(found.content, time.time())
        except NotAnsweredError as error:
            self._note(f"operator costs measured here: {error}")
            return b""
        except SharedCostsError as error:
            self._accuse(found, str(error))
            return b""
        self._costs_of = found
        return found.content

    def judge_costs(self, threads: int, measured: MeasuredCosts) -> None:
        """Report how the costs from `costs` were used, and share what was measured here."""
        given = self._costs_of
        if given is not None and measured.disputed:
            self._accuse(given, measured.disputed)
        elif given is not None and measured.taken_over:
            self._note(
                f"costs of {measured.taken_over} operators from {given.name}, a sample of them measured here too"
            )
        if self._shares:
            kept = kept_costs.read_costs(kept_costs.operators_folder(), _costs_context(threads), time.time())
            if kept:
                self._share(Topic.COSTS, _costs_name(threads), pack_shared(kept))


def _costs_context(threads: int) -> str:
    seen = preload_mode() is PreloadMode.PRELOAD
    return kept_costs.context(threads, last_level_bytes(), workspace_seen=seen)


def _costs_name(threads: int) -> str:
    board = machine_name(Path("/")) or f"{platform.system()} {platform.machine()}"
    return shared_name(_costs_context(threads), board)
