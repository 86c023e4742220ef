"""The memories that a program's storages lie in: the host's, and those of the devices that have a budget."""

from collections.abc import Iterable, Iterator, Sequence

from port_agent.intercept.residency.residency import Residency
from port_agent.intercept.residency.storages import Storage


class MemoryPools:
    """Hands storages to the residency of their own pool."""

    def __init__(self, host: Residency) -> None:
        self.host = host
        self.devices: list[Residency] = []
        self._of = {host.table: host}

    def __iter__(self) -> Iterator[Residency]:
        """Yield the devices' first: what leaves one becomes memory of the host."""
        yield from self.devices
        yield self.host

    def add(self, device: Residency) -> None:
        """Bound a device's memory, too."""
        self.devices.append(device)
        self._of[device.table] = device

    def of(self, storage: Storage) -> Residency:
        """Return the residency of a storage."""
        return self._of[storage.table]

    @property
    def pressed(self) -> bool:
        """Whether anything of any pool ever had to leave."""
        return any(residency.pressed for residency in self)

    def begin_operator(self, *, expected: bool) -> None:
        """Let time go on in all pools; `expected`: whether the program does what its trace says."""
        host = self.host
        host.clock += 1
        for residency in self:
            residency.clock = host.clock
            if residency.trust_trace and not expected:
                residency.eviction.drop_predictions()
            residency.trust_trace = expected

    def ensure_resident(self, storages: Sequence[Storage]) -> None:
        """Return when all of `storages` are resident. Pin them first. Raises PageError."""
        for residency, own in self._split(storages):
            residency.ensure_resident(own)

    def change(self, storages: Sequence[Storage]) -> None:
        """Called before storages are written. Raises PageError, after which nothing of a pool is changed."""
        for residency, own in self._split(storages):
            residency.change(own)

    def _split(self, storages: Sequence[Storage]) -> Iterable[tuple[Residency, Sequence[Storage]]]:
        if not self.devices:
            return ((self.host, storages),)
        return [(residency, [s for s in storages if s.table is residency.table]) for residency in self]
