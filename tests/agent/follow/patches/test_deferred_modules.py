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
}


def test_libraries_that_only_name_them_do_not_load_them(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        IMPORTS + "print('sympy' in sys.modules, 'scipy.optimize._optimize' in sys.modules)"
    )
    assert plain("train.py", folder=tmp_path).output.split() == ["True", "True"]
    assert followed("train.py", folder=tmp_path).output.split() == ["False", "False"]


@pytest.mark.parametrize("use", list(USES))
def test_what_is_used_is_the_real_one(tmp_path: Path, use: str) -> None:
    (tmp_path / "train.py").write_text(IMPORTS + USES[use])
    expected = plain("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "1G"))
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)
