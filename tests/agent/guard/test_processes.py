"""Processes that a guarded program starts, by whatever way, are inside its budget; those that cannot be are named."""

import os
import re
import shutil
import subprocess
import textwrap
import zlib
from pathlib import Path
from typing import Any

import pytest

from port_agent.guard import ProcessTable, processes
from port_agent.malloc import PreloadMode, preload_mode
from tests import waiting
from tests.agent.intercept.programs import RunEnd, exec_words, followed, plain, report_of, written

HEADER = Path(__file__).resolve().parents[3] / "agent/port_agent/guard/processes.h"

guarded = pytest.mark.skipif(preload_mode() is not PreloadMode.PRELOAD, reason="the library cannot be preloaded")

BLOCKS = """
import ctypes, importlib.util, os, subprocess, sys, zlib
ctypes.CDLL(importlib.util.find_spec("torch").submodule_search_locations[0] + "/lib/libc10.so", ctypes.RTLD_GLOBAL)
c10 = ctypes.CDLL(None)  # as libc10 finds its own functions: in the order in which libraries were loaded
c10._ZN3c109alloc_cpuEm.argtypes, c10._ZN3c109alloc_cpuEm.restype = [ctypes.c_size_t], ctypes.c_void_p
def blocks_of(count):
    made = [(ctypes.c_uint64 * (1 << 17)).from_address(c10._ZN3c109alloc_cpuEm(1 << 20)) for k in range(count)]
    for k, block in enumerate(made): ctypes.memset(block, k, 1 << 20)
    return made
def computed(blocks, steps):
    for step in range(steps):
        for block in blocks: block[step] = block[step + 1] + 1
    return zlib.crc32(b"".join(blocks))
"""
"""Memory as torch's allocator has it, in mebibytes, without the second that torch takes to load."""

CHILD = """
ours = sorted(name for name in os.environ if name.startswith(("PORT_", "LD_")))
print(*sys.argv[1:], computed(blocks_of(16), 4), ours, flush=True)
"""
"""Sixteen mebibytes of tensors, and what of the environment is ours."""

STARTS = {
    "subprocess": "subprocess.run([sys.executable, 'child.py'], check=True)",
    "an environment of its own": "subprocess.run([sys.executable, 'child.py'], env={}, check=True)",
    "env -i": "subprocess.run(['env', '-i', sys.executable, 'child.py'], check=True)",
    "a shell": "assert os.system(sys.executable + ' child.py; exit 3') == 3 << 8",
    "a shell script": "subprocess.run(['./start.sh', sys.executable], check=True)",
    "posix_spawn": "assert os.waitpid(os.posix_spawn(sys.executable, [sys.executable, 'child.py'], {}), 0)[1] == 0",
    "fork and exec": "pid = os.fork() or os.execl(sys.executable, sys.executable, 'child.py'); os.waitpid(pid, 0)",
    "multiprocessing": "import multiprocessing as m; p = "
    "m.get_context('spawn').Process(target=run); p.start(); "
    "p.join()",
}


def run(program: str, folder: Path, *bound: str, **options: Any) -> tuple[RunEnd, dict[str, Any]]:
    """Return how a program ended on guarded memory, and its report."""
    written(folder, BLOCKS + CHILD, "child.py")
    (folder / "start.sh").write_text('#!/bin/sh\n"$1" child.py\n')
    (folder / "start.sh").chmod(0o755)
    (folder / "train.py").write_text(BLOCKS + textwrap.dedent(program))
    report = folder / "report.json"
    done = followed("train.py", folder=folder, bound=(*bound, "--guard-only", "--report", str(report)), **options)
    return done, report_of(report)


