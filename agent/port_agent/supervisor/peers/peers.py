"""All dealings with other devices behind one interface: discovery, pairing and the fleet."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from port_agent.health.conditions import HealthBoard
from port_agent.jobs.store import JobStore
from port_agent.peers.connection.messages import Heartbeat
from port_agent.peers.exchange.answers import PeerClient
from port_agent.peers.identity.keys import own_identity
from port_agent.peers.pairing.protocol import NewPartner, PairingPlace
from port_agent.peers.state import PublicState
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.peers.pairing import PairingDesk, PairingRefusedError
from port_agent.supervisor.peers.peer_answers import FederatedContext, PeerAnswers
from port_agent.supervisor.peers.peer_discovery import PeerDiscovery, default_name
from port_agent.supervisor.peers.peer_fleet import FleetKeeper
from port_agent.supervisor.peers.peer_introductions import Introducer
from port_agent.system import VERSION
from port_agent.system.clock import Clock

if TYPE_CHECKING:
    from port_agent.peers.sightings import Peer
    from port_agent.supervisor.peers.federated_jobs import FederatedJobs
    from port_agent.supervisor.peers.federations import Federations

HISTORY_KIND = "peers"
_HISTORY_SHOWN, _HISTORY_SEARCHED = 10, 1000
_OUTCOME_WAIT_S = 15.0
"""Seconds to wait for the outcome of a pairing, within the patience of the control client."""


class Peers:
    """Dealings with other devices. `heartbeat` returns this device's report for a given name."""

    def __init__(
        self,
        state_dir: Path,
        health: HealthBoard,
        clock: Clock,
        store: JobStore,
        heartbeat: Callable[[str], Heartbeat],
        objection: Callable[[], str],
        training: FederatedContext,
        migrate: Callable[[PeerClient, bytes], Awaitable[bytes]],
    ) -> None:
        """`objection` returns why nothing is solved for others now, or "".

        `training` is for federations; `migrate` answers owners of jobs that came here.
        """
        self._state_dir, self._clock, self._store = state_dir, clock, store
        self._options = AgentOptions()
        self._name, self._own_id = "", ""
        self.discovery = PeerDiscovery(state_dir, health, clock)
        self.answers = PeerAnswers(state_dir, objection, self.audit, self._federate, migrate, self._introduce)
        self._training, self._heartbeat = training, heartbeat
        self._federated: tuple[FederatedJobs, Federations] | None = None
        self.fleet = FleetKeeper(
            state_dir,
            health,
            clock,
            self.discovery,
            lambda: heartbeat(self._name),
            self.audit,
            self._on_identity,
            self.answers,
        )
        self.introducing = Introducer(self.fleet, self.audit)
        self.discovery.on_received = self.fleet.look
        self._pairing = PairingDesk(self._on_paired, self.audit)
        self._pairing.on_end = self._announce
        self._state = PublicState.IDLE

    def apply(self, options: AgentOptions) -> None:
        """Start, stop or restart according to the configuration; needs a running event loop."""
        self._options = options
        self._name = options.peer_name or self._name
        self.answers.options = options
        self.fleet.apply(options)
        self.introducing.apply(options)
        self.discovery.apply(options)
        self._announce()

    def show(self, state: PublicState) -> None:
        """Announce this agent's activity."""
        self.discovery.show(state)
        if state is not self._state:
            self._state = state
            self.fleet.announce()

    async def show_code(self, lifetime_s: float) -> dict[str, object]:
        """Return a code that pairs another device with this one for a limited time; raises PairingRefusedError."""
        place = await self._place()
        shown = await self._pairing.show(place, self._options.pairing_port, lifetime_s)
        self._announce()
        return {
            **shown,
            "name": place.name,
            "is_announced": bool(self.discovery.seen() or self._options.discover_peers),
        }

    async def type_code(self, digits: str, host: str | None, port: int | None) -> tuple[str, str]:
        """Pair with the device that shows this code; return its name and the address at which it was reached.

        Without a host, the device that announces a code is used. Raises PairingRefusedError.
        """
        hosts: tuple[str, ...] = (host or "",)
        if host is None:
            hosts, port = self._who_shows_a_code()
        return await self._pairing.join(await self._place(), digits, hosts, port or self._options.pairing_port)

    async def pairing_outcome(self) -> dict[str, object]:
        """Return the state of the code that is shown, after a while or when it changes."""
        return await self._pairing.outcome(_OUTCOME_WAIT_S)

    def stop_pairing(self) -> None:
        """Stop showing a code."""
        self._pairing.stop()
        self._announce()

    async def unpair(self, name: str) -> str:
        """Stop trusting a device and those that it introduced, and stop working for them; return its name.

        Raises PairedDeviceError, OSError.
        """
        introduced = self.fleet.devices().introduced_by(self.fleet.devices().find(name).id)
        gone = [self.fleet.unpair(name), *(self.fleet.unpair(str(one.id), for_good=False) for one in introduced)]
        self._announce()
        for client in gone if self._federates else ():
            await self.federated_jobs.free_from(client.id)
        return gone[0].name

    def rows(self) -> list[dict[str, object]] | None:
        """Return the agents that discovery sees as plain values, or None while it is off."""
        return self.discovery.rows()

    def describe(self) -> dict[str, object]:
        """Return the other devices, and what they see of this one, as plain values."""
        found = self.discovery.describe()
        entries = self._store.history(None, _HISTORY_SEARCHED)
        history = [{"at": entry.at, "text": entry.text} for entry in entries if entry.kind == HISTORY_KIND]
        own = {"device_id": self._own_id or None, "port": self.fleet.port or None}
        allowed = {
            "shares": self._options.share_with_peers,
            "solves": self._options.solve_for_peers,
            "takes_jobs": self._options.take_jobs,
            "introduces": self._options.introduces,
            "introducer": self._options.introducer or None,
            "introducer_trouble": self.introducing.trouble,
        }
        return {
            **found,
            **own,
            **allowed,
            "paired": self.fleet.rows(),
            "history": history[-_HISTORY_SHOWN:],
            "memberships": self.memberships,
            "own": self._own_row(),
            "federations": self.federations.overview() if self._federates else [],
        }

    def _own_row(self) -> dict[str, object]:
        """Return this device's report to its paired devices, as plain values."""
        heartbeat: dict[str, object] = msgspec.to_builtins(self._heartbeat(self._name))
        return {**heartbeat, "id": self._own_id, "version": VERSION}

    @property
    def federations(self) -> "Federations":
        """Federations that this device leads."""
        return self._federation_parts()[1]

    @property
    def federated_jobs(self) -> "FederatedJobs":
        """This device's part in federations."""
        return self._federation_parts()[0]

    @property
    def memberships(self) -> list[dict[str, object]]:
        """The jobs that other devices lead or may lead, as plain values."""
        return self.federated_jobs.memberships() if self._federates else []

    @property
    def _federates(self) -> bool:
        return any(job.spec.federated and not job.state.is_over for job in self._store.all())

    def go_on_federating(self) -> None:
        """Resume the rounds and federations of an earlier run of the agent; needs a running loop."""
        if self._federates:
            self.federated_jobs.go_on()
            self.federations.go_on()

    async def stop(self) -> None:
        """Announce the end and close everything, in a few seconds at most."""
        self.introducing.stop()
        if self._federated is not None:
            jobs, led = self._federated
            await asyncio.gather(jobs.stop(), led.stop())
        await asyncio.gather(self._pairing.close(), self.fleet.stop(), self.discovery.stop())

    # --- inside

    def _federation_parts(self) -> "tuple[FederatedJobs, Federations]":
        if self._federated is None:
            from port_agent.supervisor.peers.federated_jobs import (
                FederatedJobs,  # few devices federate: not worth resident memory
            )
            from port_agent.supervisor.peers.federations import Federations

            jobs = FederatedJobs(self._state_dir, self._store, self._training, self.audit)
            self._federated = jobs, Federations(self._store, self._clock, self.fleet, jobs, self.audit)
        return self._federated

    async def _federate(self, client: PeerClient, request: bytes) -> bytes:
        return await self._federation_parts()[0].answer(client, request)

    def _introduce(self, client: PeerClient) -> bytes:
        return self.introducing.answer(client)

    async def _place(self) -> PairingPlace:
        own = await asyncio.to_thread(own_identity, self._state_dir)
        self._on_identity(str(own.id), own.id.short)
        return PairingPlace(str(self._state_dir), self._name, self._options.peer_port)

    def _on_identity(self, device_id: str, short_id: str) -> None:
        self._own_id = device_id
        self._name = self._options.peer_name or default_name(short_id)

    def _on_paired(self, partner: NewPartner) -> str:
        name = self.fleet.paired(partner)
        self._announce()
        return name

    def _announce(self) -> None:
        self.discovery.listens(self.fleet.port, self._options.pairing_port if self._pairing.shows_code else 0)

    def _who_shows_a_code(self) -> tuple[tuple[str, ...], int]:
        """Return the addresses and the port of the only nearby device that shows a code; raises PairingRefusedError."""
        showing: list[Peer] = [
            peer for peer in self.discovery.seen() if peer.announcement.pairing_port and peer.addresses
        ]
        if len(showing) != 1:
            names = ", ".join(peer.announcement.name for peer in showing)
            what = f"several devices show a code ({names})" if showing else "no device on the network shows a code"
            raise PairingRefusedError(f"{what}; name the device with --at HOST")
        from port_agent.peers.interfaces import elsewhere  # with psutil: addresses of other devices

        return elsewhere(showing[0].addresses), showing[0].announcement.pairing_port

    def audit(self, text: str) -> None:
        """Record an event that involves other devices."""
        self._store.note(self._clock.wall_s(), None, HISTORY_KIND, text)
