"""`port-agent exec`: what a program can see of Python is what it sees without it."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from agent.malloc import PreloadMode, preload_mode, preload_path
from tests.agent.follow.programs import exec_words, followed, plain, report_of

LOOK = """
import os, pickle, sys
class Mine:
    pass
print(sys.argv, sys.orig_argv, sys.path[0], len(sys.path), __name__, __spec__ and __spec__.name, __package__)
print(globals().get("__file__"), type(__loader__).__name__, sorted(k for k in globals() if k.startswith("__")))
print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine, sys.modules["__main__"].Mine is Mine)
print({k: v for k, v in os.environ.items() if k != "_"}, sys.stdin.read(), os.getcwd())
"""

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.ReLU(), torch.nn.Linear(500, 10))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(16, 300)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(loss.item().hex())
"""

PEAK_OF = """
import os, sys
status, usage = os.wait4(os.spawnv(os.P_NOWAIT, sys.argv[1], sys.argv[1:]), 0)[1:]
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""Runs a program and prints the kernel's figure in KiB; from a small process, whose own memory counts in it before exec."""


def written(folder: Path, text: str, name: str = "train.py") -> Path:
    """Return a program in a file."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def test_trains_to_the_same_losses(tmp_path: Path) -> None:
    written(tmp_path, TRAIN)
    expected = plain("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=("--ram", "400M", "--report", str(tmp_path / "report.json")))
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)
    assert len(done.ours) == 1 and "of 400.0 MiB" in done.ours[0]
    report = report_of(tmp_path / "report.json")
    assert report["program"] == ["train.py"] and report["peak_resident_bytes"] <= 400 << 20
    assert report["steps"] == 3 and "; 3 steps in " in done.ours[0]
    assert report["joules"] > 0 and f"J {report['energy_source']}" in done.ours[0]


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
    words = [*exec_words(("--ram", "350M"), tmp_path), "train.py"]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PEAK_OF, *words], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    if sys.platform == "linux":
        assert int(done.stdout) << 10 <= 350 << 20


@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "--its", "own", "--", "-x"), ("./package/main.py",), ("package",), ("-m", "package.main", "--ram", "7"),
        ("-m", "package"), ("link.py",),
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("bound", [("--tensors", "4K"), ("--ram", "1G")], ids=" ".join)
def test_the_program_sees_what_it_sees_without_a_budget(
    tmp_path: Path, words: tuple[str, ...], bound: tuple[str, ...]
) -> None:
    for name in ("train.py", "package/main.py", "package/__main__.py"):
        written(tmp_path, LOOK, name)
    (tmp_path / "package/__init__.py").touch()
    (tmp_path / "link.py").symlink_to("package/main.py")
    expected = plain(*words, folder=tmp_path, given="a line")
    done = followed(*words, folder=tmp_path, given="a line", bound=bound)
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)
    assert done.ours == ["port-agent: the program ended without importing torch; nothing was done"]


ENDS = {
    "code": "sys.exit(3)", "text": "sys.exit('bye')", "error": "1 / 0", "at once": "os._exit(7)", "none": "pass",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)", "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)",
    "syntax": "not python", "hook": "sys.excepthook = lambda *e: print('mine', e[2].tb_lineno); 1 / 0",
    "at exit": "import atexit; atexit.register(print, 'last'); sys.exit(2)",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('later') from e",
}  # fmt: skip


@pytest.mark.parametrize("end", list(ENDS))
def test_ends_as_without_a_budget(tmp_path: Path, end: str) -> None:
    written(tmp_path, "import os, signal, sys\n" + ENDS[end])
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.output, done.said) == (expected.code, expected.output, expected.said)


def test_a_missing_module_is_pythons_own_message(tmp_path: Path) -> None:
    expected, done = plain("-m", "nowhere", folder=tmp_path), followed("-m", "nowhere", folder=tmp_path)
    assert (done.code, done.said) == (expected.code, expected.said) and "No module named nowhere" in done.said


BREAKS = """
import torch
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient @ torch.ones(7, 7)
def product(x, y):
    return x @ y
try:
    Broken.apply(torch.ones(100, 100, requires_grad=True)).sum().backward()
except RuntimeError as error:
    first = error
try:
    product(torch.ones(100, 100), torch.ones(99, 2))
except RuntimeError as error:
    raise ValueError("both") from ExceptionGroup("of torch", [first, error])
"""


def test_a_traceback_shows_the_programs_lines_alone(tmp_path: Path) -> None:
    written(tmp_path, BREAKS)
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert "return x @ y" in expected.said and "gradient @" in expected.said
    assert (done.code, done.said) == (expected.code, expected.said)


WORKERS = """
import sys, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __init__(self):
        self.rows = torch.arange(64 * 5000, dtype=torch.float32).reshape(64, 5000)
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return self.rows[i] * 2 + torch.rand(5000)
def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(5000, 8)
    for batch in DataLoader(Rows(), 8, shuffle=True, num_workers=2, multiprocessing_context=sys.argv[1]):
        loss = model(batch).square().mean()
        loss.backward()
        print(loss.item().hex())
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_workers_of_a_loader(tmp_path: Path, way: str) -> None:
    written(tmp_path, WORKERS)
    expected, done = plain("train.py", way, folder=tmp_path), followed("train.py", way, folder=tmp_path)
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)
    assert len(done.ours) == 1, "a worker has no budget and says nothing"


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
    """Tell whether the allocator is preloaded here, in a build that knows of reservations."""
    path = preload_path()
    built = path is not None and b"port_malloc_allow_reservations" in path.read_bytes()
    return built and preload_mode() is PreloadMode.PRELOAD


