"""The devices with which this one is paired: a file for each, named by the device's id.

The certificate in the file is trusted only if its hash is the file's name, so a damaged or renamed file trusts nobody.
"""

import contextlib
import hashlib
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec

from port_agent.peers.announcement import NAME_LIMIT, clean
from port_agent.peers.connection.tls import TlsError, check_certificate
from port_agent.peers.identity.device_id import DeviceId, DeviceIdError, read_device_id
from port_agent.system.atomic_file import sync_directory, write_atomically
from port_planner.base.errors import ExitCode, PortError
from port_planner.base.units import shown

FOLDER = "paired"
OWN_NAME = "this device"
"""Name of this device in messages to its own owner."""
MAX_PAIRED = 100
"""Largest number of paired devices; each may have a connection."""
_SUFFIX, _REFUSED = ".json", ".refused"
_FILE_LIMIT_BYTES = 16 << 10


class PairedDeviceError(PortError):
    """No paired device, or more than one, matches that name."""

    exit_code = ExitCode.IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class PairedDevice:
    """A trusted device. `address` is the host and port where it was last reached, a hint.

    `introduced_by`: the id of the device that introduced it; None if it was paired by a code. `chose_us`: whether it
    chose this device as its introducer.
    """

    id: DeviceId
    certificate: bytes
    name: str
    paired_at: float
    address: tuple[str, int] | None = None
    introduced_by: DeviceId | None = None
    chose_us: bool = False


class _Record(msgspec.Struct):
    certificate: bytes
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)]
    paired_at: float
    address: tuple[str, int] | None = None
    introduced_by: str = ""
    chose_us: bool = False


