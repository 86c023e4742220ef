"""Modules that hardly anybody uses are loaded when they are used, and are then what they are without a budget."""

from pathlib import Path

import pytest

from tests.agent.intercept.programs import followed, plain

pytestmark = pytest.mark.process

IMPORTS = """
import sys, torch
import transformers.modeling_utils, transformers.loss.loss_utils
import torch.distributed.tensor._decompositions as decompositions
before = decompositions.GuardOnDataDependentSymNode
print("sympy" in sys.modules, "scipy.optimize._optimize" in sys.modules)
"""

USES = {
    "function": """
from transformers.loss.loss_for_object_detection import linear_sum_assignment
print([list(x) for x in linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])])
""",
    "other name": "from scipy.optimize import minimize_scalar\nprint(minimize_scalar(lambda x: (x - 2) ** 2).x)",
    "attribute": "import scipy\n"
    "print(scipy.optimize.brentq(lambda x: x - 1, 0, 3), "
    "scipy.optimize.linear_sum_assignment.__name__)",
    "submodule": """
import scipy, scipy.optimize._zeros_py as zeros
print(zeros is sys.modules["scipy.optimize._zeros_py"] is scipy.optimize._zeros_py, zeros.__spec__.name)
""",
    "error": """
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ShapeEnv, GuardOnDataDependentSymNode
print(decompositions.GuardOnDataDependentSymNode is GuardOnDataDependentSymNode is symbolic_shapes.GuardOnDataDependentSymNode)
print(torch.fx.experimental.symbolic_shapes is sys.modules["torch.fx.experimental.symbolic_shapes"], ShapeEnv().var_to_val)
""",
    "stand-in": """
from torch.distributed.tensor._collective_utils import guard_or_false
print(guard_or_false(1 < 2), guard_or_false(2 < 1))
""",
    "all names": "from sympy import *\nprint(Symbol('x') + 1)",
    "version": "import sympy\nprint(sympy.__version__, isinstance(sympy.Symbol('x'), sympy.Basic))",
}

ON_META = """
import sys, torch
with torch.device("meta"):
    layer = torch.nn.Embedding(8, 4)
    again = torch.nn.Linear(4, 4)(layer(torch.zeros(3, dtype=torch.long))).relu() * 2
print(again.shape, again.stride(), layer.weight.detach().normal_().dtype)
print("sympy.core" in sys.modules)
"""

META_KERNELS = """
found = torch.empty(3, 4, device="meta").argmax(0)
try:
    torch.empty(3, 4, device="meta").argmax(7)
except IndexError as error:
    print(found.shape, error, end=" ")
print(torch.empty(3, 4, device="meta").slice_scatter(torch.empty(3, 2, device="meta"), 1, 0, 2).stride())
print("sympy.core" in sys.modules)
"""

PLAIN_NUMBERS = """
import torch
from torch.fx.experimental import symbolic_shapes as shapes
asked = {
    "expect_true": [(True,), (False,), (3,)],
    "guard_or_false": [(True,), (False,), (3,)],
    "guard_or_true": [(True,), (False,)],
    "guard_size_oblivious": [(True,), (False,)],
    "is_nested_int": [(3,), (2.5,)],
    "statically_known_true": [(True,), (False,), (3,)],
    "sym_and": [(True,), (True, False), (True, True, True), (1, 1)],
    "sym_eq": [((2, 3), [2, 3]), (torch.Size((2, 3)), (2,)), ((2, (3,)), (2, (3,))), (2, 2)],
    "sym_or": [(False,), (False, True), (False, False)],
}
functions = {name: getattr(shapes, name) for name in asked}
for name, function in functions.items():
    for given in asked[name]:
        try:
            print(name, repr(function(*given)))
        except Exception as error:
            print(name, type(error).__name__)
"""


PICKLED = """
import pickle, sys, torch
import transformers.modeling_utils, transformers.loss.loss_utils
print(pickle.dumps(torch.per_channel_affine).hex())
print("torch._dynamo.config" in sys.modules, "sympy.core" in sys.modules, "scipy.optimize._optimize" in sys.modules)
"""
"""A value that does not say which module it is from: pickle asks all that there are."""


@pytest.mark.long
def test_what_pickle_asks_every_module_for_is_found_and_loads_none(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PICKLED)
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.said) == (0, expected.said)
    assert done.output.splitlines() == [expected.output.splitlines()[0], "False False False"]


OFTEN = {"attribute"}
"""Each use takes two processes; the others are looked at before a release."""


@pytest.mark.process
@pytest.mark.parametrize("use", [use if use in OFTEN else pytest.param(use, marks=pytest.mark.long) for use in USES])
def test_what_libraries_only_name_is_not_loaded_and_what_is_used_is_the_real_one(tmp_path: Path, use: str) -> None:
    (tmp_path / "train.py").write_text(IMPORTS + USES[use])
    expected = plain("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "1G"))
    named, *used = expected.output.splitlines()
    assert named == "True True" and used
    assert (done.code, done.output.splitlines(), done.said) == (0, ["False False", *used], expected.said)


PARTS = {"layout": ON_META, "kernels": META_KERNELS, "numbers": PLAIN_NUMBERS}
"""They run one after the other in one process: each takes torch and two runs."""
_NEXT = "-- next\n"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[str], list[str]]]:
    """Return the lines that each of `PARTS` prints in plain Python and followed."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "train.py").write_text(f"print({_NEXT!r}, end='')\n".join(PARTS.values()))
    expected, done = plain("train.py", folder=folder), followed("train.py", folder=folder)
    assert (expected.code, done.code) == (0, 0), expected.said + done.said
    printed = ([part.splitlines() for part in ended.output.split(_NEXT)] for ended in (expected, done))
    return dict(zip(PARTS, zip(*printed, strict=True), strict=True))


@pytest.mark.process
@pytest.mark.parametrize("part", ["layout", "kernels"])
def test_laying_out_a_model_and_checks_of_meta_kernels_load_none_of_them(
    part: str, parts: dict[str, tuple[list[str], list[str]]]
) -> None:
    expected, done = parts[part]
    assert len(expected) == 2 and expected[:-1] == done[:-1] and (expected[-1], done[-1]) == ("True", "False")


def test_stand_ins_say_of_plain_numbers_what_the_real_ones_say(parts: dict[str, tuple[list[str], list[str]]]) -> None:
    expected, done = parts["numbers"]
    assert done == expected and any("AssertionError" in line for line in done)
