"""What a private part is: found by its name, probed, and listed with what breaks without it."""

import pytest

from port_planner.torch_compat import parts
from port_planner.torch_compat.parts import PrivatePart, find, require, use_part, uses
from port_planner.torch_compat.probes import MODULES


def test_a_part_is_found_by_attributes_modules_and_calls() -> None:
    assert find("json.decoder.JSONDecoder()").strict is True
    with pytest.raises(ImportError):
        find("json.nothing.at_all")


def test_a_missing_part_says_what_is_missing_and_one_that_is_there_nothing() -> None:
    assert PrivatePart("json.loads", "", "", lambda: find("json.loads")).trouble() == ""
    assert "nothing" in PrivatePart("json.nothing", "", "", lambda: find("json.nothing")).trouble()
    assert (
        PrivatePart("x", "", "", lambda: require(False, "it is otherwise")).trouble() == "ValueError: it is otherwise"
    )


def test_a_function_is_registered_with_its_docstring_for_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PARTS", [])

    @uses("json.loads", "nothing is read")
    def read() -> int:
        """Read it.

        At once.
        """
        return 3

    use_part("json.nothing", "it is wanted", "nothing works")
    first, second = parts.PARTS
    assert read() == 3 and (first.reason, first.breaks_without, first.trouble()) == ("Read it.", "nothing is read", "")
    assert second.trouble() and second.seen_in == ("2.13", "2.14", "2.15")


def test_every_part_says_why_it_is_used_and_what_breaks_without_it() -> None:
    for name in MODULES:
        find(f"port_planner.torch_compat.{name}")
    assert len(parts.PARTS) > 30
    assert all(part.name and part.reason and part.breaks_without for part in parts.PARTS)
    assert len({part.name for part in parts.PARTS}) == len(parts.PARTS)