class PairedDevices:
    """The paired devices in a state directory; `damaged` names files that do not count."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER
        self._devices: dict[DeviceId, PairedDevice] = {}
        self._lock = threading.Lock()
        """Lock, because contacts are recorded by a different thread than unpairing, which must stay in force."""
        self.damaged: tuple[str, ...] = ()

    def load(self) -> None:
        """Read the files; raises OSError when the folder cannot be listed."""
        found, damaged = {}, []
        files = sorted(self._folder.glob(f"*{_SUFFIX}")) if self._folder.is_dir() else []
        for file in files:
            try:
                device = _read(file)
            except (OSError, msgspec.MsgspecError, DeviceIdError, TlsError, ValueError):
                damaged.append(file.name)
            else:
                found[device.id] = device
        self._devices, self.damaged = found, tuple(damaged)

    def all(self) -> tuple[PairedDevice, ...]:
        """Return the devices by name."""
        return tuple(sorted(self._devices.values(), key=lambda device: (device.name, device.id)))

    def get(self, device: DeviceId) -> PairedDevice | None:
        """Return a device, or None if it is not paired."""
        return self._devices.get(device)

    def find(self, text: str) -> PairedDevice:
        """Return the one device that a user means by its name, its id, or the beginning of its id.

        Raises PairedDeviceError.
        """
        start = text.strip().upper()
        found = [one for one in self._devices.values() if one.name == text or str(one.id).startswith(start)]
        if len(found) != 1 or not start:
            with contextlib.suppress(DeviceIdError):
                found = [one for one in (self.get(read_device_id(text)),) if one]
        if len(found) != 1:
            known = ", ".join(f"{one.name} ({one.id.group})" for one in self.all()) or "none"
            what = "several paired devices are called" if len(found) > 1 else "no paired device is called"
            raise PairedDeviceError(f"{what} {shown(text)}; the paired devices are {known}")
        return found[0]

    def introduced_by(self, introducer: DeviceId) -> tuple[PairedDevice, ...]:
        """Return the devices that another one introduced."""
        return tuple(device for device in self.all() if device.introduced_by == introducer)

    def choose(self, device_id: str) -> bool:
        """Record durably that a device chose this one as its introducer; return whether that is new. Raises OSError."""
        with self._lock:
            known = next((one for one in self._devices.values() if str(one.id) == device_id), None)
            if known is None or known.chose_us:
                return False
            self._add(replace(known, chose_us=True))
        return True

    def refuse(self, device: DeviceId) -> None:
        """Stop trusting a device, even if it is introduced again, until it is paired by a code; raises OSError."""
        write_atomically(self._refusal(device), b"")
        self.remove(device)

    def is_refused(self, device: DeviceId) -> bool:
        """Return whether a device may not be introduced."""
        return self._refusal(device).exists()

    def add(self, device: PairedDevice) -> PairedDevice:
        """Trust a device from now on, durably; return it with its local name.

        Raises PairedDeviceError if there are `MAX_PAIRED`, TlsError for an invalid certificate, OSError.
        """
        check_certificate(device.certificate)
        with self._lock:
            named = replace(device, name=self._free_name(device.id, device.name))
            self._add(named)
            if device.introduced_by is None:
                self._refusal(device.id).unlink(missing_ok=True)
        return named

    def _free_name(self, device: DeviceId, name: str) -> str:
        """Return a name that does not look like another device's; a name belongs to the id that had it first."""
        others = [one.name for one in self._devices.values() if one.id != device]
        if not any(_looks_like(name, taken) for taken in (OWN_NAME, *others)):
            return name
        return f"{name[: NAME_LIMIT - len(device.group) - 1]}-{device.group}"

    def _add(self, device: PairedDevice) -> None:
        if device.id not in self._devices and len(self._devices) >= MAX_PAIRED:
            raise PairedDeviceError(f"{MAX_PAIRED} devices are paired; `port-agent peer unpair` one that is not used")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        by = "" if device.introduced_by is None else str(device.introduced_by)
        record = _Record(device.certificate, device.name, device.paired_at, device.address, by, device.chose_us)
        write_atomically(self._file(device.id), msgspec.json.encode(record))
        self._devices[device.id] = device

    def met(self, device: DeviceId, name: str, address: tuple[str, int] | None) -> tuple[str, str] | None:
        """Record a device's name and address if they are new and it is still paired; raises OSError.

        Returns the old and the new name if the name changed.
        """
        with self._lock:
            known = self._devices.get(device)
            if known is None:
                return None
            asked = clean(name, NAME_LIMIT) or known.name
            called = known.name if asked == known.name else self._free_name(device, asked)
            now = replace(known, name=called, address=address or known.address)
            if now != known:
                self._add(now)
        return (known.name, called) if called != known.name else None

    def remove(self, device: DeviceId) -> None:
        """Stop trusting a device, durably; raises OSError."""
        with self._lock:
            self._file(device).unlink(missing_ok=True)
            self._devices.pop(device, None)
            sync_directory(self._folder)

    def _file(self, device: DeviceId) -> Path:
        return self._folder / f"{device}{_SUFFIX}"

    def _refusal(self, device: DeviceId) -> Path:
        return self._folder / f"{device}{_REFUSED}"


def _looks_like(name: str, other: str) -> bool:
    """Return whether people may mistake a name for another: case is ignored, and characters beyond
    ASCII match any character.
    """
    one, two = name.casefold(), other.casefold()
    return len(one) == len(two) and all(a == b or not (a + b).isascii() for a, b in zip(one, two, strict=True))


def device_of(certificate: bytes, name: str, paired_at: float, address: tuple[str, int] | None) -> PairedDevice:
    """Return the device to which a certificate (DER) belongs."""
    found = DeviceId(hashlib.sha256(certificate).digest())
    return PairedDevice(found, certificate, clean(name, NAME_LIMIT) or found.group, paired_at, address)


def _read(file: Path) -> PairedDevice:
    with file.open("rb") as stream:
        content = stream.read(_FILE_LIMIT_BYTES)
    record = msgspec.json.decode(content, type=_Record)
    device = device_of(record.certificate, record.name, record.paired_at, record.address)
    if f"{device.id}{_SUFFIX}" != file.name:
        raise ValueError(f"{file} holds the certificate of {device.id}")
    check_certificate(device.certificate)
    by = read_device_id(record.introduced_by) if record.introduced_by else None
    return replace(device, introduced_by=by, chose_us=record.chose_us)
