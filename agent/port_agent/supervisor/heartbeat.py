"""What this device reports to its paired devices, read from the supervisor's parts."""

from dataclasses import dataclass
from datetime import date

from port_agent.energy.sources.power_source import Kind
from port_agent.facts.readings import Answer, Power
from port_agent.peers.announcement import BOARD_LIMIT, NAME_LIMIT, clean
from port_agent.peers.connection.messages import Heartbeat
from port_agent.supervisor.context import DaemonContext
from port_agent.supervisor.job.plan_revision import SOLVER_BYTES
from port_agent.supervisor.peers.peer_discovery import board_name, public_state
from port_agent.system.clock import local_time
from port_planner.base.units import format_bytes

_CHARGING = {Power.EXTERNAL: True, Power.ASSUMED: True, Power.BATTERY: False}


@dataclass(slots=True)
class HeartbeatSource:
    """Reports the device's activity; remembers the meter's reading at the beginning of the day."""

    context: DaemonContext
    board: str = ""
    _day: date | None = None
    _began_joules: float = 0.0

    def heartbeat(self, name: str) -> Heartbeat:
        """Return the current report."""
        context = self.context
        self.board = self.board or clean(board_name(), BOARD_LIMIT)
        alive = any(not job.state.is_over for job in context.store.all())
        run = context.runners.shown.status()
        meter = context.meter.snapshot() if context.meter is not None else None
        return Heartbeat(
            name=clean(name, NAME_LIMIT),
            board=self.board,
            state=public_state(context.runners, has_work=alive).value,
            charging=_CHARGING.get(context.admission.facts.power),
            job=clean(run.name, NAME_LIMIT) if run is not None and not self._is_federated(run.id) else None,
            progress=min(1.0, run.step / run.total_steps) if run is not None and run.total_steps else None,
            today_joules=self._today(meter.total_joules) if meter is not None and meter.source else None,
            is_measured=meter is not None and meter.kind == Kind.MEASURED.value,
        )

    def _is_federated(self, job_id: int) -> bool:
        """Return whether a job is federated.

        Its name is only for members, but all paired devices receive the report.
        """
        return any(job.id == job_id and job.spec.federated for job in self.context.store.all())

    def objection(self) -> str:
        """Return why this device solves nothing for others now (the reason for not
        training, or its own work), or "".
        """
        decision, facts = self.context.admission.decision, self.context.admission.facts
        if decision is None:
            return "it has just started"
        if not decision.state.trains:
            return "; ".join(decision.reasons)
        if self.context.runners.busy():
            return "it has work of its own"
        free = facts.available_memory_bytes
        if free is not None and free < SOLVER_BYTES:
            return f"{format_bytes(free)} of memory are free, but solving may take {format_bytes(SOLVER_BYTES)}"
        return ""

    def not_federating(self) -> str:
        """Return why this device does not take part in a round now, or ""."""
        decision, facts = self.context.admission.decision, self.context.admission.facts
        if decision is None:
            return "it has just started"
        if not decision.state.trains:
            return "; ".join(decision.reasons)
        return "its network is metered" if facts.metered is Answer.YES else ""

    def _today(self, total_joules: float) -> float:
        """Return the joules since midnight, or since the agent started if that is later."""
        today = local_time(self.context.clock.wall_s()).date()
        if self._day is None:
            self._day = today
        elif self._day != today:
            self._day, self._began_joules = today, total_joules
        return max(0.0, total_joules - self._began_joules)
