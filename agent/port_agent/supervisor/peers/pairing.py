"""Pairing as the supervisor runs it: one at a time, in a process that lives for minutes, every outcome in the history."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from port_agent.peers.announcement import NAME_LIMIT, clean
from port_agent.system.python_process import NEUTRAL_DIRECTORY, module_command, module_environment
from port_planner.base.errors import ExitCode, PortError

SHOW_MODULE, JOIN_MODULE = "port_agent.peers.pairing.show", "port_agent.peers.pairing.join"
_START_S = 60.0
"""Until a code is shown: a slow board reads its libraries and makes its first key."""
_JOIN_S = 90.0
_LINE_LIMIT_BYTES = 16 << 10


class PairingRefusedError(PortError):
    """No pairing now, or it failed."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class PairingPlace:
    """What a pairing process is told of this device."""

    state_dir: Path
    name: str
    fleet_port: int

    @property
    def words(self) -> tuple[str, ...]:
        """Its arguments."""
        return str(self.state_dir), self.name, str(self.fleet_port)


class NewPartner(msgspec.Struct, frozen=True):
    """A device that just proved that it knows the code."""

    certificate: bytes
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    address: tuple[str, int]


class _Line(msgspec.Struct):
    """What a pairing process says; one of these is set."""

    code: str = ""
    port: int = 0
    left_s: float = 0.0
    wrong: str = ""
    tries_left: int = 0
    caller: str = ""
    trouble: str = ""
    failed: str = ""
    paired: NewPartner | None = None


class PairingDesk:
    """Shows a code or types one in; `on_paired` takes the new device, `audit` what happened."""

    def __init__(self, on_paired: Callable[[NewPartner], str], audit: Callable[[str], None]) -> None:
        """`on_paired` returns what the new device is called."""
        self._on_paired, self._audit = on_paired, audit
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._outcome: dict[str, object] = {"state": "none"}
        self.on_end: Callable[[], None] = lambda: None
        """Called when no code is shown any more."""

    async def show(self, place: PairingPlace, port: int, lifetime_s: float) -> dict[str, object]:
        """Return the code that the other device is to be told, and where this one waits.

        Raises PairingRefusedError.
        """
        await self._begin(SHOW_MODULE, *place.words, str(port), str(lifetime_s))
        try:
            async with asyncio.timeout(_START_S):
                line = await self._line()
        except TimeoutError:
            line = _Line(failed=f"no code came within {_START_S:.0f} s")
        if not line.code:
            await self._finish_process()
            raise PairingRefusedError(line.failed or "the pairing process ended")
        self._audit(f"a pairing code is shown for {line.left_s / 60:.0f} minutes")
        self._outcome = {"state": "shown"}
        self._watch = asyncio.create_task(self._follow())
        return {"code": line.code, "port": line.port, "left_s": line.left_s}

    async def join(self, place: PairingPlace, digits: str, host: str, port: int) -> str:
        """Return the name of the device that shows this code; raises PairingRefusedError."""
        await self._begin(JOIN_MODULE, *place.words, host, str(port), digits=digits)
        try:
            async with asyncio.timeout(_JOIN_S):
                line = await self._line()
        except TimeoutError:
            line = _Line(failed=f"the other device took longer than {_JOIN_S:.0f} s")
        await self._finish_process()
        if line.paired is None:
            reason = line.failed or "the pairing process ended"
            self._audit(f"pairing with {host} failed: {reason}")
            raise PairingRefusedError(reason)
        return self._take(line.paired)

    async def outcome(self, wait_s: float) -> dict[str, object]:
        """Return how the code that is shown fares, at the latest after `wait_s`; earlier when that changes."""
        if self.shows_code:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
        return dict(self._outcome)

    @property
    def shows_code(self) -> bool:
        """Whether a code is shown."""
        return self._outcome["state"] == "shown"

    @property
    def is_busy(self) -> bool:
        """Whether a pairing is under way."""
        return self._process is not None and self._process.returncode is None

    def stop(self) -> None:
        """Show no code any more."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self.shows_code:
            self._end({"state": "failed", "reason": "stopped"})

    async def _finish_process(self) -> None:
        """End a process that has said all that is wanted of it."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def close(self) -> None:
        """Show no code any more, and wait for the process to be gone."""
        self.stop()
        await self._finish_process()

    async def _begin(self, module: str, *words: str, digits: str = "") -> None:
        if self.is_busy:
            raise PairingRefusedError(
                "a pairing is under way; wait for its end, or stop it with Ctrl-C where it was begun"
            )
        self._process = await asyncio.create_subprocess_exec(
            *module_command(module), *words,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            cwd=NEUTRAL_DIRECTORY, env=module_environment(), limit=_LINE_LIMIT_BYTES,
        )  # fmt: skip
        if self._process.stdin is not None:
            self._process.stdin.write(f"{digits}\n".encode())  # not among the arguments, which every user can list
            self._process.stdin.close()

    async def _line(self) -> _Line:
        """Return the next line; an empty one at the end, or for a line that is none."""
        if self._process is None or self._process.stdout is None:
            return _Line()
        with contextlib.suppress(ValueError, msgspec.MsgspecError):
            return msgspec.json.decode(await self._process.stdout.readline(), type=_Line)
        return _Line()

    async def _follow(self) -> None:
        """Take what the process says until a device is paired or it gives up."""
        while self.shows_code:
            line = await self._line()
            if not self.shows_code:
                return  # it was stopped meanwhile
            if line.paired is not None:
                self._end({"state": "paired", "name": self._take(line.paired)})
            elif line.wrong:
                self._audit(
                    f"a wrong pairing code came from {clean(line.wrong, NAME_LIMIT)}; {line.tries_left} tries left"
                )
                self._outcome = {**self._outcome, "tries_left": line.tries_left}
                self._changed.set()
            elif not line.caller:
                reason = line.failed or "the pairing process ended"
                self._audit(f"no device was paired: {reason}")
                self._end({"state": "failed", "reason": reason})

    def _take(self, partner: NewPartner) -> str:
        name = self._on_paired(partner)
        self._audit(f"paired with {name} at {partner.address[0]}")
        return name

    def _end(self, outcome: dict[str, object]) -> None:
        self._outcome = outcome
        self._changed.set()
        self.on_end()
