"""The preloaded allocator as Python and torch programs see it, each in a process of its own."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from port_agent import malloc
from port_agent.malloc import PreloadMode, environment, preload_environment, preload_mode, preload_path, preload_trouble

needs_preload = pytest.mark.skipif(
    preload_path() is None, reason="the allocator was not built (no glibc or no compiler)"
)

MIB = 1 << 20

# What every child process starts with; `report` is what the test reads.
PRELUDE = """
import ctypes, json, os, sys, threading
from port_agent.malloc import active
MIB = 1 << 20
allocator = active()
assert allocator is not None, "not preloaded"

def report(**values):
    print(json.dumps(values))

def rss():
    text = open("/proc/self/status").read()
    return int(text.split("VmRSS:")[1].split()[0]) << 10
"""


def run(code: str, limit_bytes: int | None = None, hard_limit_bytes: int | None = None) -> dict[str, Any]:
    """Return what `code` reports in a new process that has the allocator preloaded."""
    return run_with(preload_environment(limit_bytes, hard_limit_bytes=hard_limit_bytes), PRELUDE + code)


def run_with(variables: dict[str, str], code: str) -> dict[str, Any]:
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1", **variables}, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return dict(json.loads(result.stdout))


@pytest.mark.process
@needs_preload
def test_statistics_add_up_block_by_block() -> None:
    report = run("""
