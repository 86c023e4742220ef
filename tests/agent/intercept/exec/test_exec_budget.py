"""The budget of `port-agent exec`: the same losses within it, and what is said at the end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from port_agent.intercept.exec import exec_budget
from port_agent.malloc import PreloadMode, preload_mode, preload_path
from port_agent.system.python_process import module_environment
from tests.agent.firmware_name import NAMED_MACHINES, named_machine
from tests.agent.intercept.programs import (
    TRAIN,
    beside_process,
    computed,
    exec_words,
    followed,
    plain,
    process_mib,
    report_of,
    written,
)
from tests.simulated_card import UNIFIED, installed, library, missing

pytestmark = pytest.mark.process

PEAK_OF = """
import os, sys
status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)[1:]
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Runs a program and prints the kernel's figure in KiB; from a small process, whose own memory
counts in it before exec.
"""


def test_trains_to_the_same_losses(tmp_path: Path) -> None:
    written(tmp_path, TRAIN)
    expected, bound = computed("train.py", folder=tmp_path), beside_process(175)
    ram_mib = int(bound[1].removesuffix("M"))
    done = followed("train.py", folder=tmp_path, bound=(*bound, "--report", str(tmp_path / "report.json")))
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)
    assert len(done.ours) == 1 and f"of {ram_mib}.0 MiB" in done.ours[0]
    report = report_of(tmp_path / "report.json")
    assert report["program"] == ["train.py"] and report["peak_resident_bytes"] <= ram_mib << 20
    assert report["steps"] == 3 and "; 3 steps in " in done.ours[0]
    assert report["joules"] > 0 and f"J {report['energy_source']}" in done.ours[0]


SAYS_WHAT_WAS_LOADED = """
import atexit, os, sys
before = set()
def loaded():
    if before:
        print("at the end:", sorted(sys.modules.keys() - before))
