"""Private parts of torch are touched in `port_planner.torch_compat` alone.

Found are: imports of private names from torch; chains of attributes that begin with `torch` or with a name imported
from it; private attributes, and strings that name them, that objects of torch's have (`_held`) and that the module does
not define itself; modules `torch._...` by their names. Names of operators (`torch.ops.aten._softmax`) are no private
parts, `_schema` is excepted.

What no source text tells: a private attribute of an object of torch's that the same module defines for one of its own;
one whose name is computed.
"""

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch

from tests.house import ROOT, product_files, tree_of

ROOM = ROOT / "planner/port_planner/torch_compat"

_EXEMPT = frozenset({"_schema", "_asdict", "_fields", "_make", "_replace"})
"""What an operator's names, arguments and aliases are read off, and what every named tuple of Python's has."""
_OPERATORS = ("ops", "aten")
_MARKS = frozenset(
    {"_opt_called", "_need_device_dtype_check_for_fused", "_wrapped_by_lr_sched", "_torchdynamo_orig_backend"}
)
"""Attributes that torch puts on objects at some time."""


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _EXEMPT


@cache
def _held() -> frozenset[str]:
    """Return the private attributes of objects of torch's that our code holds."""
    weight = torch.zeros(1, requires_grad=True)
    adam = torch.optim.Adam([weight])
    objects: tuple[Any, ...] = (
        weight, weight.untyped_storage(), torch.TypedStorage, torch.ops.aten.add.Tensor, torch.ops.aten.add, adam,
        torch.optim.lr_scheduler.StepLR(adam, 1), torch.nn.Linear(1, 1), torch.library.Library, torch.Generator(),
        torch.utils._python_dispatch.TorchDispatchMode, (weight * 2).grad_fn, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(weight)),
        torch.nn.utils.rnn.PackedSequence, torch.autograd.forward_ad, torch.autograd, torch.mps, torch.cuda, torch.cpu,
    )  # fmt: skip
    return _MARKS | frozenset(
        name for one in objects for name in (*dir(one), *getattr(one, "__dict__", ())) if _is_private(name)
    )


def _chain(node: ast.expr) -> list[str]:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else ["?", *reversed(parts)]


def _own_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return what a module defines: functions, classes, fields, slots and attributes of `self`."""
    own = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
            if _chain(node)[0] in ("self", "cls") or isinstance(node, ast.Name):
                own.add(_chain(node)[-1])
            if isinstance(node, ast.Name) and node.id == "__slots__":
                own |= {c.value for c in nodes if isinstance(c, ast.Constant) and isinstance(c.value, str)}
    return own


def _imported(node: ast.Import | ast.ImportFrom) -> list[tuple[str, str]]:
    """Return each imported name in full, and what it is called here."""
    module = f"{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
    return [(module + a.name, a.asname or (a.name if module else a.name.partition(".")[0])) for a in node.names]


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the private parts of torch that a module touches, with their lines."""
    nodes = [*ast.walk(tree)]
    own, of_torch = _own_names(nodes), {"torch"}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found = [(full, name) for full, name in _imported(node) if full.split(".")[0] == "torch"]
            of_torch |= {name for _, name in found}
            yield from ((node.lineno, full) for full, _ in found if any(map(_is_private, full.split("."))))
    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            chain = _chain(node)
            is_operator = any(part.removeprefix("_") in _OPERATORS for part in chain)
            if not is_operator and (chain[0] in of_torch or (node.attr in _held() and node.attr not in own)):
                yield node.lineno, ".".join(chain)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id.endswith("attr"):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            yield from ((node.lineno, name) for name in names if name in _held() and name not in own)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch._") and " " not in str(node.value):
            yield node.lineno, str(node.value)


def test_no_other_module_touches_a_private_part_of_torch() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in product_files()
        if ROOM not in path.parents
        for line, name in sorted(set(private_uses(tree_of(path))))
    ]
    assert not found, "private parts of torch belong to port_planner.torch_compat:\n" + "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from torch._ops import HigherOrderOperator",
        "from torch.optim.sgd import _fused_sgd",
        "import torch._dynamo",
        "import torch\ntorch._C._get_mkldnn_enabled()",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "def f(t):\n    return t.untyped_storage()._cdata",
        "def f(optimizer):\n    optimizer._opt_called = True",
        "def f(step):\n    return hasattr(step, '_version')",
        "import sys\nsys.modules['torch._dynamo']",
        "class A:\n    def f(self, other):\n        self._own = other._buffers",
    ],
)
def test_a_private_part_is_found(source: str) -> None:
    assert list(private_uses(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "def f(func):\n    return func._schema.name",
        "import torch\ntorch.ops.aten._softmax.default",
        "class A:\n    def __init__(self):\n        self._buffers = []\n    def f(self, other):\n        return other._buffers",
        "TABLE = ('_softmax', '_is_all_true')",
    ],
)
def test_what_is_no_private_part_is_not_found(source: str) -> None:
    assert not list(private_uses(ast.parse(source)))
