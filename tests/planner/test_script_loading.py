import builtins
import subprocess
import sys
from pathlib import Path

import pytest

from port_planner.script_loading import imports_kept, load_script
from tests.their_modules import KINDS, NAMES, seen_by_plain_python, their_script, what_it_sees


def run(code: str, folder: Path) -> str:
    """Return what a program prints that can import this."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_script_is_loaded_and_nothing_is_left_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    script = tmp_path / "train.py"
    script.write_text("answer = 42\nplace = __file__\nmain = __name__ == '__main__'\n")
    before = list(sys.path), sys.modules["__main__"], builtins.__import__
    with imports_kept():
        module = load_script(script)
        assert (module.answer, module.place, module.main) == (42, str(script), False)
        assert sys.path[0] == str(tmp_path) and sys.modules["__main__"] is module
    assert before == (sys.path, sys.modules["__main__"], builtins.__import__)
    assert [*tmp_path.iterdir()] == [script]


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_script_finds_what_plain_python_finds(name: str, kind: str, tmp_path: Path) -> None:
    script = their_script(tmp_path, name, kind)
    expected = seen_by_plain_python(script)
    code = f"""
import rich.table, http.client, msgspec, sys
from pathlib import Path
from port_planner.script_loading import load_script
load_script(Path({str(script)!r})).port_job()
"""
    run(code, Path("/"))
    assert what_it_sees(tmp_path) == expected


@pytest.mark.process
def test_ours_stays_ours_while_theirs_is_there(tmp_path: Path) -> None:
    """Also what is loaded only then, by a module of ours: `http.cookies` beside a script's `http`, and
    a library that imports it.
    """
    for name in ("http", "colorsys", "wave"):
        (tmp_path / f"{name}.py").write_text("MINE = True\n")
    (tmp_path / "train.py").write_text(
        "import http, colorsys, wave\nfound = http.MINE and colorsys.MINE and wave.MINE\n"
    )
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours/ours.py").write_text(
        "import http.client\n"
        "def later():\n"
        "    import http.cookies, colorsys, wave, http.server, urllib.request\n"
        "    return http.cookies.SimpleCookie, http.client.HTTPConnection, colorsys.rgb_to_hsv, wave.open, http.server.HTTPServer\n"
    )
    code = f"""
import sys
sys.path.insert(1, {str(tmp_path / "ours")!r})
import ours
from pathlib import Path
from port_planner.script_loading import imports_kept, load_script
with imports_kept():
    assert load_script(Path({str(tmp_path / "train.py")!r})).found
    ours.later()
    import http, colorsys, wave
    assert http.MINE and colorsys.MINE and wave.MINE
import http.cookies, wave
assert not hasattr(http, "MINE") and not hasattr(wave, "MINE") and sys.modules["colorsys"].rgb_to_hsv
"""
    run(code, Path("/"))


@pytest.mark.process
def test_processes_that_a_script_starts_know_its_classes(tmp_path: Path) -> None:
    """Load the script in a spawned process, as a `DataLoader` does, whatever the script's name is."""
    (tmp_path / "types.py").write_text(
        "import multiprocessing, os\n"
        "class Rows:\n"
        "    pid = os.getpid()\n"
        "def pid_of(rows):\n"
        "    return rows.pid, os.getpid()\n"
        "def port_job():\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        there, here = pool.apply(pid_of, [Rows()])\n"
        "    assert there == here != os.getpid()\n"
    )
    code = "from pathlib import Path; from port_planner.script_loading import load_script; "
    run(f"{code}load_script(Path('types.py')).port_job()", tmp_path)
