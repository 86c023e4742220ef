"""The device 'card' (`simulated_card.cpp`): built once for a machine, and its `Backend`.

A process has one private backend, so programs on this device run in processes of their own; see
`tests/agent/intercept/card_program.py`.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from port_planner.ir.device_kinds import BACKEND_GROUP

if TYPE_CHECKING:
    from port_agent.backend.base import Event

NAME = "card"
UNIFIED = "CARD_UNIFIED"
"""Set in the environment: the device's memory is the host's own."""
CONTEXT_BYTES = 3 << 20
"""What the device says that a process holds of its memory beside tensors."""
_SOURCE = Path(__file__).with_name("simulated_card.cpp")
_BUILD_S = 600.0


def missing() -> str:
    """Return why the device cannot be built here; "" where it can."""
    if sys.platform != "linux":
        return "the simulated card maps its memory twice, by memfd_create of Linux"
    return "" if shutil.which("g++") else "no g++, which builds the simulated card"


@cache
def library() -> Path:
    """Return the built device: one for each text of it and version of torch, shared by the workers of a test run."""
    root = Path(torch.__file__).parent
    words = ["g++", "-O1", "-fPIC", "-shared", "-std=c++20", "-w", str(_SOURCE)]
    words += [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}", f"-L{root / 'lib'}"]
    words += ["-ltorch", "-ltorch_cpu", "-lc10"]
    name = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"port-agent-card-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"{name}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            begun = made.with_suffix(".begun")
            subprocess.run([*words, "-o", str(begun)], check=True, timeout=_BUILD_S)
            begun.rename(made)
    return made


@cache
def card() -> Any:
    """Make the device known to torch, and return the C functions that say what happened on it."""
    loaded = ctypes.CDLL(str(library()))
    for name in ("allocated", "reserved", "peak", "copied"):
        getattr(loaded, f"card_{name}").restype = ctypes.c_size_t
    loaded.card_races.restype = ctypes.c_uint64
    loaded.card_last_race.restype = ctypes.c_char_p
    loaded.card_cap.argtypes = (ctypes.c_size_t,)
    loaded.card_memory.argtypes, loaded.card_memory.restype = (ctypes.c_void_p,), ctypes.c_void_p
    loaded.card_register()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(loaded))
    torch.utils.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)
    return loaded


def register() -> None:
    """Make the device known: what torch's entry points `torch.backends` call."""
    card()


def _module(loaded: Any) -> types.ModuleType:
    """Return torch.card. CPU kernels draw from the CPU's generator, so that is this device's, too."""
    made: Any = types.ModuleType(f"torch.{NAME}")
    made.is_available = lambda: True
    made.is_initialized = lambda: loaded.card_peak() > 0
    made.device_count = lambda: 1
    made.current_device = lambda: 0
    made.device = lambda device: contextlib.nullcontext()
    made.synchronize = lambda device=None: torch.accelerator.synchronize()
    made.memory_allocated = lambda device=None: loaded.card_allocated()
    made.max_memory_allocated = lambda device=None: loaded.card_peak()
    made.get_rng_state = lambda device=None: torch.get_rng_state()
    made.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    made.manual_seed_all = lambda seed: None
    made._is_in_bad_fork = lambda: False
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return made


def installed(folder: Path) -> dict[str, str]:
    """Return an environment in which processes know the device, torch and the agent;
    `folder` is to hold its package.
    """
    info = folder / "simulated_card-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: simulated-card\nVersion: 0\n")
    groups = {"torch.backends": "register", BACKEND_GROUP: "CardBackend"}
    lines = (f"[{group}]\n{NAME} = {__name__}:{name}\n" for group, name in groups.items())
    (info / "entry_points.txt").write_text("".join(lines))
    root = Path(__file__).resolve().parents[1]
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(root)))}


class CardBackend:
    """A `Backend` on the simulated card; see `port_agent.backend.base`."""

    kind = NAME
    addressable = False

    def __init__(self) -> None:
        self._card = card()
        self.unified = bool(os.environ.get(UNIFIED))
        self._device = torch.device(NAME, 0)
        self._copies = torch.Stream(device=self._device)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=NAME)

    def allocate_shared(self, nbytes: int) -> torch.Tensor:
        return self.allocate(nbytes)

    def host_view(self, memory: torch.Tensor) -> torch.Tensor | None:
        return None

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def reached(self) -> "Event":
        return torch.accelerator.current_stream(self._device).record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: "Event") -> "Event":
        with self._copies:
            self._follow(self._copies, after)
            target.copy_(source, non_blocking=True)
            return self._copies.record_event()

    def wait(self, event: "Event") -> None:
        self._follow(torch.accelerator.current_stream(self._device), event)

    def _follow(self, stream: torch.Stream, event: "Event") -> None:
        if isinstance(event, torch.Event):
            stream.wait_event(event)
        else:
            event.synchronize()

    def synchronize(self) -> None:
        torch.accelerator.synchronize()

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def allocated_bytes(self) -> int:
        return int(self._card.card_allocated())

    def reserved_bytes(self) -> int:
        return int(self._card.card_reserved())

    def outside_bytes(self) -> int:
        return CONTEXT_BYTES

    def peak_bytes(self) -> int:
        return int(self._card.card_peak())

    def reset_peak(self) -> None:
        self._card.card_reset_peak()

    def limit(self, nbytes: int) -> None:
        self._card.card_cap(nbytes)