@guarded
@pytest.mark.process
def test_children_are_inside_by_whatever_way_they_are_started(tmp_path: Path) -> None:
    program = "def run():\n    import child\nif __name__ == '__main__':\n"
    program += "".join(f"    print({way!r}, flush=True)\n    {start}\n" for way, start in STARTS.items())
    done, report = run(program, tmp_path, "--tensors", "4M")
    expected = plain("train.py", folder=tmp_path)
    assert expected.code == 0, expected.said
    assert (done.code, done.output) == (0, expected.output), done.said
    trained = [child for child in report["children"] if child["read_faults"]]
    assert len(trained) == len(STARTS), report["children"]
    assert all(child["guarded"] for child in report["children"]) and report["budget_held"]
    assert report["peak_tensor_bytes"] < 12 << 20
    assert all(child["peak_bytes"] > 10 << 20 for child in trained), "each child's peak"
    assert re.search(r"tensors [\d.]+ MiB of 4\.0 MiB, with \d+ child processes, the largest", done.ours[0])


@guarded
@pytest.mark.process
def test_a_program_that_becomes_another_is_inside_and_is_accounted_for(tmp_path: Path) -> None:
    done, report = run(
        "os.execv(sys.executable, [sys.executable, 'child.py', 'again'])",
        tmp_path,
        "--tensors",
        "4M",
    )
    assert done.code == 0 and done.output.startswith("again "), done.said
    assert report["written_bytes"] > 16 << 20 and report["peak_tensor_bytes"] < 12 << 20
    assert len(done.ours) == 1 and "tensors" in done.ours[0]


TOGETHER = """
if len(sys.argv) < 2:
    children = [subprocess.Popen([sys.executable, "train.py", "x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for k in range(2)]
    for child in children: child.stdout.readline()
    for child in children: child.stdin.write(b"go\\n"); child.stdin.flush()
    for child in children: print(child.stdout.readline())
    for child in children: child.communicate(b"end\\n")
else:
    blocks = blocks_of(0); print("ready", flush=True); sys.stdin.readline()
    blocks = blocks_of(60); print(computed(blocks, 6), flush=True); sys.stdin.readline()
"""


@guarded
@pytest.mark.process
def test_processes_that_compute_at_the_same_time_share_one_budget(tmp_path: Path) -> None:
    """Each would take 60 MiB of tensors, and there is room for 50 of both."""
    whole, free = run(TOGETHER, tmp_path, "--ram", "4G")
    ram_mib = (free["rest_bytes"] >> 20) + 80
    done, report = run(TOGETHER, tmp_path, "--ram", f"{ram_mib}M")
    assert (done.code, done.output) == (0, whole.output), done.said
    assert free["peak_tensor_bytes"] > 100 << 20, free
    assert report["peak_together_bytes"] <= ram_mib << 20 and report["needed_bytes"] == 0, report
    assert sum(child["written_bytes"] for child in report["children"]) > 20 << 20, (
        "together they gave up what did not fit"
    )


FORKED = """
held = blocks_of(24)
for step in range(3):
    end, begin = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(begin, str(computed(held[:4] + blocks_of(4), step)).encode()); os._exit(0)
    print(os.read(end, 99), os.waitpid(pid, 0)[1], computed(held, step))
"""


@guarded
@pytest.mark.process
def test_forked_children_are_inside_and_what_they_inherit_counts_once(tmp_path: Path) -> None:
    done, report = run(FORKED, tmp_path, "--ram", "2G")
    assert (done.code, done.output) == (0, plain("train.py", folder=tmp_path).output), done.said
    workers = report["children"]
    assert len(workers) == 3 and all(use["guarded"] and use["name"] == "(forked) train.py" for use in workers), workers
    assert report["peak_together_bytes"] < 2 * report["peak_resident_bytes"]


NEEDS = """
blocks = blocks_of(30); kept = []
for step in range(8):
    kept.append(bytearray(b"x" * (20 << 20))); computed(blocks, 1)
print(computed(blocks, 2))
"""
"""The program's own objects grow to 160 MiB."""


@guarded
@pytest.mark.process
def test_what_leaves_no_room_for_tensors_is_said_at_once_and_again_and_the_advice_suffices(tmp_path: Path) -> None:
    done, report = run(NEEDS, tmp_path, "--ram", "100M")
    said = [line for line in done.ours if "nothing is left for tensors" in line]
    assert done.code == 0 and len(said) >= 2, done
    assert re.search(
        r"Python, libraries and your objects take [\d.]+ MiB of 100\.0 MiB; .*give at least \d+M$", said[0]
    )
    assert report["rest_bytes"] > 160 << 20 and "give at least" in done.ours[-1]
    (advice,) = re.findall(r"give at least (\d+M)$", done.ours[-1])
    fitting, report = run(NEEDS, tmp_path, "--ram", advice)
    assert (fitting.code, fitting.output) == (0, done.output)
    assert len(fitting.ours) == 1 and "give at least" not in fitting.ours[0], fitting.ours
    assert report["needed_bytes"] == 0 and report["peak_resident_bytes"] <= int(advice[:-1]) << 20


