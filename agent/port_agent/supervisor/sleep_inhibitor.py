"""Keeps the machine from going to sleep while a job may run on external power.

A process keeps it awake until that process ends: `systemd-inhibit` with logind, `caffeinate` on a Mac. It ends when the
pipe to its standard input closes, so also if the agent is killed.
"""

import asyncio
import contextlib
from collections.abc import Callable
from enum import Enum

from port_agent.facts import Answer, Facts, Power
from port_agent.facts.platform import NO_INHIBITOR
from port_agent.policy.decide import Policy, PolicyDecision, device_in_use

HOLDER = ("sh", "-c", "echo held; exec cat >/dev/null")
"""Command that reports that the lock was granted, and keeps it until its standard input ends."""
RETRY_S = 600.0
"""Seconds before another attempt after a refusal, which only an administrator can change."""
_PATIENCE_S = 10.0
_PASSING = frozenset({"hot", "throttled", "settling"})
"""Conditions that pass by themselves within minutes; a machine that slept meanwhile would
not wake up when they have.
"""


class Inhibition(Enum):
    """What is inhibited, by logind's names."""

    SLEEP = "sleep"
    """A request to sleep is rejected, except with an administrator's rights; closing the lid is obeyed."""
    IDLE = "idle"
    """The machine does not fall asleep by itself; its user may send it to sleep."""


def inhibition(decision: PolicyDecision, facts: Facts, policy: Policy, *, has_work: bool) -> Inhibition | None:
    """Return what must be inhibited now; None: the machine may sleep."""
    may_run = decision.state.trains or _PASSING.issuperset(decision.codes)
    powered = (policy.assume_power or facts.power) in (Power.EXTERNAL, Power.ASSUMED)
    if not (policy.keep_awake and has_work and may_run and powered):
        return None
    left_alone = device_in_use(facts.idle_signals) is Answer.NO
    return Inhibition.SLEEP if left_alone else Inhibition.IDLE


class SleepInhibitor:
    """Inhibits sleep on request, with the command that `command` returns; None if there is no command."""

    def __init__(
        self,
        command: Callable[[str], tuple[str, ...] | None],
        monotonic_s: Callable[[], float],
        retry_s: float = RETRY_S,
    ) -> None:
        self._command, self._monotonic_s, self._retry_s = command, monotonic_s, retry_s
        self._changed = asyncio.Event()
        self._wanted: Inhibition | None = None
        self._held: Inhibition | None = None
        self._holder: asyncio.subprocess.Process | None = None
        self._refused_s: float | None = None
        self.trouble = ""
        """Why sleep is not inhibited although it should be."""

    def want(self, wanted: Inhibition | None) -> None:
        """Set what must be inhibited from now on."""
        ended = self._holder is not None and self._holder.returncode is not None
        waited = self._refused_s is None or self._monotonic_s() - self._refused_s >= self._retry_s
        if wanted is not self._wanted or ended or (self.trouble and waited):
            self._wanted = wanted
            self._changed.set()

    @property
    def held(self) -> Inhibition | None:
        """What is inhibited now."""
        return self._held

    async def run(self) -> None:
        """Acquire and release inhibitors until cancelled; cancelling releases them."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                if self._holder is not None:
                    await self._give_back()
                self.trouble, self._refused_s = "", None
                if self._wanted is not None:
                    await self._take(self._wanted)
        finally:
            if self._holder is not None:
                await self._give_back()

    async def _take(self, wanted: Inhibition) -> None:
        command = self._command(wanted.value)
        if command is None:
            self.trouble = NO_INHIBITOR
        else:
            pipe = asyncio.subprocess.PIPE
            try:
                self._holder = await asyncio.create_subprocess_exec(
                    *command, *HOLDER, stdin=pipe, stdout=pipe, stderr=pipe
                )
                self.trouble = await _refusal(self._holder)
            except OSError as error:
                self.trouble = f"{command[0]}: {error.strerror}"
        if self.trouble:
            self._refused_s = self._monotonic_s()
            await self._give_back()
        else:
            self._held = wanted

    async def _give_back(self) -> None:
        holder, self._holder, self._held = self._holder, None, None
        if holder is not None and holder.stdin is not None:
            holder.stdin.close()
            try:
                await asyncio.wait_for(holder.wait(), _PATIENCE_S)
            except TimeoutError:
                holder.kill()
                await holder.wait()


async def _refusal(holder: asyncio.subprocess.Process) -> str:
    """Return why the lock was not granted; empty if it was granted."""
    if holder.stdout is None or holder.stderr is None:
        return "no pipe to its process"
    try:
        async with asyncio.timeout(_PATIENCE_S):
            if await holder.stdout.readline():
                return ""
            errors = (await holder.stderr.read()).decode(errors="replace").strip()
    except TimeoutError:
        return f"no answer within {_PATIENCE_S:.0f} s"
    with contextlib.suppress(ProcessLookupError):
        await holder.wait()
    return errors.rpartition("\n")[2] or f"ended with exit code {holder.returncode}"


def sleep_text(inhibitor: SleepInhibitor, policy: Policy) -> str:
    """Return whether sleep is held off and why, in words."""
    if not policy.keep_awake:
        return "not held off (when.keep_awake = false)"
    if inhibitor.held is Inhibition.SLEEP:
        return "held off while a job may run"
    if inhibitor.held is Inhibition.IDLE:
        return "held off while a job may run, unless whoever uses the device asks for it"
    return f"not held off: {inhibitor.trouble}" if inhibitor.trouble else "not held off: no job may run"
