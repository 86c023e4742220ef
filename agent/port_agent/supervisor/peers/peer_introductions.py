"""Devices that one device introduces to each other: each is paired only with that one, and trusts
the devices that it names.

An owner chooses the introducer (`introducer` under `[peers]`), and the introducer's owner says that it introduces
(`introduces`). To each device that chose it, it names the others. A device that it no longer names is no longer
trusted. Once the introducer is unpaired, none of the devices that it named is trusted.
"""

import asyncio
from collections.abc import Callable

from port_agent.peers.exchange.answers import NotAnsweredError, PeerClient, Topic
from port_agent.policy.config import AgentOptions
from port_agent.supervisor.peers.peer_fleet import FleetKeeper
from port_planner.base.errors import PortError

ASK_EVERY_S = 60.0
ASK_AGAIN_S = 10.0
"""Seconds between attempts while the introducer does not answer."""
_NOTHING = "0" * 64
"""Stands for the hash of a request that has only one possible answer."""


class Introducer:
    """Asks this device's introducer, and answers devices that this device introduces; `audit` receives events."""

    def __init__(self, fleet: FleetKeeper, audit: Callable[[str], None]) -> None:
        self._fleet, self._audit = fleet, audit
        self._options = AgentOptions()
        self._task: asyncio.Task[None] | None = None
        self.trouble = ""
        """Why the introducer could not be reached the last time, or ""."""

    def apply(self, options: AgentOptions) -> None:
        """Start asking the introducer that the configuration names; needs a running loop."""
        before, self._options = self._options, options
        if options.introducer != before.introducer:
            self.stop()
            self.trouble = ""
            if options.introducer:
                self._task = asyncio.get_running_loop().create_task(self._ask_on(options.introducer))

    def stop(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def answer(self, client: PeerClient) -> bytes:
        """Return the other devices that chose this one as their introducer.

        Asking is how a device chooses it. Raises NotAnsweredError, OSError.
        """
        from port_agent.peers.introductions import INTRODUCTIONS, IntroducedDevice, Introductions

        if not self._options.introduces:
            raise NotAnsweredError("it introduces nobody (set introduces = true under [peers] there)")
        devices = self._fleet.devices()
        if devices.choose(client.id):
            self._audit(f"{client.name} chose this device as its introducer")
        others = [one for one in devices.all() if one.chose_us and str(one.id) != client.id]
        named = (IntroducedDevice(certificate=one.certificate, name=one.name, address=one.address) for one in others)
        return INTRODUCTIONS.encode(Introductions(tuple(named)))

    async def _ask_on(self, name: str) -> None:
        while True:
            try:
                await self.ask(name)
            except (PortError, OSError) as error:
                self.trouble = str(error)
            else:
                self.trouble = ""
            await asyncio.sleep(ASK_AGAIN_S if self.trouble else ASK_EVERY_S)

    async def ask(self, name: str) -> None:
        """Trust the devices that a paired device introduces, and stop trusting those that it no longer introduces.

        Raises NotAnsweredError, IntroductionError, PairedDeviceError for too many devices, TlsError for an
        invalid certificate, OSError.
        """
        from port_agent.peers.fleet.paired import device_of
        from port_agent.peers.introductions import INTRODUCTIONS

        own = await self._fleet.own_id()
        introducer, content = await self._fleet.ask(name, Topic.INTRODUCE, _NOTHING)
        named = {
            device.id: device
            for one in INTRODUCTIONS.decode(content).devices
            if str((device := device_of(one.certificate, one.name, self._fleet.now(), one.address)).id) != own
        }
        for known in self._fleet.devices().introduced_by(introducer.id):
            if known.id not in named:
                self._audit(f"{introducer.name} no longer introduces {known.name}")
                self._fleet.unpair(str(known.id), for_good=False)
        for device in named.values():
            if self._fleet.devices().get(device.id) is None and not self._fleet.devices().is_refused(device.id):
                trusted = self._fleet.trust(device, introducer.id)
                self._audit(f"{introducer.name} introduced {trusted} ({device.id.group}): it is trusted from now on")
