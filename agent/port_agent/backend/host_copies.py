"""Copies of weights, buffers and optimizer state in the host's memory, for a device with
its own memory: one per key.
"""

from collections.abc import Iterable

import torch

from port_agent.backend.base import Backend


class HostCopies:
    """Memory for a copy of each requested key, and which copies are current."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._copies: dict[str, torch.Tensor] = {}
        self.current: set[str] = set()
        """Keys whose copy is current; the device may hold the same contents."""

    def copy_of(self, key: str, nbytes: int) -> torch.Tensor:
        """Return the memory of a key's copy, allocated on first use; the caller fills it."""
        if key not in self._copies:
            self._copies[key] = self.backend.allocate_host(nbytes)
        return self._copies[key][:nbytes]

    def present(self, key: str) -> torch.Tensor | None:
        """Return the copy of a key if it is current, otherwise None."""
        return self._copies[key] if key in self.current else None

    def drop(self, keys: Iterable[str]) -> None:
        """Free the copies of these keys, whose contents are no longer needed."""
        for key in keys:
            self._copies.pop(key, None)
            self.current.discard(key)

    def known(self) -> set[str]:
        """Return the keys that have a copy."""
        return set(self._copies)