@guarded
@pytest.mark.process
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_static_program_is_named_with_its_peak_and_no_budget_is_claimed(tmp_path: Path) -> None:
    source = "#include <stdlib.h>\n#include <stdio.h>\nint main(void) {"
    source += 'volatile char *p = malloc(30 << 20); for (long i = 0; i < 30 << 20; i += 512) p[i] = 1;  puts("ready"); fflush(stdout); return getchar() + p[7] > 1000; }'
    (tmp_path / "big.c").write_text(source)
    if subprocess.run(["cc", "-O1", "-static", "-o", "big", "big.c"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("no static C library")
    program = """
    from port_agent.guard import ProcessTable
    table = ProcessTable.of_program(os.getpid())
    child = subprocess.Popen(["./big", "argument"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    print(child.stdout.readline())
    while not any(use.peak_bytes > 29 << 20 for use in table.children()): assert child.poll() is None
    child.communicate(b"x")
    """
    done, report = run(program, tmp_path, "--ram", "2G")
    assert done.code == 0, done.said
    (child,) = report["children"]
    assert not child["guarded"] and child["name"] == "./big argument" and 29 << 20 < child["peak_bytes"] < 34 << 20
    assert not report["budget_held"]
    assert "the budget was not enforced for all processes" in done.ours[0] and "of 2.0 GiB" not in done.ours[0]
    assert re.search(r"outside the budget: './big argument' \(\d+, at least [23]\d\.\d MiB\)", done.ours[0])


@guarded
@pytest.mark.process
@pytest.mark.parametrize("bound", [("--tensors", "4M"), ("--ram", "1G")])
def test_children_of_a_followed_program_are_guarded(bound: tuple[str, ...], tmp_path: Path) -> None:
    written(tmp_path, BLOCKS + CHILD, "child.py")
    written(
        tmp_path,
        "import os, subprocess, sys, torch\nsubprocess.run([sys.executable, 'child.py'])\nprint(sorted(os.environ))",
    )
    expected, report = plain("train.py", folder=tmp_path), tmp_path / "report.json"
    done = followed("train.py", folder=tmp_path, bound=(*bound, "--report", str(report)))
    assert (done.code, done.output) == (0, expected.output), done.said
    facts = report_of(report)
    (child,) = facts["children"]
    assert child["guarded"] and facts["budget_held"] and "with 1 child process" in done.ours[0]
    assert (child["read_faults"] > 0) == (bound[0] == "--tensors")
    assert facts["peak_together_bytes"] > facts["peak_resident_bytes"] - (50 << 20) and facts["needed_bytes"] == 0


@guarded
@pytest.mark.process
def test_steps_that_write_many_times_the_tensors_are_said(tmp_path: Path) -> None:
    program = """
    import torch
    weight = torch.nn.Parameter(torch.ones(1 << 18)); optimizer = torch.optim.SGD([weight], 0.1)
    blocks = blocks_of(16)
    for step in range(3):
        for value in range(5):
            for block in blocks: ctypes.memset(block, value, 1 << 20)
        weight.grad = torch.ones_like(weight); optimizer.step()
    """
    done, _ = run(program, tmp_path, "--tensors", "2M")
    assert done.code == 0 and "times the" in done.ours[0] and "a larger budget moves less" in done.ours[0], done
    assert len(done.ours) == 2, "said once"


LAUNCHED = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(700, 700) for _ in range(6)]))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    loss = model(torch.randn(16, 700)).square().mean(); optimizer.zero_grad(); loss.backward(); optimizer.step()
    dist.all_reduce(loss)
    if dist.get_rank() == 0: print(loss.item().hex(), flush=True)
