"""Run the discovery of other agents in the supervisor.

The configuration switches it on; `status` shows its state.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from port_agent.health.conditions import HealthBoard
from port_agent.peers.identity.keys import IdentityError
from port_agent.peers.state import PublicState
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.job.runners import Runners
from port_agent.supervisor.job.worker_process import RequestedState
from port_agent.system import VERSION
from port_agent.system.clock import Clock

if TYPE_CHECKING:
    from port_agent.peers.discovery import Discovery
    from port_agent.peers.sightings import Peer

_RETRY_S = 60.0
_STOP_PATIENCE_S = 2.0
"""Seconds to wait when stopping; announcing the end takes 0.3 s."""


class PeerDiscovery:
    """Announces this agent to others and lists them here, while the configuration allows it."""

    def __init__(self, state_dir: Path, health: HealthBoard, clock: Clock) -> None:
        self._state_dir, self._health, self._clock = state_dir, health, clock
        self._state = PublicState.IDLE
        self._wanted: tuple[bool, str] = (False, "")
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        """A task that was asked to end, and may still be announcing that."""
        self._discovery: Discovery | None = None
        self._ports = (0, 0)
        self.on_received: Callable[[], None] = lambda: None
        """Called after announcements were received."""

    def apply(self, options: AgentOptions) -> None:
        """Start, stop or restart discovery according to the configuration; needs a running event loop."""
        wanted = (options.discover_peers, options.peer_name)
        if wanted == self._wanted:
            return
        self._wanted = wanted
        self._discovery = None
        self._health.clear("no-discovery")
        if self._task is not None:
            self._task.cancel()
            self._ending, self._task = self._task, None
        if options.discover_peers:
            self._task = asyncio.create_task(self._discover(options.peer_name, self._ending))
            self._task.add_done_callback(self._on_end)

    def show(self, state: PublicState) -> None:
        """Announce this agent's activity."""
        self._state = state
        if self._discovery is not None:
            self._discovery.show(state)

    def listens(self, port: int, pairing_port: int) -> None:
        """Announce on which port this agent listens for paired devices or shows a code; 0 for none."""
        self._ports = port, pairing_port
        if self._discovery is not None:
            self._discovery.listens(port=port, pairing_port=pairing_port)

    def seen(self) -> "tuple[Peer, ...]":
        """Return the other agents on the network."""
        return self._discovery.peers(self._clock.monotonic_s()) if self._discovery else ()

    def rows(self) -> list[dict[str, object]] | None:
        """Return the other agents as plain values, or None while discovery is off."""
        if self._task is None:
            return None
        now_s = self._clock.monotonic_s()
        return [row(peer, now_s) for peer in self.seen()]

    def describe(self) -> dict[str, object]:
        """Return the other agents, and what they see of this one, as plain values."""
        own = self._discovery.own if self._discovery else None
        return {
            "discover": self._task is not None,
            "id": own.id if own else None,
            "name": own.name if own else None,
            "interfaces": [interface.name for interface in self._discovery.interfaces] if self._discovery else [],
            "peers": self.rows(),
        }

    async def stop(self) -> None:
        """Announce the end and close everything, in a few seconds at most."""
        tasks = {task for task in (self._task, self._ending) if task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_STOP_PATIENCE_S)

    async def _discover(self, name: str, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})  # its goodbye must not follow our greeting
        while True:
            try:
                self._discovery = await asyncio.to_thread(_prepare, self._state_dir, name, self._report)
                break
            except (OSError, IdentityError) as error:
                self._report(f"the device's key cannot be used: {error}")
                await asyncio.sleep(_RETRY_S)
        self._discovery.show(self._state)
        self._discovery.on_received = self.on_received
        self.listens(*self._ports)
        await self._discovery.run()

    def _report(self, trouble: str) -> None:
        if trouble:
            self._health.report("no-discovery", self._clock.monotonic_s(), self._clock.wall_s(), reason=trouble)
        else:
            self._health.clear("no-discovery")

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Report an internal error, which ends discovery but never the agent."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._report(f"{type(error).__name__}: {error}")
            context = {"message": "discovery of other agents failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)


def _prepare(state_dir: Path, name: str, report: Callable[[str], None]) -> "Discovery":
    """Return the announcer of this agent. It reads files and imports zeroconf, so it must not run on the event loop."""
    from port_agent.peers.announcement import Announcement
    from port_agent.peers.connection.messages import NEWEST_VERSION
    from port_agent.peers.discovery import Discovery
    from port_agent.peers.identity.keys import own_identity

    identity = own_identity(state_dir)

    async def where_key_is(addresses: tuple[str, ...], port: int) -> str:
        from port_agent.peers.connection.claims import where_key_is  # with OpenSSL: to verify claimed identities

        return await where_key_is(identity, addresses, port)

    own_id = identity.id.short
    name = name or default_name(own_id)
    own = Announcement(own_id, name, board_name(), VERSION, PublicState.IDLE, protocol=NEWEST_VERSION)
    return Discovery(own, report, where_key_is)


def default_name(short_id: str) -> str:
    """Return the name of a device that was not given one: it reveals nothing about its owner."""
    return f"agent-{short_id[:4]}"


def board_name() -> str:
    """Return the kind of this device."""
    import platform

    from port_agent.energy.sources.power_models import machine_name

    return machine_name(Path("/")) or f"{platform.system()} {platform.machine()}"


def row(peer: "Peer", now_s: float) -> dict[str, object]:
    """Return another agent as plain values."""
    own = peer.announcement
    return {
        "name": own.name,
        "board": own.board,
        "state": own.state.value if own.state else "unknown",
        "version": own.version,
        "address": peer.addresses[0] if peer.addresses else None,
        "last_seen_s": round(max(0.0, now_s - peer.received_s)),
        "id": own.id,
    }


def public_state(runners: Runners, *, has_work: bool) -> PublicState:
    """Return what others may know about the agent's activity."""
    if any(runner.requested is RequestedState.TRAIN for runner, _ in runners.busy().values()):
        return PublicState.TRAINING
    return PublicState.PAUSED if has_work else PublicState.IDLE
