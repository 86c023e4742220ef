"""Pairing in the supervisor: one at a time, in a process that lives for minutes; every outcome
is recorded in the history.
"""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from port_agent.peers.announcement import NAME_LIMIT, clean
from port_agent.peers.pairing.protocol import (
    CallersTurnedAway,
    CodeShown,
    JoinDevice,
    NewPartner,
    PairingEvent,
    PairingFailed,
    PairingPlace,
    ShowCode,
    WrongCode,
)
from port_agent.system.helper_process import AsyncHelper, HelperCommand, start_helper
from port_planner.base.errors import ExitCode, PortError

SHOW_MODULE, JOIN_MODULE = "port_agent.peers.pairing.show", "port_agent.peers.pairing.join"
_START_S = 60.0
"""Seconds until a code is shown: a slow board loads its libraries and generates its first key."""
_JOIN_S = 90.0
_EVENTS: "msgspec.json.Decoder[PairingEvent]" = msgspec.json.Decoder(PairingEvent)
_ENDED = PairingFailed("the pairing process ended")


class PairingRefusedError(PortError):
    """Pairing is not possible now, or it failed."""

    exit_code = ExitCode.IMPOSSIBLE


class PairingDesk:
    """Shows a code or enters one. `on_paired` receives the new device, and `audit` receives events."""

    def __init__(self, on_paired: Callable[[NewPartner], str], audit: Callable[[str], None]) -> None:
        """`on_paired` returns the name of the new device."""
        self._on_paired, self._audit = on_paired, audit
        self._helper: AsyncHelper[PairingEvent] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._outcome: dict[str, object] = {"state": "none"}
        self.on_end: Callable[[], None] = lambda: None
        """Called when a code is no longer shown."""

    async def show(self, place: PairingPlace, port: int, lifetime_s: float) -> dict[str, object]:
        """Return the code for the other device, and the address at which this device waits.

        Raises PairingRefusedError.
        """
        late = f"no code came within {_START_S:.0f} s"
        event = await self._begin(SHOW_MODULE, ShowCode(place, port, lifetime_s), _START_S, late)
        if self._helper is None or not isinstance(event, CodeShown):
            await self._finish()
            raise PairingRefusedError((event if isinstance(event, PairingFailed) else _ENDED).reason)
        self._audit(f"a pairing code is shown for {event.left_s / 60:.0f} minutes")
        self._outcome = {"state": "shown"}
        self._watch = asyncio.create_task(self._follow(self._helper))
        return {"code": event.code, "port": event.port, "left_s": event.left_s}

    async def join(self, place: PairingPlace, digits: str, hosts: tuple[str, ...], port: int) -> tuple[str, str]:
        """Return the name and the address of the device that shows this code.

        Raises PairingRefusedError, OSError, PortError.
        """
        late = f"the other device took longer than {_JOIN_S:.0f} s"
        event = await self._begin(JOIN_MODULE, JoinDevice(place, digits, hosts, port), _JOIN_S, late)
        await self._finish()
        if not isinstance(event, NewPartner):
            reason = (event if isinstance(event, PairingFailed) else _ENDED).reason
            self._audit(f"pairing with {', '.join(hosts)} failed: {reason}")
            raise PairingRefusedError(reason)
        return self._take(event), event.address[0]

    async def outcome(self, wait_s: float) -> dict[str, object]:
        """Return the state of the code that is shown, after at most `wait_s`; earlier if it changes."""
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
        return self._helper is not None and self._helper.runs

    def stop(self) -> None:
        """Stop showing a code."""
        if self._helper is not None:
            self._helper.kill()
        if self.shows_code:
            self._end({"state": "failed", "reason": "stopped"})

    async def close(self) -> None:
        """Stop showing a code, and wait for the process to end."""
        self.stop()
        await self._finish()

    async def _finish(self) -> None:
        """End a process that is no longer needed."""
        if self._helper is not None:
            await self._helper.close()

    async def _begin(self, module: str, request: ShowCode | JoinDevice, within_s: float, late: str) -> PairingEvent:
        """Return the first event of a process; raise if it failed."""
        if self.is_busy:
            raise PairingRefusedError(
                "a pairing is in progress; wait for its end, or stop it with Ctrl-C where it was started"
            )
        helper = self._helper = await start_helper(HelperCommand(module), _EVENTS, request)
        try:
            async with asyncio.timeout(within_s):
                return await helper.event() or _ENDED
        except TimeoutError:
            return PairingFailed(late)

    async def _follow(self, helper: "AsyncHelper[PairingEvent]") -> None:
        """Handle the process's events until a device is paired or the process gives up."""
        while self.shows_code:
            event = await helper.event() or _ENDED
            if not self.shows_code:
                return  # it was stopped meanwhile
            match event:
                case NewPartner():
                    self._end(self._paired(event))
                case CallersTurnedAway():
                    host = clean(event.host, NAME_LIMIT)
                    self._audit(
                        f"{host} keeps calling while a pairing code is shown; it is answered less often, and the "
                        "code stays valid"
                    )
                    self._outcome = {**self._outcome, "turned_away": host}
                    self._changed.set()
                case WrongCode():
                    self._audit(
                        f"a wrong pairing code came from {clean(event.host, NAME_LIMIT)}; {event.tries_left} tries left"
                    )
                    self._outcome = {**self._outcome, "tries_left": event.tries_left}
                    self._changed.set()
                case PairingFailed():
                    self._audit(f"no device was paired: {event.reason}")
                    self._end({"state": "failed", "reason": event.reason})

    def _paired(self, partner: NewPartner) -> dict[str, object]:
        """Return the outcome for a device that proved to know the code."""
        try:
            return {"state": "paired", "name": self._take(partner)}
        except (PortError, OSError) as error:
            reason = f"{clean(partner.name, NAME_LIMIT)} knows the code but was not paired: {error}"
            self._audit(reason)
            return {"state": "failed", "reason": reason}

    def _take(self, partner: NewPartner) -> str:
        name = self._on_paired(partner)
        self._audit(f"paired with {name} at {partner.address[0]}")
        return name

    def _end(self, outcome: dict[str, object]) -> None:
        self._outcome = outcome
        self._changed.set()
        self.on_end()
