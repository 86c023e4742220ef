"""The supervisor's fleet of paired devices: nothing runs or is loaded before a device is paired."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.health.conditions import HealthBoard
from port_agent.malloc import release_free_memory
from port_agent.peers.connection.messages import Heartbeat
from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient, PeerServer, Topic
from port_agent.peers.identity.device_id import DeviceIdError, read_device_id
from port_agent.peers.identity.keys import own_identity
from port_agent.peers.pairing.protocol import NewPartner
from port_agent.peers.state import PublicState
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.peers.peer_discovery import PeerDiscovery
from port_agent.system import VERSION
from port_agent.system.clock import Clock
from port_planner.base.errors import PortError

if TYPE_CHECKING:
    from port_agent.peers.fleet.fleet import Fleet
    from port_agent.peers.fleet.paired import PairedDevice, PairedDevices
    from port_agent.peers.identity.device_id import DeviceId

PAIRED_FOLDER = "paired"
ANY_PEER = "any"
"""Stands for a device's name: any device that answers, idle ones first."""
_RETRY_S = 60.0
_STOP_PATIENCE_S = 2.0
"""Seconds to wait when stopping; a goodbye to each device takes milliseconds."""


class FleetKeeper:
    """Paired devices and the connections to them."""

    def __init__(
        self,
        state_dir: Path,
        health: HealthBoard,
        clock: Clock,
        discovery: PeerDiscovery,
        heartbeat: Callable[[], Heartbeat],
        audit: Callable[[str], None],
        on_identity: Callable[[str, str], None],
        server: PeerServer,
    ) -> None:
        """`on_identity` receives the id of this device, full and short, once it is known."""
        self._state_dir, self._health, self._clock = state_dir, health, clock
        self._discovery, self._heartbeat, self._audit, self._on_identity = discovery, heartbeat, audit, on_identity
        self._server = server
        self._devices: PairedDevices | None = None
        self._fleet: Fleet | None = None
        self._task: asyncio.Task[None] | None = None
        self._options: AgentOptions | None = None

    @property
    def port(self) -> int:
        """The port for paired devices; 0 while there are none."""
        return self._options.peer_port if self._options is not None and self._task is not None else 0

    def apply(self, options: AgentOptions) -> None:
        """Start or restart according to the configuration; needs a running event loop."""
        before, self._options = self._options, options
        if before is not None and _places(before) != _places(options):
            self._end()
        if any((self._state_dir / PAIRED_FOLDER).glob("*.json")):
            self._start()

    def paired(self, partner: NewPartner) -> str:
        """Trust a device from now on; return its name.

        Raises OSError, and PairedDeviceError if there are too many.
        """
        from port_agent.peers.fleet.paired import device_of

        return self.trust(device_of(partner.certificate, partner.name, self.now(), partner.address))

    def trust(self, device: "PairedDevice", introduced_by: "DeviceId | None" = None) -> str:
        """Trust a device from now on, either after pairing or because another device introduced it; return its name.

        Raises as `paired` does.
        """
        known = self.devices().add(replace(device, introduced_by=introduced_by))
        if self._fleet is not None:
            self._fleet.refresh()
        else:
            self._start()
        return known.name

    def now(self) -> float:
        """Return the Unix time of this device's clock."""
        return self._clock.wall_s()

    def unpair(self, name: str, *, for_good: bool = True) -> PeerClient:
        """Stop trusting a device, whatever it is doing, and return it. `for_good`: also if it is introduced again.

        Raises PairedDeviceError if there is no such device, OSError.
        """
        devices = self.devices()
        device = devices.find(name)
        if for_good and device.introduced_by is not None:
            devices.refuse(device.id)
        if self._fleet is not None:
            self._fleet.drop(device.id)
        else:
            devices.remove(device.id)
        self._audit(f"unpaired {device.name} ({device.id.group})")
        if not devices.all():
            self._end()
        return PeerClient(device.name, str(device.id))

    async def own_id(self) -> str:
        """Return the id of this device; raises IdentityError, OSError."""
        return str((await asyncio.to_thread(own_identity, self._state_dir)).id)

    async def ask(
        self, whom: str, topic: Topic, name: str, problem: bytes = b"", seconds: float = 0.0
    ) -> "tuple[PairedDevice, bytes]":
        """Return a paired device's answer, and the device. `whom`: its name or id, or `ANY_PEER`.

        Raises NotAnsweredError with the reason of each, PairedDeviceError.
        """
        devices = self.devices()
        wanted = devices.all() if whom == ANY_PEER else (devices.find(whom),)
        connected = [device for device in wanted if self._fleet is not None and self._fleet.roster.member(device.id)]
        reasons = []
        for device in sorted(connected, key=self._is_busy) if whom == ANY_PEER else wanted:
            try:
                if self._fleet is None:
                    raise NotAnsweredError("it is not connected")
                return device, await self._fleet.ask(device.id, topic, name, problem, seconds)
            except NotAnsweredError as error:
                reasons.append(f"{device.name}: {error}")
        raise NotAnsweredError("; ".join(reasons) or "no paired device is connected")

    def cut(self, name: str, reason: str) -> None:
        """Temporarily block a device that gave a wrong answer; raises PairedDeviceError."""
        device = self.devices().find(name)
        if self._fleet is not None:
            self._fleet.cut(device, reason)

    def _is_busy(self, device: "PairedDevice") -> bool:
        """Return whether a device last reported work or no external power, in which case others are asked first."""
        latest = self._fleet.roster.last_heartbeat(device.id) if self._fleet is not None else None
        return latest is None or latest[1].state != PublicState.IDLE.value or latest[1].charging is False

    def _audit_device(self, name: str, what: str) -> None:
        self._audit(f"{name}: {what}")

    def announce(self) -> None:
        """Report this device's activity to the others soon."""
        if self._fleet is not None:
            self._fleet.announce()

    def look(self) -> None:
        """Connect to a device that was just discovered."""
        if self._fleet is not None:
            self._fleet.look()

    def rows(self) -> list[dict[str, object]]:
        """Return the paired devices as plain values."""
        if self._devices is None:
            return []
        return [self._row(device) for device in self._devices.all()]

    def device_called(self, name: str) -> PeerClient | None:
        """Return the only paired device with this name, or with this id in any spelling; None if
        there is none, or several.
        """
        with contextlib.suppress(DeviceIdError):
            name = str(read_device_id(name))
        found = [row for row in self.rows() if name in (row["name"], row["id"])]
        return PeerClient(str(found[0]["name"]), str(found[0]["id"])) if len(found) == 1 else None

    async def stop(self) -> None:
        """Announce the end and close everything."""
        task = self._end()
        if task is not None:
            await asyncio.wait({task}, timeout=_STOP_PATIENCE_S)

    # --- inside

    def devices(self) -> "PairedDevices":
        """Return the paired devices; raises OSError when their folder cannot be listed."""
        if self._devices is None:
            from port_agent.peers.fleet.paired import (
                PairedDevices,  # with hashlib, and so OpenSSL: where devices are paired
            )

            self._devices = PairedDevices(self._state_dir)
            self._devices.load()
        return self._devices

    def _start(self) -> None:
        if self._task is None:
            self.devices()
            self._task = asyncio.create_task(self._run())
            self._task.add_done_callback(self._on_end)

    def _end(self) -> "asyncio.Task[None] | None":
        task, self._task, self._fleet = self._task, None, None
        if task is not None:
            task.cancel()
        self._health.clear("no-fleet")
        return task

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except (PortError, OSError) as error:
                self._report(str(error))
            self._fleet = None
            await asyncio.sleep(_RETRY_S)

    async def _serve(self) -> None:
        from port_agent.peers.fleet.fleet import Fleet, FleetContext

        if self._options is None:
            return
        own = await asyncio.to_thread(own_identity, self._state_dir)
        self._on_identity(str(own.id), own.id.short)
        devices = self.devices()
        if devices.damaged:
            self._report(
                f"damaged files in {self._state_dir / PAIRED_FOLDER}: {', '.join(devices.damaged)}; pair these again"
            )
        else:
            self._health.clear("no-fleet")
        conditions = FleetContext(VERSION, self._heartbeat, self._places, self._server, self._audit_device)
        self._fleet = Fleet(own, devices, conditions)
        release_free_memory()
        await self._fleet.run(self._options.peer_port, self._options.static_peers)

    def _places(self, device: "DeviceId") -> list[tuple[str, int]]:
        seen = [peer for peer in self._discovery.seen() if peer.announcement.id == device.short and peer.port]
        if not seen:
            return []  # before the import: psutil would stay in the memory of every device that is paired
        from port_agent.peers.interfaces import elsewhere

        return [(address, peer.port) for peer in seen for address in elsewhere(peer.addresses)]

    def _row(self, device: "PairedDevice") -> dict[str, object]:
        now_s = time.monotonic()
        roster = self._fleet.roster if self._fleet is not None else None
        member = roster.member(device.id) if roster is not None else None
        latest = roster.last_heartbeat(device.id) if roster is not None else None
        heartbeat = latest[1] if latest is not None else None
        known = {state.value for state in PublicState}
        return {
            "id": str(device.id),
            "short": device.id.short,
            "name": device.name,
            "paired_at": device.paired_at,
            "introduced_by": None if device.introduced_by is None else str(device.introduced_by),
            "is_connected": member is not None,
            "last_heard_s": round(now_s - latest[0]) if latest is not None else None,
            "address": None if device.address is None else list(device.address),
            "board": heartbeat.board if heartbeat else "",
            "state": heartbeat.state if heartbeat and heartbeat.state in known else "unknown",
            "charging": heartbeat.charging if heartbeat else None,
            "job": heartbeat.job if heartbeat else None,
            "progress": heartbeat.progress if heartbeat else None,
            "today_joules": heartbeat.today_joules if heartbeat else None,
            "is_measured": bool(heartbeat and heartbeat.is_measured),
            "version": member.software if member else None,
            "trouble": "" if member or self._fleet is None else self._fleet.trouble(device.id),
        }

    def _report(self, reason: str) -> None:
        self._health.report("no-fleet", self._clock.monotonic_s(), self._clock.wall_s(), reason=reason)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Report an internal error, which ends the fleet but never the agent."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fleet = None
            self._report(f"{type(error).__name__}: {error}")
            asyncio.get_running_loop().call_exception_handler({"message": "the fleet failed", "exception": error})


def _places(options: AgentOptions) -> tuple[object, ...]:
    return options.peer_port, options.static_peers, options.peer_name