before = allocator.stats()
blocks = [bytearray(1) * 0 for _ in range(3)]
allocator.reset_peak()
a = bytearray(3 * MIB)
b = bytearray(5 * MIB)
del a
c = bytearray(1 * MIB)
after = allocator.stats()
page = os.sysconf("SC_PAGESIZE")
round_up = lambda n: -(-(n + 1) // page) * page  # bytearray keeps one byte more than asked
report(
    live=after.live_bytes - before.live_bytes, expected=round_up(5 * MIB) + round_up(MIB),
    peak=after.peak_live_bytes - before.live_bytes, expected_peak=round_up(3 * MIB) + round_up(5 * MIB),
    blocks=after.live_blocks - before.live_blocks,
    served=after.maps + after.reuses - before.maps - before.reuses,
    shortcut=allocator.live_bytes() == after.live_bytes and allocator.peak_live_bytes() == after.peak_live_bytes,
)
""")
    assert report["live"] == report["expected"]
    assert report["peak"] == report["expected_peak"]
    assert report["blocks"] == 2
    assert report["served"] == 3
    assert report["shortcut"]


@pytest.mark.process
@needs_preload
def test_peak_of_one_torch_op_is_exact() -> None:
    report = run("""
import torch
x = torch.ones(1 << 20)
y = torch.empty_like(x)
torch.add(x, x, out=y)
before = allocator.live_bytes()
allocator.reset_peak()
z = torch.softmax(x + x, 0)          # one temporary and one result of 4 MiB
report(peak=allocator.peak_live_bytes() - before, live=allocator.live_bytes() - before)
""")
    assert report == {"peak": 8 * MIB, "live": 4 * MIB}


@pytest.mark.process
@needs_preload
def test_trim_gives_resident_memory_back() -> None:
    report = run("""
allocator.trim()
start = rss()
data = [bytearray(b"x") * (2 * MIB) for _ in range(50)]
full = rss()
del data
cached, resident = allocator.stats().cached_bytes, rss()
part = allocator.trim(keep_bytes=30 * MIB)
kept = allocator.stats().cached_bytes
rest = allocator.trim()
report(full=full - start, cached=cached, resident=resident - start, part=part, kept=kept, rest=rest, end=rss() - start)
""")
    assert report["full"] >= 100 * MIB
    assert report["resident"] >= 100 * MIB, "freed blocks stay for reuse without a limit"
    assert report["cached"] - report["part"] == report["kept"] <= 30 * MIB
    assert report["rest"] == report["kept"]
    assert report["end"] < 4 * MIB


@pytest.mark.process
@needs_preload
def test_resident_memory_stays_below_the_limit() -> None:
    report = run(
        """
import random
random.seed(1)
start, live_start = rss(), allocator.stats().live_bytes
over, highest, blocks = 0, 0, []
for i in range(3000):
    if blocks and (len(blocks) > 12 or random.random() < 0.4):
        blocks.pop(random.randrange(len(blocks)))
    else:
        blocks.append(b"x" * random.choice((70_000, 300_000, 1_000_000, 1_500_000, 2_500_000)))
    if i % 10 == 0:
        stats = allocator.stats()
        over += stats.live_bytes + stats.cached_bytes > stats.limit_bytes >= stats.live_bytes
        highest = max(highest, rss() - start)
stats = allocator.stats()
report(over=over, highest=highest, mapped=stats.peak_mapped_bytes, live=stats.peak_live_bytes, reuses=stats.reuses)
""",
        limit_bytes=40 * MIB,
    )
    assert report["over"] == 0
    assert report["live"] <= 40 * MIB, "the test itself must stay below"
    assert report["mapped"] <= 40 * MIB
    assert report["highest"] <= 40 * MIB
    assert report["reuses"] > 1000


@pytest.mark.process
@needs_preload
def test_fresh_zeroed_memory_is_not_touched() -> None:
    report = run("""
allocator.trim()
start = rss()
zeros = bytes(100 * MIB)  # through calloc
report(resident=rss() - start, live=allocator.live_bytes())
""")
    assert report["live"] > 100 * MIB
    assert report["resident"] < 4 * MIB


@pytest.mark.process
@needs_preload
def test_lower_limit_trims_at_once() -> None:
    report = run("""
data = [bytearray(MIB) for _ in range(20)]
del data
allocator.set_limit(allocator.live_bytes() + 5 * MIB)
cached = allocator.stats().cached_bytes
allocator.set_limit(None)
report(cached=cached, limit=allocator.stats().limit_bytes)
""")
    assert report == {"cached": 5 * MIB, "limit": None}


@pytest.mark.process
@needs_preload
def test_exhaustion_is_a_clean_error_and_passes() -> None:
    report = run("""
import torch
allocator.set_hard_limit(allocator.live_bytes() + 20 * MIB)
errors = []
for attempt in (lambda: bytearray(64 * MIB), lambda: torch.ones(16 * MIB), lambda: [b"x" * MIB * k for k in range(9)]):
    try:
        attempt()
    except (MemoryError, RuntimeError) as error:
        errors.append(type(error).__name__)
refusals = allocator.stats().refusals
small = torch.ones(1000).sum().item()
allocator.set_hard_limit(None)
large = torch.ones(16 * MIB).sum().item()
report(errors=errors, refusals=refusals, small=small, large=large, hard=allocator.stats().hard_limit_bytes)
""")
    assert report["errors"] == ["MemoryError", "RuntimeError", "MemoryError"]
    assert report["refusals"] >= 3
    assert (report["small"], report["large"], report["hard"]) == (1000, 16 * MIB, None)


@pytest.mark.process
@needs_preload
def test_hard_limit_from_the_environment() -> None:
    report = run(
        """
try:
    bytearray(50 * MIB)
    report(error=None, limit=allocator.stats().hard_limit_bytes)
except MemoryError:
    report(error="MemoryError", limit=allocator.stats().hard_limit_bytes)
""",
        hard_limit_bytes=45 * MIB,
    )
    assert report == {"error": "MemoryError", "limit": 45 * MIB}


@pytest.mark.process
@needs_preload
@pytest.mark.parametrize("text", ["", "-1", "12M", "0x10", "99999999999999999999999", " 5"])
def test_unreadable_limit_means_no_limit(text: str) -> None:
    variables = {**preload_environment(None), "PORT_MALLOC_LIMIT": text}
    report = run_with(variables, PRELUDE + "report(limit=allocator.stats().limit_bytes)")
    assert report == {"limit": None}


@pytest.mark.process
@needs_preload
def test_kernel_data_limit_empties_the_cache_first() -> None:
    report = run("""
import resource
data = [bytearray(b"x") * MIB for _ in range(60)]
del data
text = open("/proc/self/status").read()
used = int(text.split("VmData:")[1].split()[0]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + 8 * MIB, resource.RLIM_INFINITY))
large = bytearray(b"y") * (50 * MIB)
try:
    bytearray(200 * MIB)
    failed = False
except MemoryError:
    failed = True
