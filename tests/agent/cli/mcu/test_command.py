"""The commands of `port-agent mcu`: each is found when it runs, and none loads anything before."""

import argparse
import subprocess
import sys

import pytest

from port_agent.cli import build_parser, main


def actions() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of `mcu`'s actions by name."""
    parser = build_parser(("mcu.command",))
    (mcu,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    (found,) = (a for a in mcu.choices["mcu"]._actions if isinstance(a, argparse._SubParsersAction))
    return dict(found.choices)


@pytest.mark.parametrize("name", sorted(actions()))
def test_every_action_has_its_command(name: str) -> None:
    with pytest.raises(AttributeError, match="Namespace"):  # the command began: it lacks its first option
        actions()[name].get_default("run")(argparse.Namespace())


@pytest.mark.process
def test_help_loads_no_board() -> None:
    code = "import sys, port_agent.cli.mcu.command; sys.exit('serial' in sys.modules or 'port_agent.mcu.board.catalogue' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_part_of_samples_is_k_of_n(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mcu", "train", ".", "--shard", "4/3"])
    assert "4/3" in capsys.readouterr().err
