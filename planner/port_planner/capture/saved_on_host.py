"""Move the tensors that autograd saves for a backward pass to the host's memory, for plain steps on a
device that is too small.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch

from port_planner.capture.recorder import StepRecorder, storage_identity
from port_planner.ir.device_kinds import CPU
from port_planner.torch_compat.autograd import version_of
from port_planner.torch_compat.modes import current_modes

SMALLEST_BYTES = 64 << 10
"""Bytes below which storages stay, because the fixed cost of a copy equals that of copying a
thousand times as many bytes.
"""


class _SavedView(NamedTuple):
    """A saved view: its contents, and the position in them."""

    contents: "_Contents"
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Contents:
    """The bytes of a storage at the time when it was saved."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.device, self.key = storage.device, storage_identity(storage)
        self.host = _bytes(storage).to(CPU, copy=True)
        self._back: weakref.ref[torch.UntypedStorage] | None = None

    def storage(self) -> torch.UntypedStorage:
        """Return the contents on the device, shared by all that need them at the same time."""
        found = self._back() if self._back is not None else None
        if found is None:
            found = self.host.to(self.device).untyped_storage()
            self._back = weakref.ref(found)
            for recorder in _recorders():
                recorder.came_back(found, self.key)
        return found


class SavedOnHost(torch.autograd.graph.saved_tensors_hooks):
    """Context in which tensors that autograd saves are moved to the host, except those in `stay`.

    Results are identical. Autograd rejects a storage that changed after it was saved; this is not detected here.
    """

    def __init__(self, stay: Iterable[torch.Tensor], is_short: Callable[[], bool]) -> None:
        """`is_short`: returns whether the device is so full that saved tensors must leave it."""
        self._is_short = is_short
        self._stay = {storage_identity(t.untyped_storage()) for t in stay}
        self._known: weakref.WeakValueDictionary[tuple[int, int], _Contents] = weakref.WeakValueDictionary()
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> _SavedView | torch.Tensor:
        storage = tensor.untyped_storage()
        may_leave = (
            tensor.device.type != CPU
            and storage.nbytes() >= SMALLEST_BYTES
            and storage_identity(storage) not in self._stay
        )
        with _unrecorded():
            if not may_leave or tensor.is_conj() or tensor.is_neg() or not self._is_short():
                return tensor.detach()
            contents = self._contents(storage, version_of(tensor))
            return _SavedView(contents, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def _contents(self, storage: torch.UntypedStorage, version: int) -> _Contents:
        """Return the copy of a storage's current contents, created once."""
        key = storage_identity(storage)
        alive = self._alive.get(key)
        known = self._known.get((key, version)) if alive is not None and alive() is storage else None
        if known is None:
            known = self._known[key, version] = _Contents(storage)
            self._alive[key] = weakref.ref(storage)
        return known

    def _unpack(self, saved: _SavedView | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        with _unrecorded():
            empty = torch.empty(0, dtype=saved.dtype, device=saved.contents.device)
            return empty.set_(saved.contents.storage(), saved.offset, saved.shape, saved.stride)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))


def _recorders() -> list[StepRecorder]:
    return [mode for mode in current_modes() if isinstance(mode, StepRecorder)]


@contextlib.contextmanager
def _unrecorded() -> Iterator[None]:
    """Keep recorders from recording the block; other modes, such as one that enforces a budget, still see it."""
    recorders = _recorders()
    before = [recorder.recording for recorder in recorders]
    for recorder in recorders:
        recorder.recording = False
    try:
        yield
    finally:
        for recorder, recording in zip(recorders, before, strict=True):
            recorder.recording = recording