report(held=large[-1] == ord("y"), failed=failed, cached=allocator.stats().cached_bytes)
""")
    assert report["held"] and report["failed"]
    assert report["cached"] <= 20 * MIB


TRAINING = """
import hashlib, json, torch
torch.manual_seed(3)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
    torch.nn.Conv2d(16, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Flatten(),
    torch.nn.Linear(32 * 16 * 16, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(4):
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item().hex())
digest = hashlib.sha256()
for tensor in model.state_dict().values():
    digest.update(tensor.numpy().tobytes())
print(json.dumps({"losses": losses, "digest": digest.hexdigest()}))
"""


@pytest.mark.process
@pytest.mark.sample(1)
@needs_preload
@pytest.mark.parametrize("limit_bytes", [None, 12 * MIB, 0])
def test_training_equals_glibc_to_the_bit(limit_bytes: int | None, glibc_training: dict[str, Any]) -> None:
    assert run_with(preload_environment(limit_bytes), TRAINING) == glibc_training


@pytest.fixture(scope="module")
def glibc_training() -> dict[str, Any]:
    return run_with({}, TRAINING)


@pytest.mark.process
@needs_preload
def test_works_with_many_torch_threads_and_forks() -> None:
    report = run(
        """
import torch
torch.set_num_threads(4)
def multiply(results, index):
    x = torch.full((300, 300), float(index))
    for _ in range(20):
        y = x @ x
    results[index] = y[0, 0].item()
results = [None] * 4
threads = [threading.Thread(target=multiply, args=(results, i)) for i in range(4)]
for thread in threads: thread.start()
children = []
for i in range(6):
    pid = os.fork()
    if pid == 0:
        data = [bytearray(200_000 + 5000 * k) for k in range(50)]
        os._exit(0 if all(block[0] == 0 for block in data) else 1)
    children.append(pid)
for thread in threads: thread.join()
report(results=results, statuses=[os.waitpid(pid, 0)[1] for pid in children])
""",
        limit_bytes=30 * MIB,
    )
    assert report["results"] == [0.0, 300.0, 1200.0, 2700.0]
    assert report["statuses"] == [0] * 6


@pytest.mark.process
@needs_preload
def test_growing_a_bytearray_moves_pages() -> None:
    report = run("""
data = bytearray(b"start") * 20_000
allocator.reset_peak()
base = allocator.live_bytes() - 100_000
while len(data) < 64 * MIB:
    data.extend(data[:MIB])
report(peak=allocator.peak_live_bytes() - base, size=len(data), start=bytes(data[:5]).decode())
""")
    assert report["start"] == "start"
    assert report["peak"] < report["size"] * 1.2 + 2 * MIB, "old and new copy were never live together"


@pytest.mark.process
def test_without_the_preload_there_is_no_allocator() -> None:
    report = run_with(
        {}, "import json; from port_agent.malloc import active; print(json.dumps({'a': active() is None}))"
    )
    assert report == {"a": True}


@pytest.mark.process
@needs_preload
def test_mode_and_environment_of_a_built_installation() -> None:
    path = preload_path()
    assert path is not None
    assert preload_mode() is PreloadMode.PRELOAD
    variables = preload_environment(1000, hard_limit_bytes=2000)
    assert variables["LD_PRELOAD"].split(":")[0] == str(path)
    assert variables["PORT_MALLOC_LIMIT"] == "1000"
    assert variables["PORT_MALLOC_HARD_LIMIT"] == "2000"
    assert "PORT_MALLOC_LIMIT" not in preload_environment(None)


@needs_preload
def test_an_existing_preload_is_kept_behind_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", f"libother.so:{preload_path()}")
    assert preload_environment(None)["LD_PRELOAD"] == f"{preload_path()}:libother.so"


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="the variables are glibc's")
def test_fallback_where_the_object_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "preload_path", lambda: None)
    assert preload_mode() is PreloadMode.THRESHOLD
    variables = preload_environment(1000)
    assert variables == {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    left = run_with(variables, LEFT_BEHIND)["left"]
    assert left < 10 * MIB


BROKEN = {
    "no object": (None, "invalid ELF header"),
    "missing symbol": ("void gone(void); __attribute__((constructor)) void start(void) { gone(); }", "gone"),
    "another version": ("int port_malloc_version(void) { return 1; }", "its interface is 1, not 2"),
    "dies": ("#include <stdlib.h>\n__attribute__((constructor)) void start(void) { abort(); }", "exit status -6"),
}


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="compiles for Linux")
@pytest.mark.parametrize("case", BROKEN)
def test_fallback_where_the_object_does_not_work(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, reason = BROKEN[case]
    broken = tmp_path / "budget_malloc.so"
    if code is None:
        broken.write_bytes(b"not for this machine" * 100)
    else:
        (tmp_path / "broken.c").write_text(code)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", broken, tmp_path / "broken.c"], check=True)
    monkeypatch.setattr(environment, "preload_path", lambda: broken)
    assert reason in preload_trouble() and str(broken) in preload_trouble()
    assert preload_mode() is PreloadMode.THRESHOLD
    assert "LD_PRELOAD" not in preload_environment(1000)
    assert run_with(preload_environment(1000), "print('{}')") == {}, "a worker starts all the same"


def test_fallback_on_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))  # musl
    monkeypatch.setattr(sys, "platform", "linux")
    assert preload_mode() is PreloadMode.SYSTEM
    assert preload_environment(1000) == {}
    monkeypatch.setattr(sys, "platform", "darwin")
    assert preload_mode() is PreloadMode.LARGE_CACHE_OFF
    assert preload_environment(1000) == {"MallocLargeCache": "0"}


@pytest.mark.process
@needs_preload
@pytest.mark.parametrize("directory", ["with blank", "with:colon", "with;semicolon", "plain"])
def test_every_installation_path_works_or_falls_back(
    directory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = preload_path()
    assert original is not None
    copy = tmp_path / directory / original.name
    copy.parent.mkdir()
    copy.write_bytes(original.read_bytes())
    monkeypatch.setattr(environment, "preload_path", lambda: copy)
    if preload_mode() is PreloadMode.THRESHOLD:
        assert directory in ("with:colon", "with;semicolon")
        return
    assert run("report(limit=allocator.stats().limit_bytes)", limit_bytes=12345) == {"limit": 12345}


# 200 blocks between others that stay: glibc by itself keeps what is freed
LEFT_BEHIND = """
import json
def rss():
    return int(open("/proc/self/status").read().split("VmRSS:")[1].split()[0]) << 10
start = rss()
blocks = [(bytearray(b"x") * 120_000, bytearray(b"y") * 2_000) for _ in range(400)]
freed = [large for large, _ in blocks]
blocks = [small for _, small in blocks]
del freed
print(json.dumps({"left": rss() - start}))
"""

RELEASED = LEFT_BEHIND.replace(
    "print(", "from port_agent.malloc import release_free_memory\nrelease_free_memory()\nprint("
)

THRIFTY = LEFT_BEHIND.replace("import json", "import json\nfrom port_agent.malloc import thrifty_glibc\n{call}", 1)


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_thrifty_glibc_returns_memory_in_a_running_process() -> None:
    default = run_with({}, THRIFTY.replace("{call}", ""))["left"]
    thrifty = run_with({}, THRIFTY.replace("{call}", "assert thrifty_glibc()"))["left"]
    assert default > 30 * MIB, "otherwise this test shows nothing"
    assert thrifty < 10 * MIB


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("preloaded", [False, pytest.param(True, marks=needs_preload)])
def test_release_free_memory_gives_back_what_is_free(preloaded: bool) -> None:
    variables = preload_environment(None) if preloaded else {}
    assert run_with(variables, LEFT_BEHIND)["left"] > 30 * MIB, "otherwise this test shows nothing"
    assert run_with(variables, RELEASED)["left"] < 10 * MIB


@pytest.mark.process
@needs_preload
def test_thrifty_glibc_leaves_the_preloaded_allocator_alone() -> None:
    report = run("""
from port_agent.malloc import thrifty_glibc
before = allocator.stats()
report(done=thrifty_glibc(), same=allocator.stats().limit_bytes == before.limit_bytes)
""")
    assert report == {"done": True, "same": True}


def test_public_names() -> None:
    assert all(hasattr(malloc, name) for name in malloc.__all__)
