"""The reference that code writes has every command, function, setting, exit code and format; the
site has every page once.
"""

import importlib.util
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import port_agent
from port_agent.cli import AREAS
from port_agent.cli.groups import with_group
from port_agent.energy.sources.registry import EnergyConfig
from port_agent.policy.config import KEYS
from port_planner.base.errors import ExitCode
from port_planner.ir.bundle.manifest import FORMATS
from tests.docs.pages import ROOT, script

NOT_SHIPPED = {"proc_root", "dev_root", "plugins"}
"""Settings for tests, and a table of what others define."""


@pytest.fixture(scope="module")
def reference() -> Iterator[ModuleType]:
    with script("reference_pages") as module:
        yield module


@pytest.fixture(scope="module")
def site() -> Iterator[ModuleType]:
    with script("build_site") as module:
        yield module


def test_every_command_has_its_part(reference: ModuleType) -> None:
    page = reference.commands()
    names = [name for commands in AREAS.values() for name in commands]
    assert not [name for name in names if f"port-agent {' '.join(with_group([name]))}\n" not in page]


def test_every_public_name_has_its_part(reference: ModuleType) -> None:
    page = reference.functions()
    assert not [name for name in port_agent.__all__ if f"## {name}\n" not in page]
    assert "`ram_bytes`" in page and "Raises" in page


def test_every_setting_has_its_row(reference: ModuleType) -> None:
    page = reference.settings()
    names = {key.rpartition(".")[2] for key in KEYS} | set(EnergyConfig.__dataclass_fields__)
    assert not [name for name in names - NOT_SHIPPED if f"| `{name}` |" not in page]


def test_every_exit_code_has_a_meaning(reference: ModuleType) -> None:
    rows = [line.split(" | ") for line in reference.exit_codes().splitlines() if line.startswith("| ")][1:]
    assert {int(row[0].strip("| ")): row[1] for row in rows} == {code.value: code.name for code in ExitCode}
    assert all(row[2].strip(" |") for row in rows)


def test_every_format_has_the_numbers_of_the_code(reference: ModuleType) -> None:
    page = reference.formats()
    assert page.count("\n| ") == len(reference.FORMATS) + 1
    assert f"| bundle | {min(FORMATS)} to {max(FORMATS)} |" in page


def test_prose_is_no_markup(reference: ModuleType) -> None:
    assert reference._text("a_b*c `d_e|f` <g>") == r"a\_b\*c `d_e\|f` \<g\>"
    assert reference._text("an odd ` one") == r"an odd \` one"


def test_the_contents_have_every_page_once(site: ModuleType, reference: ModuleType) -> None:
    pages = {str(page.with_suffix("")) for page in site.sources().values() if "results" not in page.parts}
    pages |= {f"reference/{name}" for name in reference.PAGES}
    listed = Counter(name for names in site.CONTENTS.values() for name in names)
    assert set(listed) == pages - {"index"} and set(listed.values()) == {1}


def test_links_lead_to_pages_of_the_site_or_name_a_file(site: ModuleType) -> None:
    source, page = ROOT / "docs" / "how-to" / "x.md", Path("how-to/x.md")
    text = "[a `b`](../../README.md#start) ![c](../images/d.png) [e](../../Makefile) `[f](g.md)` [h](https://i.j)"
    found = site.with_links_of_the_site(text, source, page, site.sources())
    assert found == "[a `b`](../README.md#start) ![c](../images/d.png) e (`Makefile`) `[f](g.md)` [h](https://i.j)"


@pytest.mark.long
@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("sphinx") is None, reason="no Sphinx: `make docs` installs it")
def test_the_site_builds_without_a_warning() -> None:
    done = subprocess.run([sys.executable, str(ROOT / "docs" / "build_site.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
