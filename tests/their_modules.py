"""Scripts with modules beside them whose names others have, too: a script of the user's, and what
plain Python finds for it.
"""

import subprocess
import sys
from pathlib import Path

NAMES = (
    "agent",
    "planner",
    "firmware",
    "tests",
    "utils",
    "types",
    "http",
    "rich",
    "msgspec",
    "dataclasses",
    "colorsys",
)
"""Of ours once, of a test runner, of everybody, of the interpreter at its start, of its library, of what we import,
of nothing that is loaded.
"""
KINDS = ("script", "module", "package")
"""What of the user's has the name."""
SAW = "saw.txt"

_LOOKS = """\
import sys
import {name}
import {name} as again
MINE = True
with open({saw!r}, "a") as file:
    print({name}.__file__, hasattr({name}, "MINE"), again is {name}, sys.path[0], file=file)
def port_job():
    from {name} import __file__ as later
    with open({saw!r}, "a") as file:
        print(later, file=file)
    return 5
if __name__ == "__main__":
    port_job()
"""


def their_script(folder: Path, name: str, kind: str) -> Path:
    """Write a script that notes which module it finds by a name, and that module; either may be the script itself."""
    module = folder / (f"{name}/__init__.py" if kind == "package" else f"{name}.py")
    module.parent.mkdir(exist_ok=True)
    script = module if kind == "script" else folder / "train.py"
    module.write_text("MINE = True\n")
    script.write_text(_LOOKS.format(name=name, saw=str(folder / SAW)))
    return script


def what_it_sees(folder: Path) -> str:
    """Return what a script has noted, which is then forgotten."""
    saw = folder / SAW
    text = saw.read_text()
    saw.unlink()
    return text


def seen_by_plain_python(script: Path) -> str:
    """Return what the script notes under `python script.py`."""
    subprocess.run([sys.executable, script.name], cwd=script.parent, check=True)
    return what_it_sees(script.parent)


NOT_IMPORTED = "raise SystemExit(f'{__name__} was imported from the working directory')\n"


def fill_with_modules(folder: Path, text: str) -> None:
    """Write a module of each name."""
    for name in NAMES:
        (folder / f"{name}.py").write_text(text)
