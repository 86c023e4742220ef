"""From sensors to the decision, with the health items on the way."""

from dataclasses import replace
from pathlib import Path

from port_agent.facts import Answer, Facts, Fault, IdleSignal, OwnUse, Platform, Power, SensorThread
from port_agent.facts.sensor_thread import DEADLINE_S
from port_agent.health.conditions import HealthBoard
from port_agent.policy.config import sensor_options
from port_agent.policy.decide import Memory, Now, Policy, PolicyDecision, decide
from port_agent.system.clock import CLOCK_SET_AFTER_S, Clock, local_time
from port_planner.base.units import format_bytes, format_seconds

JUMP_S = 60.0
"""Seconds of the smallest step of the wall clock that counts; a smaller one moves no window noticeably."""
_JUMP_SHOWN_S = 3600.0
MIN_SLEEP_S = 1.0
"""Seconds of the shortest suspension that is noticed; shorter ones cannot be told apart from the time
between reading two clocks.
"""
WOKEN_S = 60.0
"""Seconds after waking in which the device counts as in use: somebody opened its lid or pressed a key."""


_UNREAD = ("power", "temperature", "throttling", "disk", "memory", "cpu load")
"""Sensors that the policy needs, by the names of their faults; all of them are reported while nothing can be read."""


class Admission:
    """Reads the sensors, remembers the hysteresis, and makes the decision."""

    def __init__(self, platform: Platform, clock: Clock, health: HealthBoard, state_dir: Path) -> None:
        self.platform = platform
        self.facts = Facts()
        self.decision: PolicyDecision | None = None
        self._clock, self._health, self._state_dir = clock, health, state_dir
        self._memory = Memory()
        self._clock_offset_s: float | None = None
        self._slept_s = clock.uptime_s() - clock.monotonic_s()
        self._woke_s: float | None = None
        self._sensors = SensorThread()

    async def read(self, policy: Policy, own: OwnUse) -> Facts:
        """Return the sensors' current readings; those that do not answer in time are faults."""
        options = sensor_options(self._state_dir, policy)
        platform, now_s = self.platform, self._clock.monotonic_s()
        facts = await self._sensors.read(platform.tree, lambda: platform.read(options, own, now_s))
        if facts is not None:
            return facts
        silent = ", ".join(sorted(map(str, platform.tree.silent)))
        return Facts(faults=tuple(Fault(sensor, f"{silent} did not answer") for sensor in _UNREAD))

    def close(self) -> None:
        """Stop reading sensors."""
        self._sensors.close()

    def judge(self, facts: Facts, policy: Policy, written_today: int, pause: str) -> PolicyDecision:
        """Return the decision for the readings; `pause`: why everything is paused, or ""."""
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        signals = (*facts.idle_signals, *self._wake_signal(now_s))
        facts = replace(facts, flash_written_today_bytes=written_today, pause=pause, idle_signals=signals)
        self.facts = facts
        self._report_sensors(facts, now_s, wall_s)
        self._report_budget(facts, policy, now_s, wall_s)
        self.decision = decide(facts, policy, Now(now_s, local_time(wall_s), wall_s >= CLOCK_SET_AFTER_S), self._memory)
        self._memory = self.decision.memory
        return self.decision

    def slept_s(self) -> float:
        """Return how long the machine slept since the last call, or 0.

        After sleep, somebody is assumed to be present.
        """
        now_s = self._clock.monotonic_s()
        before_s, self._slept_s = self._slept_s, self._clock.uptime_s() - now_s
        if self._slept_s - before_s < MIN_SLEEP_S:
            return 0.0
        self._woke_s = now_s
        return self._slept_s - before_s

    def clock_jump_s(self) -> float:
        """Return by how much the wall clock was set since the last call, or 0; sleep is not a jump."""
        now_s, wall_s = self._clock.monotonic_s(), self._clock.wall_s()
        offset_s = wall_s - self._clock.uptime_s()
        before, self._clock_offset_s = self._clock_offset_s, offset_s
        if wall_s < CLOCK_SET_AFTER_S:
            shown = local_time(wall_s).strftime("%Y-%m-%d %H:%M")
            self._health.report("clock-unset", now_s, wall_s, shown=shown)
        else:
            self._health.clear("clock-unset")
        if before is None or abs(offset_s - before) < JUMP_S:
            return 0.0
        jump_s = offset_s - before
        jump = f"{format_seconds(abs(jump_s))} {'forward' if jump_s > 0 else 'back'}"
        self._health.report("clock-jumped", now_s, wall_s, lasts_s=_JUMP_SHOWN_S, jump=jump)
        return jump_s

    def _wake_signal(self, now_s: float) -> tuple[IdleSignal, ...]:
        if self._woke_s is None or now_s - self._woke_s >= WOKEN_S:
            return ()
        return (IdleSignal("wake", Answer.NO, f"woke from sleep {now_s - self._woke_s:.0f} s ago"),)

    def _report_sensors(self, facts: Facts, now_s: float, wall_s: float) -> None:
        for fault in facts.faults:
            self._health.report("sensor", now_s, wall_s, key=fault.sensor, sensor=fault.sensor, reason=fault.reason)
        self._health.keep_only("sensor", {fault.sensor for fault in facts.faults})
        broken = any(fault.sensor.startswith("temperature") for fault in facts.faults)
        if facts.temperature_c is None and not broken:
            self._health.report("no-temperature", now_s, wall_s)
        else:
            self._health.clear("no-temperature")

    def _report_budget(self, facts: Facts, policy: Policy, now_s: float, wall_s: float) -> None:
        budget = policy.flash_write_budget_bytes_per_day
        if facts.flash_written_today_bytes >= budget:
            written = format_bytes(facts.flash_written_today_bytes)
            self._health.report("flash-budget", now_s, wall_s, written=written, budget=format_bytes(budget))
        else:
            self._health.clear("flash-budget")


def without_plug(facts: Facts) -> Facts:
    """Return `facts` for when the power sensors do not answer, so that unplugging would go unnoticed."""
    silent = Fault("power", f"the power sensors did not answer within {format_seconds(DEADLINE_S)}")
    return replace(facts, power=Power.UNKNOWN, power_detail=silent.reason, faults=(*facts.faults, silent))
