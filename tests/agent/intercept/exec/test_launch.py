"""What a program under `port-agent exec` can see of Python is what it sees without it."""

import gc
import os
import signal
import subprocess
import types
from importlib.abc import Loader
from pathlib import Path

import pytest

from port_agent.intercept.exec.launch import _TorchLoader
from tests.agent.intercept.programs import TRAIN, exec_words, followed, plain, written
from tests.their_modules import KINDS, NAMES, seen_by_plain_python, their_script, what_it_sees

LOOK = """
import os, pickle, sys
class Mine:
    pass
print(sys.argv, sys.orig_argv, sys.path[0], len(sys.path), __name__, __spec__ and __spec__.name, __package__)
print(globals().get("__file__"), type(__loader__).__name__, sorted(k for k in globals() if k.startswith("__")))
print(pickle.loads(pickle.dumps(Mine())).__class__ is Mine, sys.modules["__main__"].Mine is Mine)
print({k: v for k, v in os.environ.items() if k != "_"}, sys.stdin.read(), os.getcwd())
"""


@pytest.mark.process
@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "words",
    [
        ("train.py", "--its", "own", "--", "-x"),
        ("./package/main.py",),
        ("package",),
        ("-m", "package.main", "--ram", "7"),
        ("-m", "package"),
        ("link.py",),
    ],
    ids=" ".join,
)
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
    "code": "sys.exit(3)",
    "text": "sys.exit('bye')",
    "error": "1 / 0",
    "at once": "os._exit(7)",
    "none": "pass",
    "terminated": "os.kill(os.getpid(), signal.SIGTERM)",
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(60)",
    "syntax": "not python",
    "hook": "sys.excepthook = lambda *e: print('mine', e[2].tb_lineno); 1 / 0",
    "at exit": "import atexit; atexit.register(print, 'last'); sys.exit(2)",
    "context": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('later') from e",
}


@pytest.mark.process
@pytest.mark.sample(6)
@pytest.mark.parametrize("end", list(ENDS))
def test_ends_as_without_a_budget(tmp_path: Path, end: str) -> None:
    written(tmp_path, "import os, signal, sys\n" + ENDS[end])
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.output, done.said) == (expected.code, expected.output, expected.said)


@pytest.mark.process
def test_a_missing_module_is_pythons_own_message(tmp_path: Path) -> None:
    expected, done = plain("-m", "nowhere", folder=tmp_path), followed("-m", "nowhere", folder=tmp_path)
    assert (done.code, done.said) == (expected.code, expected.said) and "No module named nowhere" in done.said


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
    for batch in DataLoader(Rows(), 8, shuffle=True, num_workers=int(sys.argv[2]), multiprocessing_context=sys.argv[1]):
        loss = model(batch).square().mean()
        loss.backward()
        print(loss.item().hex())
if __name__ == "__main__":
    main()
"""


@pytest.mark.process
@pytest.mark.sample(1)
@pytest.mark.parametrize(("way", "count"), [("fork", "2"), ("spawn", "1")])  # each that is spawned imports torch
def test_workers_of_a_loader(tmp_path: Path, way: str, count: str) -> None:
    written(tmp_path, WORKERS)
    words = ("train.py", way, count)
    expected, done = plain(*words, folder=tmp_path), followed(*words, folder=tmp_path)
    assert (done.code, done.output) == (0, expected.output)
    for said in (
        expected.said,
        done.said,
    ):  # a spawned worker's semaphores, where Python's own tracker hears of them late
        assert not said or "resource_tracker" in said
    assert len(done.ours) == 1, "a worker has no budget and says nothing"


@pytest.mark.process
def test_modules_of_the_program_come_before_ours(tmp_path: Path) -> None:
    written(tmp_path, "NAME = 'their agent'", "agent.py")
    written(tmp_path, "NAME = 'their planner'", "planner/__init__.py")
    written(tmp_path, "import agent, torch, planner\nprint(agent.NAME, planner.NAME)\n" + TRAIN)
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.output, done.said) == (0, expected.output, "")
    assert "their agent their planner" in done.output


@pytest.mark.process
@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_program_finds_the_modules_that_plain_python_finds(name: str, kind: str, tmp_path: Path) -> None:
    script = their_script(tmp_path, name, kind)
    expected = seen_by_plain_python(script)
    done = followed(script.name, folder=script.parent)
    assert (done.code, done.said) == (0, "")
    assert what_it_sees(tmp_path) == expected


@pytest.mark.process
def test_a_budget_is_kept_beside_modules_that_are_called_as_ours(tmp_path: Path) -> None:
    for name in ("agent", "planner", "utils", "tests", "msgspec", "psutil", "xxhash"):
        written(tmp_path, "MINE = True", f"{name}.py")
    written(tmp_path, "import xxhash, msgspec, agent\nprint(xxhash.MINE, msgspec.MINE, agent.MINE)\n" + TRAIN)
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.output, done.said) == (0, expected.output, "")


@pytest.mark.process
def test_what_a_program_sets_before_it_imports_torch_holds(tmp_path: Path) -> None:
    written(tmp_path, "import os\nos.environ['OMP_NUM_THREADS'] = '2'\nimport torch\nprint(torch.get_num_threads())")
    assert followed("train.py", folder=tmp_path).output == "2\n"


LOOP = TRAIN.replace("range(3)", "iter(int, 1)").replace("print(loss.item().hex())", "print('step', flush=True)")


@pytest.mark.process
def test_a_program_that_looks_for_torch_before_it_imports_it_has_its_budget(tmp_path: Path) -> None:
    """As transformers looks, and others that can do without."""
    looks = "import importlib.util, sys\nfor _ in range(2): found = importlib.util.find_spec('torch')\n"
    written(
        tmp_path, looks + "print('torch' in sys.modules)\nimport torch\nprint(torch.__spec__.origin == found.origin)"
    )
    done = followed("train.py", folder=tmp_path)
    assert (done.code, done.output) == (0, "False\nTrue\n"), done.said
    assert "peak" in done.ours[0], "no budget was held"


@pytest.mark.process
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
        assert (
            theirs[-1] == "KeyboardInterrupt"
            and str(tmp_path / "train.py") in said
            and "port_agent/intercept" not in said
        )


def test_nothing_is_collected_while_torch_is_imported() -> None:
    collects: list[bool] = []

    class Torch(Loader):
        def exec_module(self, module: types.ModuleType) -> None:
            collects.append(gc.isenabled())

    loader = _TorchLoader(Torch(), lambda: None, lambda: collects.append(gc.isenabled()))
    loader.exec_module(types.ModuleType("torch"))
    assert collects == [False, True]