@pytest.mark.skipif(not preloads_reservations(), reason="the allocator cannot be preloaded here, or was built before")
def test_address_space_that_is_only_reserved_takes_nothing_of_the_budget(tmp_path: Path) -> None:
    written(tmp_path, RESERVING)
    expected = plain("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=("--ram", "500M"))
    assert (done.code, done.output, done.said) == (0, expected.output, "")


def test_modules_of_the_program_come_before_ours(tmp_path: Path) -> None:
    written(tmp_path, "NAME = 'their agent'", "agent.py")
    written(tmp_path, "NAME = 'their planner'", "planner/__init__.py")
    written(tmp_path, "import agent, torch, planner\nprint(agent.NAME, planner.NAME)\n" + TRAIN)
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.output, done.said) == (0, expected.output, "")
    assert "their agent their planner" in done.output


def test_what_a_program_sets_before_it_imports_torch_holds(tmp_path: Path) -> None:
    written(tmp_path, "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\nprint(torch.get_num_threads())")
    assert followed("train.py", folder=tmp_path).output == "2\n"


def test_cpus_are_those_asked_for(tmp_path: Path) -> None:
    written(tmp_path, "import torch, os\nprint(torch.get_num_threads(), len(os.sched_getaffinity(0)))")
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "1G", "--cpus", "1"))
    assert done.output == "1 1\n"


LOOP = TRAIN.replace("range(3)", "iter(int, 1)").replace("print(loss.item().hex())", "print('step', flush=True)")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_from_outside(tmp_path: Path, number: signal.Signals) -> None:
    written(tmp_path, LOOP)
    pages = tmp_path / "pages"
    pages.mkdir()
    command = [*exec_words(("--tensors", "64K"), pages), "train.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "step\n"
        assert list(pages.iterdir()) == [], "a page file has no name from the moment it is opened"
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert process.returncode == -number
    assert list(pages.iterdir()) == []
    if number is signal.SIGINT:
        theirs = [line for line in said.splitlines() if not line.startswith("port-agent")]
        assert theirs[-1] == "KeyboardInterrupt" and str(tmp_path / "train.py") in said and "agent/follow" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ram", "3x", "--", "train.py"), "cannot read the size '3x'"),
        (("--ram", "0", "--", "train.py"), "at least one byte"),
        (("--ram", "10M", "--", "train.py"), "10.0 MiB"),
        (("--", "train.py"), "--ram --tensors is required"),
        (("--ram", "1G", "--tensors", "4K", "--", "train.py"), "not allowed with"),
        (("--ram", "1G"), "no program"),
        (("--ram", "1G", "--", "-m"), "name of a module"),
        (("--ram", "1G", "--", "-x"), "-x is not a program"),
        (("--ram", "1G", "--", "nowhere.py"), "cannot open nowhere.py: No such file"),
        (("--ram", "1G", "--page-dir", "nowhere", "--", "train.py"), "choose another --page-dir"),
        (
            ("--ram", "1G", "--report", "nowhere/r.json", "--", "train.py"),
            "cannot write nowhere/r.json: No such file or directory",
        ),
        (("--ram", "1G", "--cpus", "9999", "--", "train.py"), "--cpus 9999"),
        (("--ram", "1G", "--write-limit", "0", "--", "train.py"), "at least one byte"),
        (("--ram", "1G", "--step-deadline", "soon", "--", "train.py"), "'soon' is no duration"),
        (("--ram", "1G", "--writes-per-step", "x", "--", "train.py"), "cannot read the size 'x'"),
    ],
)
def test_wrong_arguments_are_one_line(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    written(tmp_path, "import torch")
    done = subprocess.run(
        [sys.executable, "-m", "agent.cli", "exec", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm")
def test_pages_in_ram_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "")
    refused = followed("train.py", folder=tmp_path, bound=("--ram", "1G", "--page-dir", "/dev/shm"))
    assert refused.code == 2 and "itself in RAM" in refused.ours[0]


def test_an_operator_that_cannot_fit_is_named_with_its_line(tmp_path: Path) -> None:
    written(tmp_path, "import torch\nx = torch.ones(4000, 4000)\ny = x @ x\nz = x @ x\n")
    named = [line for line in followed("train.py", folder=tmp_path, bound=("--ram", "320M")).ours if "needs" in line]
    assert len(named) == 1, "once for each operator, before it runs"
    assert named[0].startswith("port-agent: train.py:3: aten::mm needs ") and "or smaller batches" in named[0]


def test_help_teaches(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "agent.cli", "exec", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    for phrase in ("unchanged", "-- train.py", "-m my_package.train", "--page-dir", "how much to give"):
        assert phrase in done.stdout
