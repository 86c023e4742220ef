"""The table of the command line: each command is in the area that adds it, and loads no other."""

import argparse
import importlib
import subprocess
import sys

import pytest

from port_agent.cli import AREAS, build_parser
from port_agent.cli.groups import with_group
from port_agent.cli.manual import command_helps


@pytest.mark.parametrize("area", AREAS)
def test_an_area_adds_the_commands_of_the_table_and_no_other(area: str) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"port_agent.cli.{area}").add_commands(commands)
    assert tuple(commands.choices or ()) == AREAS[area]


def test_no_command_is_in_two_areas() -> None:
    names = [name for commands in AREAS.values() for name in commands]
    helps = "".join(one.name + "\n" for one in command_helps(build_parser()))
    assert len(names) == len(set(names))
    assert not [name for name in names if f"port-agent {' '.join(with_group([name]))}\n" not in helps]


@pytest.mark.process
def test_a_command_loads_its_own_area() -> None:
    program = (
        "import sys, port_agent.cli as cli\n"
        "try: cli.main(['status', '--help'])\n"
        "except SystemExit: pass\n"
        "print([area for area in cli.AREAS if f'port_agent.cli.{area}' in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['daemon']"
