"""Power events of a Mac: the real ctypes calls, into a library that stands in for IOKit and CoreFoundation."""

import ctypes
import ctypes.util
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from port_agent.facts import OwnUse, Power
from port_agent.facts.macos import MacPlatform
from port_agent.facts.macos_power_events import PowerEvents
from tests.agent.facts.machines import OPTIONS

pytestmark = pytest.mark.process

STAND_IN = r"""
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t woken = PTHREAD_COND_INITIALIZER, seen = PTHREAD_COND_INITIALIZER;
static char name[64] = "AC Power";
static int loop, notifications, sources, added, stopped, changes, told, held;
static void (*callback)(void *);
const void *kCFRunLoopDefaultMode = "default";

void *IOPSNotificationCreateRunLoopSource(void (*given)(void *), void *context) {
    (void)context;
    callback = given;
    held++;
    return &notifications;
}
void *IOPSCopyPowerSourcesInfo(void) { held++; return &sources; }
void *IOPSGetProvidingPowerSourceType(void *info) { return info == &sources && name[0] ? name : NULL; }
bool CFStringGetCString(void *text, char *into, long size, unsigned encoding) {
    return encoding == 0x08000100u && snprintf(into, (size_t)size, "%s", (char *)text) < size;
}
void CFRelease(void *object) { (void)object; held--; }
void *CFRunLoopGetCurrent(void) { return &loop; }
void CFRunLoopAddSource(void *to, void *source, void *mode) {
    added = to == &loop && source == &notifications && mode == kCFRunLoopDefaultMode;
}
void CFRunLoopRun(void) {
    pthread_mutex_lock(&lock);
    while (!stopped) {
        if (told < changes) {
            pthread_mutex_unlock(&lock);
            callback(NULL);
            pthread_mutex_lock(&lock);
            told++;
            pthread_cond_broadcast(&seen);
        } else {
            pthread_cond_wait(&woken, &lock);
        }
    }
    pthread_mutex_unlock(&lock);
}
void CFRunLoopStop(void *which) {
    (void)which;
    pthread_mutex_lock(&lock);
    stopped = 1;
    pthread_cond_broadcast(&woken);
    pthread_mutex_unlock(&lock);
}
int stand_in_held(void) { return added ? held : -1; }
void stand_in_change(const char *to) {
    pthread_mutex_lock(&lock);
    snprintf(name, sizeof name, "%s", to);
    changes++;
    pthread_cond_broadcast(&woken);
    while (told < changes) pthread_cond_wait(&seen, &lock);
    pthread_mutex_unlock(&lock);
}
"""


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "stand_in.c").write_text(STAND_IN)
    built = tmp_path / "stand_in.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-pthread", "-o", built, tmp_path / "stand_in.c"], check=True)
    return built


@pytest.fixture
def events(library: Path) -> Iterator[PowerEvents]:
    found = PowerEvents(library, library)
    yield found
    found.close()


@pytest.mark.process
def test_the_source_is_known_at_once_and_with_every_change(events: PowerEvents, library: Path) -> None:
    mac = ctypes.CDLL(str(library))
    assert events.source == "AC Power"
    for name in ("Battery Power", "UPS Power", "AC Power"):
        mac.stand_in_change(name.encode())
        assert events.source == name
    mac.stand_in_change(b"")
    assert events.source is None


def test_the_tripwire_trips_without_asking_pmset(events: PowerEvents, library: Path) -> None:
    mac, platform = ctypes.CDLL(str(library)), MacPlatform(events)
    before = platform.plug_monitor()
    assert platform.read(OPTIONS, OwnUse(), 0.0).power is Power.EXTERNAL
    mac.stand_in_change(b"Battery Power")
    assert platform.plug_monitor() != before
    facts = platform.read(OPTIONS, OwnUse(), 1.0)
    assert (facts.power, facts.power_detail) == (Power.BATTERY, "Battery Power")


def test_closing_ends_the_loop_and_gives_everything_back(events: PowerEvents, library: Path) -> None:
    mac = ctypes.CDLL(str(library))
    assert mac.stand_in_held() == 1, "the notifications"
    events.close()
    assert mac.stand_in_held() == 0 and events.source is None


def test_a_machine_without_the_libraries_says_so(tmp_path: Path, library: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        PowerEvents(tmp_path / "nowhere.so", library)
    with pytest.raises(OSError, match=r"power events: .*IOPS"):
        PowerEvents(Path(ctypes.util.find_library("c") or "libc.so.6"), library)
