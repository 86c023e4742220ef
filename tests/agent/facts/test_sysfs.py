"""Small kernel files: what is not there is nothing, what cannot be read is a fault, and neither is a default."""

import ast
import errno
import os
from pathlib import Path
from types import ModuleType

import pytest

from port_agent.facts import gpu, idle, input_devices, linux, power_supply, sessions, thermal
from port_agent.facts.readings import Fault
from port_agent.facts.sysfs import READ_LIMIT_BYTES, Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(sys=tmp_path)


def test_text_is_stripped_bounded_and_never_fails_to_decode(tree: Tree) -> None:
    (tree.sys / "type").write_bytes(b"  cpu-thermal \n")
    (tree.sys / "odd").write_bytes(b"caf\xe9\n")
    (tree.sys / "long").write_bytes(b"x" * (READ_LIMIT_BYTES + 10))
    assert tree.text(tree.sys / "type", "t") == "cpu-thermal"
    assert tree.text(tree.sys / "odd", "t") == "caf\N{REPLACEMENT CHARACTER}"
    assert len(tree.text(tree.sys / "long", "t") or "") == READ_LIMIT_BYTES
    assert tree.take_faults() == ()


def test_what_is_not_there_is_nothing_unless_it_must_be(tree: Tree) -> None:
    gone = tree.sys / "gone"
    for path in (gone, gone / "deeper"):
        assert tree.text(path, "t") is None and tree.number(path, "t") is None and tree.children(path, "t") == []
    assert tree.take_faults() == ()
    assert tree.number(gone, "temperature", required=True) is None
    assert tree.take_faults() == (Fault("temperature", f"{gone}: No such file or directory"),)
    assert tree.take_faults() == (), "told once"


@pytest.mark.parametrize(
    ("number", "faults"), [(errno.ENODATA, 0), (errno.ENODEV, 0), (errno.EIO, 1), (errno.EACCES, 1), (errno.EINVAL, 1)]
)
def test_a_sensor_that_is_switched_off_is_no_fault_and_one_that_fails_is(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, number: int, faults: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    (tree.sys / "temp").write_text("45000\n")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        assert tree.number(tree.sys / "temp", "temperature") is None
    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        assert tree.children(tree.sys, "temperature") == []
    found = tree.take_faults()
    assert len(found) == 2 * faults and all(os.strerror(number) in fault.reason for fault in found)


@pytest.mark.parametrize("text", ["warm", "", "4.5", "0x2d"])
def test_text_that_is_no_number_is_a_fault_that_shows_it(tree: Tree, text: str) -> None:
    (tree.sys / "temp").write_text(text)
    assert tree.number(tree.sys / "temp", "temperature") is None
    (fault,) = tree.take_faults()
    assert fault == Fault("temperature", f"{tree.sys / 'temp'}: expected a number, found {text!r}")
    (tree.sys / "temp").write_text("-5000\n")
    assert tree.number(tree.sys / "temp", "temperature") == -5000


def test_children_are_sorted(tree: Tree) -> None:
    for name in ("zone10", "zone2", "zone1"):
        (tree.sys / name).mkdir()
    assert [path.name for path in tree.children(tree.sys, "t")] == ["zone1", "zone10", "zone2"]


@pytest.mark.parametrize("module", [gpu, idle, input_devices, linux, power_supply, sessions, thermal])
def test_sensors_look_at_files_through_the_tree_alone(module: ModuleType) -> None:
    """Then whatever hangs or fails is noticed, and `test_admission` can make each of them fail."""
    direct = {"exists", "glob", "is_dir", "is_file", "iterdir", "read_bytes", "read_text", "resolve", "stat", "statvfs"}
    found = [
        ast.unparse(call)
        for call in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in direct
        if ast.unparse(call.func.value) not in ("tree", "self.tree")
    ]
    assert found == (["os.statvfs(directory)"] if module is linux else [])  # asked by the tree