atexit.register(loaded)
"""
"""Registered before anything of ours, so it runs after all of it."""


@pytest.mark.parametrize("machine", NAMED_MACHINES)
def test_a_machine_that_says_its_name_has_its_summary_and_report(machine: str, tmp_path: Path) -> None:
    """Nothing is loaded for the first time at the end: hooks of imports would look at a budget that is gone."""
    written(
        tmp_path,
        TRAIN + "import atexit\natexit.register(lambda: __import__('sitecustomize').before.update(sys.modules))\n",
    )
    environment = named_machine(tmp_path / "site", machine, SAYS_WHAT_WAS_LOADED)
    bound = (*beside_process(175), "--report", str(tmp_path / "report.json"))
    done = followed("train.py", folder=tmp_path, bound=bound, environment=environment)
    assert (done.code, done.said) == (0, "") and done.output.endswith("at the end: []\n")
    assert len(done.ours) == 1 and "J " in done.ours[0]
    report = report_of(tmp_path / "report.json")
    assert report["joules"] > 0 and report["tensor_limit_bytes"] > 0


def test_the_end_of_the_process_is_within_the_budget_too(tmp_path: Path) -> None:
    written(
        tmp_path,
        """
        import torch
        model = torch.nn.Sequential(*(torch.nn.Linear(2000, 2000) for _ in range(12)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            model(torch.ones(2, 2000)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    words = [*exec_words(beside_process(125), tmp_path), "train.py"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PEAK_OF, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    if sys.platform == "linux":
        assert int(done.stdout) << 10 <= process_mib() + 125 << 20


TRAINS_BESIDE = """
import torch
model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(13)))
optimizer = torch.optim.AdamW(model.parameters())
def train(x):
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""
"""208 MiB of weights, gradients and state."""

READS_MAPPED_ROWS = (
    TRAINS_BESIDE
    + """
import numpy as np
rows = np.memmap("rows.bin", np.float32, "r").reshape(-1, 1024)
for start in range(0, len(rows), 2048):
    train(torch.from_numpy(rows[start : start + 2048].mean(0, keepdims=True)))
"""
)
LOADS_MODULES = (
    TRAINS_BESIDE
    + """
import importlib
for _ in range(3):
    train(torch.ones(2, 1024))
for k in range(64):
    importlib.import_module(f"many.m{k}")
train(torch.ones(2, 1024))
"""
)
PICKLES = (
    TRAINS_BESIDE
    + """
import pickle
for _ in range(3):
    train(torch.ones(2, 1024))
print(len(pickle.dumps(model)))
train(torch.ones(2, 1024))
"""
)
MAPPED_BYTES = 256 << 20
MODULES, MODULE_BYTES = 64, 1 << 20
BETWEEN_LOOKS_BYTES = 8 << 20
"""What a step of these reads or loads, which is seen at its next operator."""
PICKLE_BYTES = 52 << 20
"""pickle copies what it has of it as it grows: half of that may lie beside the whole, and nobody sees it coming."""


@pytest.mark.sample(1)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("program", "unseen_bytes"),
    [(READS_MAPPED_ROWS, BETWEEN_LOOKS_BYTES), (LOADS_MODULES, BETWEEN_LOOKS_BYTES), (PICKLES, PICKLE_BYTES // 2)],
    ids=["mapped rows", "modules", "pickle"],
)
def test_tensors_leave_for_what_a_program_maps_loads_or_pickles_while_it_trains(
    tmp_path: Path, program: str, unseen_bytes: int
) -> None:
    written(tmp_path, program)
    os.truncate(os.open(tmp_path / "rows.bin", os.O_CREAT | os.O_WRONLY), MAPPED_BYTES)
    for k in range(MODULES):
        written(tmp_path, f"HELD = b'.{k}' * {MODULE_BYTES // 2}", f"many/m{k}.py")
    bound = beside_process(125)
    done = followed("train.py", folder=tmp_path, bound=(*bound, "--report", str(tmp_path / "report.json")))
    assert done.code == 0, done.said
    ram_bytes = int(bound[1].removesuffix("M")) << 20
    assert report_of(tmp_path / "report.json")["peak_resident_bytes"] <= ram_bytes + unseen_bytes


RESERVING = """
import importlib.util, mmap, torch
if importlib.util.find_spec("pyarrow"):
    import pyarrow
    print(len(pyarrow.array(range(1000))))  # its allocator reserves a gibibyte
memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
memory[:4] = b"here"
print(torch.ones(1000).sum().item(), memory[:4])
"""
"""0x4000 is Linux's MAP_NORESERVE."""


def preloads_reservations() -> bool:
    """Return whether the allocator is preloaded here, in a build that knows of reservations."""
    path = preload_path()
    built = path is not None and b"port_malloc_allow_reservations" in path.read_bytes()
    return built and preload_mode() is PreloadMode.PRELOAD


@pytest.mark.skipif(not preloads_reservations(), reason="the allocator cannot be preloaded here, or was built before")
def test_address_space_that_is_only_reserved_takes_nothing_of_the_budget(tmp_path: Path) -> None:
    written(tmp_path, RESERVING)
    expected = computed("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=beside_process(275))
    assert (done.code, done.output, done.said) == (0, expected.output, "")


MAPPING = """
import resource, sys
from port_agent.intercept.exec.exec_budget import _exempt_file_mappings
from port_agent.system.memory_limit import widen_data_limit
import torch
from safetensors.torch import load_file
used = next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (used + (64 << 20), resource.RLIM_INFINITY))
if sys.argv[1] == "exempt":
    _exempt_file_mappings(widen_data_limit)
print(load_file("weights.safetensors")["w"].shape[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts private mappings so")
@pytest.mark.parametrize("cure", ["exempt", "none"])
def test_weights_that_stay_in_their_file_are_no_memory_to_rlimit_data(tmp_path: Path, cure: str) -> None:
    save_file({"w": torch.zeros(32 << 20)}, tmp_path / "weights.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", MAPPING, cure],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **module_environment()},
    )
    assert done.stdout == (f"{32 << 20}\n" if cure == "exempt" else ""), done.stderr


def test_an_operator_that_cannot_fit_is_named_with_its_line(tmp_path: Path) -> None:
    written(tmp_path, "import torch\nx = torch.ones(4000, 4000)\ny = x @ x\nz = x @ x\n")
    named = [line for line in followed("train.py", folder=tmp_path, bound=beside_process(80)).ours if "needs" in line]
    assert len(named) == 1, f"once for each operator, before it runs: {named}"
    assert named[0].startswith("port-agent: train.py:3: aten::mm needs ") and "or smaller batches" in named[0]


ON_CARD = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).to("card")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(64, 512).to("card")).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""
"""A program that trains on the simulated card, where it takes 35 MiB."""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_gpu_has_a_budget_of_its_own_and_is_named_where_it_has_none(tmp_path: Path) -> None:
    library()
    environment = installed(tmp_path / "card")
    written(tmp_path, ON_CARD)
    expected = plain("train.py", folder=tmp_path, environment=environment)
    assert expected.code == 0 and len(set(expected.output.split())) == 3, expected.said
    bound = ("--gpu-ram", "20M", "--report", str(tmp_path / "report.json"))
    run = followed("train.py", folder=tmp_path, bound=bound, environment=environment)
    assert (run.code, run.output, run.said) == (0, expected.output, "")
    assert " of 20.0 MiB, 3.0 MiB of context and libraries" in run.ours[-1] and "more than fits" not in run.ours[-1]
    device = report_of(tmp_path / "report.json")["device"]
    assert device["peak_tensor_bytes"] <= 17 << 20 and device["written_bytes"] > 40 << 20
    unbounded = followed("train.py", folder=tmp_path, bound=("--ram", "1G"), environment=environment)
    assert unbounded.output == expected.output
    assert "card's own memory is not in it: --gpu-ram bounds that" in unbounded.ours[-1]


SHARING = (
    ON_CARD.replace("512", "1024")
    + """
kept = [p.cpu() for p in model.parameters()]
print(sum(float(p.double().sum().item()) for p in kept).hex())
"""
)
"""A larger one, of 130 MiB on the card, which then has its weights on the host, too."""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_gpu_that_computes_in_the_hosts_memory_shares_the_budget_of_that(tmp_path: Path) -> None:
    """What leaves it goes to the disk, as the host's tensors; the kernel counts what both take."""
    library()
    environment = {**installed(tmp_path / "card"), UNIFIED: "1", "OMP_NUM_THREADS": "1"}
    written(tmp_path, SHARING)
    expected = plain("train.py", folder=tmp_path, environment=environment)
    bound = beside_process(90)
    words = [*exec_words((*bound, "--report", str(tmp_path / "report.json")), tmp_path), "train.py"]
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PEAK_OF, *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    *output, peak_kib = run.stdout.splitlines()
    assert output == expected.output.splitlines() and int(peak_kib) << 10 <= int(bound[1].removesuffix("M")) << 20
    report = report_of(tmp_path / "report.json")
    device = report["device"]
    assert device["written_bytes"] > 100 << 20 and report["written_bytes"] > 50 << 20
    assert device["unseen_peak_bytes"] == 3 << 20 and "card:0 shares it: tensors " in run.stderr


def test_a_budget_for_a_gpu_that_is_not_used_says_so(tmp_path: Path) -> None:
    written(tmp_path, "import torch; print(torch.ones(3).sum().item())")
    run = followed("train.py", folder=tmp_path, bound=("--gpu-ram", "1G"))
    assert (run.code, run.output) == (0, "3.0\n") and "no tensor was on a GPU" in run.ours[-1]


def test_a_build_of_torch_whose_tensors_are_not_guarded_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As builds for Arm were, which allocate by themselves: nothing was held to a budget, and nothing was said."""

    class Elsewhere:
        def usable_bytes(self, address: int) -> int:
            return 0

    monkeypatch.setattr(exec_budget, "active_guard", Elsewhere)
    options = exec_budget.ExecOptions(
        1 << 30, None, str(tmp_path), None, None, None, None, None, 0.0, False, memory=exec_budget.ExecMemory.GUARDED
    )
    with pytest.raises(SystemExit) as ended:
        exec_budget.ExecBudget(options, [])._start_guard()
    assert ended.value.code == 2 and "1.0 MiB is not in guarded memory" in capsys.readouterr().err