dist.destroy_process_group()
"""


@guarded
@pytest.mark.process
@pytest.mark.long
def test_torchrun_trains_inside_the_budget(tmp_path: Path) -> None:
    words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py")
    written(tmp_path, LAUNCHED)
    report = tmp_path / "report.json"
    expected = plain(*words, folder=tmp_path)
    assert expected.code == 0, expected.said
    done = followed(*words, folder=tmp_path, bound=("--tensors", "60M", "--guard-only", "--report", str(report)))
    assert (done.code, done.output) == (0, expected.output), done.said
    facts = report_of(report)
    trained = [child for child in facts["children"] if child["read_faults"]]
    assert len(trained) == 2 and facts["peak_tensor_bytes"] < 66 << 20, facts


def test_the_table_is_that_of_the_header(tmp_path: Path) -> None:
    header = HEADER.read_text()
    assert f"PROCESSES_VERSION {processes.VERSION}u" in header and f"PROCESS_SLOTS {processes.SLOTS}\n" in header
    for struct, kind in (("process_slot", processes._Slot), ("processes", processes._Table)):
        (body,) = re.findall(rf"struct {struct} \{{(.*?)\n\}};", header, re.DOTALL)
        fields = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
        names = re.findall(r"(\w+)(?:\[[^\]]*\])?[,;]", fields)
        assert names == [name for name, *_ in kind._fields_]


def test_a_table_has_no_name_and_is_read_by_its_path(tmp_path: Path) -> None:
    table = ProcessTable.create(tmp_path, "train.py", ram_bytes=None, tensor_bytes=4 << 10)
    try:
        found = ProcessTable(table.path)
        program = found.program()
        assert found.children() == () and program is not None and program.name == "train.py"
        assert not list(tmp_path.iterdir()) and int(table.path.name) >= 64
    finally:
        os.close(int(table.path.name))


PAUSED = """
if len(sys.argv) < 2:
    blocks = blocks_of(8); child = subprocess.Popen([sys.executable, "train.py", "x"], stdin=subprocess.PIPE)
else:
    blocks = blocks_of(4)
print("ready", flush=True)
total = 0
for round in range(400): total += computed(blocks, 1)
print(total, flush=True)
if len(sys.argv) < 2: child.communicate()
"""
"""Two processes that read and write 12 MiB of tensors all the time."""


@guarded
@pytest.mark.process
def test_a_pause_stops_all_processes_wherever_they_are_and_their_tensors_leave(tmp_path: Path) -> None:
    written(tmp_path, BLOCKS + PAUSED)
    expected = plain("train.py", folder=tmp_path).output
    words = [*exec_words(("--ram", "2G", "--guard-only"), tmp_path), "train.py"]
    with subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        said = program.stdout.readline() + program.stdout.readline()
        table = ProcessTable.of_program(program.pid)
        left = []
        for _ in range(10):
            table.pause()
            waiting.until(lambda: table.released, lambda: table.children())
            left.append(table.tensor_bytes)
            table.resume()
            waiting.until(lambda: not table.held, lambda: table.children())
        written_bytes = table.written_bytes
        rest, _ = program.communicate()
    assert program.returncode == 0 and sorted((said + rest).splitlines()) == sorted(expected.splitlines())
    assert not any(left) and written_bytes > 2 * (12 << 20), (left, written_bytes)


@guarded
@pytest.mark.process
def test_files_that_take_the_place_of_ours_receive_no_page(tmp_path: Path) -> None:
    """A program closed all descriptors and opened files of its own, one of which had the number of the page file."""
    program = """
    blocks = blocks_of(16)
    os.closerange(3, 4096)
    files = [open(f"file-{k}", "w+b", buffering=0) for k in range(100)]
    for file in files: file.write(bytes(20 << 20))
    print(computed(blocks, 2))
    """
    written(tmp_path, BLOCKS + textwrap.dedent(program))
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "4M", "--guard-only"))
    assert done.code == 70 and "the program closed the page file" in done.ours[0] and not done.output
    assert {zlib.crc32(path.read_bytes()) for path in tmp_path.glob("file-*")} == {zlib.crc32(bytes(20 << 20))}
