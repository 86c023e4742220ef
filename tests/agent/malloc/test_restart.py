import os
import subprocess
import sys
from pathlib import Path

import pytest

from port_agent.malloc import PreloadMode, preload_mode

SCRIPT = """
import os, sys
from port_agent.malloc import active, begin_again_preloaded
begin_again_preloaded(1 << 26)
allocator = active()
print(sys.argv[1:], allocator and allocator.stats().limit_bytes)
print({name: value for name, value in os.environ.items() if name == "LD_PRELOAD" or name.startswith("PORT_MALLOC")})
"""


def ran(folder: Path, environment: dict[str, str]) -> list[str]:
    script = folder / "command.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), "a word", "--option"],
        env={**os.environ, "PYTHONPATH": root, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.process
@pytest.mark.skipif(preload_mode() is not PreloadMode.PRELOAD, reason="the allocator cannot be preloaded here")
@pytest.mark.parametrize("before", [{}, {"LD_PRELOAD": "libm.so.6"}])
def test_a_command_becomes_itself_with_the_allocator_and_its_children_see_the_environment_as_it_was(
    before: dict[str, str], tmp_path: Path
) -> None:
    words, variables = ran(tmp_path, before)
    assert words == f"['a word', '--option'] {1 << 26}"
    assert variables == str(before)


def test_where_it_cannot_be_preloaded_the_command_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from port_agent.malloc import restart

    monkeypatch.setattr(restart, "preload_mode", lambda: PreloadMode.SYSTEM)
    monkeypatch.setattr(os, "execve", lambda *_: pytest.fail("it began again"))
    restart.begin_again_preloaded(1 << 26)
