"""What a later torch has that nobody decided about: storages' methods, autograd's nodes, optimizers'
functions and their parameters.
"""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

from port_planner.torch_compat import parts
from port_planner.torch_compat.autograd import NODES_THAT_ASK_FOR_MODES
from port_planner.torch_compat.tensors import STORAGE_METHODS

DECIDED = Path(parts.__file__).with_name("decided")
_HEADER = Path(torch.__file__).parent / "include/torch/csrc/autograd/generated/Functions.h"
_NODE = re.compile(r"struct TORCH_API (\w+) : public")


def decided(kind: str) -> list[str]:
    return (DECIDED / f"{kind}.txt").read_text().splitlines()


def require_decided(found: set[str], known: set[str], kind: str) -> None:
    new = sorted(found - known)
    assert not new, f"new in torch: decide, see {DECIDED / 'README.md'} and {kind}.txt: {'; '.join(new)}"


@pytest.mark.parametrize("kind", [torch.UntypedStorage, torch.TypedStorage])
def test_it_is_decided_of_each_method_of_a_storage_whether_it_is_guarded(kind: type) -> None:
    rows = [row.split(" | ") for row in decided("methods")]
    unguarded = {name for owner, _, names in rows if owner == kind.__name__ for name in names.split()}
    guarded = {name for names in STORAGE_METHODS.values() for name in names} if kind is torch.UntypedStorage else set()
    assert not guarded & unguarded
    require_decided({name for owner in kind.__mro__[:-1] for name in vars(owner)}, guarded | unguarded, "methods")


def test_every_node_of_autograd_was_looked_at() -> None:
    known = set(decided("nodes"))
    require_decided(set(_NODE.findall(_HEADER.read_text())), known, "nodes")
    assert known >= NODES_THAT_ASK_FOR_MODES.keys()


def functional_optimizers() -> set[str]:
    found = set()
    for module in pkgutil.iter_modules(torch.optim.__path__):
        of = importlib.import_module(f"torch.optim.{module.name}")
        names = {
            name
            for name in vars(of)
            if name.startswith(("_single_tensor_", "_fused_")) or name == module.name.lstrip("_")
        }
        functions = {name: vars(of)[name] for name in names if inspect.isfunction(vars(of)[name])}
        found |= {f"{name}: {' '.join(inspect.signature(function).parameters)}" for name, function in functions.items()}
    return found


def test_optimizers_functions_take_what_they_took() -> None:
    require_decided(functional_optimizers(), set(decided("optimizers")), "optimizers")


def test_what_is_new_is_named_with_where_to_decide() -> None:
    with pytest.raises(AssertionError, match=r"new in torch: decide, see .*README\.md and nodes\.txt: NewBackward0\b"):
        require_decided({"NewBackward0", "AddBackward0"}, {"AddBackward0"}, "nodes")
