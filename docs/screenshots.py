"""Take the pictures of the running program: `python docs/screenshots.py [--bundle JOB.port]`;
`make screenshots` does it.

The daemon of this user's own trains the bundle of the first tutorial; its live page, the page of `show --html` and the
terminal are photographed by a headless Chromium: wide, narrow and dark. They are written to docs/images. Needs
`chromium` (or its path in CHROMIUM).
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.ansi import AnsiDecoder
from rich.console import Console, Group

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
TUTORIAL = ROOT / "docs" / "tutorials" / "first-script.md"
RAM, STEPS_BEFORE, PATIENCE_S = "260M", 6, 180.0
LOOKS = {"": (1200, 1150, "light"), "-narrow": (420, 1100, "light"), "-dark": (1200, 1150, "dark")}
"""Suffix of the file, width and height of the window in pixels, and the reader's colours."""
CONFIG = """\
[when]
external_power = false
idle_for = 0
train_while_in_use = true
min_pause = "1s"
max_temperature = 110
resume_temperature = 100
[limits.in_use]
cpu = 100
memory = "70%"
"""


def main() -> int:
    """Take all pictures; the exit code is 2 where there is no browser."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bundle", type=Path, help="a bundle (default: the tutorial's job is planned, which takes a minute)"
    )
    arguments = parser.parse_args()
    browser = shutil.which(os.environ.get("CHROMIUM", "chromium"))
    if browser is None:
        print("screenshots: no chromium; install it, or name one in CHROMIUM", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="port-screens-", dir="/var/tmp") as name:
        folder = Path(name)
        bundle = arguments.bundle or planned(folder)
        port_agent("show", str(bundle), "--html", str(folder / "show.html"))
        photograph(browser, (folder / "show.html").as_uri(), "show-page")
        with daemon(folder) as runtime:
            port_agent("job", "submit", str(bundle.absolute()), "--name", "job", "--epochs", "40", *runtime)
            wait_for(lambda: step_of(port_agent("job", "show", "job", "--json", *runtime)) >= STEPS_BEFORE)
            terminal("port-agent status", port_agent("status", *runtime, colours=True), "terminal-status")
            with live_page(folder, runtime) as address:
                photograph(browser, address, "live-page")
            port_agent("job", "cancel", "job", *runtime)
    return 0


def planned(folder: Path) -> Path:
    """Return the bundle of the tutorial's job, made in `folder`."""
    script = next(code for code in re.findall(r"```python\n(.*?)```", TUTORIAL.read_text(), re.S) if "port_job" in code)
    (folder / "job.py").write_text(script)
    port_agent("plan", str(folder / "job.py"), "--ram", RAM, "-o", str(folder / "job.port"), "--page-dir", str(folder))
    return folder / "job.port"


def port_agent(*words: str, colours: bool = False) -> str:
    """Run a command and return what it prints."""
    environment = {**os.environ, "COLUMNS": "100", **({"FORCE_COLOR": "1"} if colours else {})}
    command = [sys.executable, "-m", "port_agent.cli", *words]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


@contextmanager
def daemon(folder: Path) -> Iterator[tuple[str, str]]:
    """Run an agent in `folder`; give the words with which its clients find it."""
    (folder / "config.toml").write_text(CONFIG)
    runtime = ("--runtime-dir", str(folder / "r"))
    places = ("--state-dir", str(folder / "s"), *runtime, "--config", str(folder / "config.toml"))
    process = subprocess.Popen([sys.executable, "-m", "port_agent.cli", "run", *places])
    try:
        wait_for(lambda: any((folder / "r").glob("*.sock")))
        yield runtime
    finally:
        process.terminate()
        process.wait()


@contextmanager
def live_page(folder: Path, runtime: tuple[str, str]) -> Iterator[str]:
    """Serve the live page; give its address with the key."""
    command = [sys.executable, "-m", "port_agent.cli", "dashboard", "--port", "0", "--no-browser", *runtime]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout or () if "http://" in line)
            yield re.findall(r"http://\S+", line)[0]
        finally:
            process.terminate()


def photograph(browser: str, address: str, name: str) -> None:
    """Write the pictures of a page in each look."""
    for suffix, (width, height, colours) in LOOKS.items():
        scheme = 0 if colours == "dark" else 1
        subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={width},{height}",
                "--virtual-time-budget=8000",
                f"--blink-settings=preferredColorScheme={scheme}",
                f"--screenshot={IMAGES / f'{name}{suffix}.png'}",
                address,
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )


def terminal(command: str, printed: str, name: str) -> None:
    """Write what a terminal shows as SVG."""
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Group(f"$ {command}", *AnsiDecoder().decode(printed)))
    drawn = console.export_svg(title="")
    (IMAGES / f"{name}.svg").write_text(
        re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.S)
    )  # fonts of another site


def step_of(job: str) -> int:
    """Return the step of a job from its JSON."""
    return int(re.findall(r'"step": (\d+)', job)[0])


def wait_for(ready: Callable[[], bool]) -> None:
    """Return once `ready` is true; raises SystemExit after minutes."""
    end_s = time.monotonic() + PATIENCE_S
    while not ready():
        if time.monotonic() > end_s:
            raise SystemExit("screenshots: the job made no progress; see `port-agent status`")
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
