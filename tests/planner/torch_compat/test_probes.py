"""The probes find every private part in the torch that is there, and say what a torch lacks."""

import json
import subprocess
import sys
from typing import Any

import pytest

from port_planner.torch_compat import parts
from port_planner.torch_compat.parts import use_part
from port_planner.torch_compat.probes import main, missing_parts


def test_this_torch_has_every_private_part() -> None:
    assert missing_parts() == []


def test_what_is_missing_is_named_with_what_it_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARTS", parts.PARTS)
    mine: list[Any] = []
    monkeypatch.setattr("port_planner.torch_compat.probes.PARTS", mine)
    monkeypatch.setattr(parts, "PARTS", mine)
    use_part("torch._C._gone_in_a_later_torch", "a test", "the test fails")
    (missing,) = missing_parts()
    assert (missing.name, missing.breaks) == ("torch._C._gone_in_a_later_torch", "the test fails")


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("port_planner.torch_compat.probes.MODULES", ("autograd", "gone"))
    assert missing_parts()[0].name == "torch_compat.gone"


def test_as_a_program_it_prints_version_and_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    found = json.loads(capsys.readouterr().out)
    assert found["version"][0].isdigit() and found["parts"] > 30 and found["missing"] == []


@pytest.mark.process
def test_the_list_of_parts_and_what_delays_torch_need_no_torch() -> None:
    code = (
        "import sys, port_planner.torch_compat.loading, port_planner.torch_compat.probes; print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
