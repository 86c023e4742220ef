"""Modules that hardly anybody uses are loaded when they are used, and are then what they are without a budget."""

from pathlib import Path

import pytest

from tests.agent.follow.programs import followed, plain

IMPORTS = """
import sys, torch
import transformers.modeling_utils, transformers.loss.loss_utils
import torch.distributed.tensor._decompositions as decompositions
before = decompositions.GuardOnDataDependentSymNode
"""

USES = {
    "function": """
from transformers.loss.loss_for_object_detection import linear_sum_assignment
print([list(x) for x in linear_sum_assignment([[4, 1, 3], [2, 0, 5], [3, 2, 2]])])
""",
    "other name": "from scipy.optimize import minimize_scalar\nprint(minimize_scalar(lambda x: (x - 2) ** 2).x)",
    "attribute": "import scipy\nprint(scipy.optimize.brentq(lambda x: x - 1, 0, 3), scipy.optimize.linear_sum_assignment.__name__)",
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


def test_libraries_that_only_name_them_do_not_load_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        IMPORTS + "print('sympy' in sys.modules, 'scipy.optimize._optimize' in sys.modules)"
    )
    assert plain("train.py", folder=tmp_path).output.split() == ["True", "True"]
    assert followed("train.py", folder=tmp_path).output.split() == ["False", "False"]


OFTEN = {"attribute"}
"""Each use takes two processes; the others are looked at before a release."""


@pytest.mark.parametrize("use", [use if use in OFTEN else pytest.param(use, marks=pytest.mark.long) for use in USES])
def test_what_is_used_is_the_real_one(tmp_path: Path, use: str) -> None:
    (tmp_path / "train.py").write_text(IMPORTS + USES[use])
    expected = plain("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "1G"))
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)


def test_laying_out_a_model_without_memory_does_not_load_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ON_META + "print('sympy.core' in sys.modules)")
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.output) == (0, expected.output.replace("True", "False"))


def test_stand_ins_say_of_plain_numbers_what_the_real_ones_say(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN_NUMBERS)
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert (done.code, done.output) == (0, expected.output) and "AssertionError" in done.output


def test_checks_of_meta_kernels_load_none_of_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("""
import sys, torch
found = torch.empty(3, 4, device="meta").argmax(0)
try:
    torch.empty(3, 4, device="meta").argmax(7)
except IndexError as error:
    print(found.shape, error)
print(torch.empty(3, 4, device="meta").slice_scatter(torch.empty(3, 2, device="meta"), 1, 0, 2).stride())
print("sympy.core" in sys.modules)
""")
    expected, actual = (run("train.py", folder=tmp_path).output.splitlines() for run in (plain, followed))
    assert expected[:-1] == actual[:-1] and (expected[-1], actual[-1]) == ("True", "False")
