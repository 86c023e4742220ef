"""The power source of a Mac, reported by IOKit the moment it changes, instead of polling pmset every few seconds.

Uses ctypes for eight functions of two libraries that every Mac has; pyobjc would be a dependency of several megabytes.
The signatures are those of IOKit/ps/IOPowerSources.h and CoreFoundation/CFRunLoop.h.
IOPSNotificationCreateRunLoopSource calls back on any change of the power sources; IOPSGetProvidingPowerSourceType names
the one in use as pmset does.
"""

import ctypes
import threading
from collections.abc import Callable
from pathlib import Path

_IOKIT = Path("/System/Library/Frameworks/IOKit.framework/IOKit")
_CORE_FOUNDATION = Path("/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation")
_UTF8 = 0x08000100
"""kCFStringEncodingUTF8 (CFString.h)."""
_LONGEST_NAME = 64
_PATIENCE_S = 2.0
_Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class PowerEvents:
    """Watches the power source on a separate thread, in a run loop that sleeps until something changes."""

    def __init__(self, iokit: Path = _IOKIT, core_foundation: Path = _CORE_FOUNDATION) -> None:
        """Start to watch events; raises OSError if the libraries or their functions are missing."""
        try:
            self._power, self._loops = _declared(ctypes.CDLL(str(iokit)), ctypes.CDLL(str(core_foundation)))
            self._mode = ctypes.c_void_p.in_dll(self._loops, "kCFRunLoopDefaultMode")
        except (AttributeError, ValueError) as error:
            raise OSError(f"power events: {error}") from error
        self._source: str | None = None
        self._loop: int | None = None
        self._begun = threading.Event()
        self._callback = _Callback(self._changed)
        self._thread = threading.Thread(target=self._follow, name="power events", daemon=True)
        self._thread.start()
        self._begun.wait(_PATIENCE_S)

    @property
    def source(self) -> str | None:
        """The power source in use, by pmset's name ("AC Power"); None if IOKit did not report it."""
        return self._source

    def close(self) -> None:
        """End the run loop and its thread."""
        if self._loop is not None:
            self._loops.CFRunLoopStop(self._loop)
            self._thread.join(_PATIENCE_S)

    def _follow(self) -> None:
        notifications = self._power.IOPSNotificationCreateRunLoopSource(self._callback, None)
        if notifications:
            self._changed(None)
            self._loop = self._loops.CFRunLoopGetCurrent()
            self._loops.CFRunLoopAddSource(self._loop, notifications, self._mode)
            self._begun.set()
            self._loops.CFRunLoopRun()
            self._source = None
            self._loops.CFRelease(notifications)
        self._begun.set()

    def _changed(self, _: int | None) -> None:
        information = self._power.IOPSCopyPowerSourcesInfo()
        if not information:
            self._source = None
            return
        name = self._power.IOPSGetProvidingPowerSourceType(information)  # of `information`, nothing to release
        text = ctypes.create_string_buffer(_LONGEST_NAME)
        output = bool(name) and self._loops.CFStringGetCString(name, text, _LONGEST_NAME, _UTF8)
        self._source = text.value.decode("utf-8", "replace") if output else None
        self._loops.CFRelease(information)


def _declared(power: ctypes.CDLL, loops: ctypes.CDLL) -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Declare the functions' arguments and results to ctypes; raises AttributeError for a missing function."""
    pointer = ctypes.c_void_p

    def declare(function: Callable[..., object], result: object, *arguments: object) -> None:
        function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]

    declare(power.IOPSNotificationCreateRunLoopSource, pointer, _Callback, pointer)
    declare(power.IOPSCopyPowerSourcesInfo, pointer)
    declare(power.IOPSGetProvidingPowerSourceType, pointer, pointer)
    declare(loops.CFRunLoopGetCurrent, pointer)
    declare(loops.CFRunLoopAddSource, None, pointer, pointer, pointer)
    declare(loops.CFRunLoopRun, None)
    declare(loops.CFRunLoopStop, None, pointer)
    declare(loops.CFRelease, None, pointer)
    declare(loops.CFStringGetCString, ctypes.c_bool, pointer, ctypes.c_char_p, ctypes.c_long, ctypes.c_uint32)
    return power, loops
