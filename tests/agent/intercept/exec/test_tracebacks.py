"""Tracebacks under `port-agent exec` are those of the program alone."""

from pathlib import Path

import pytest

from tests.agent.intercept.programs import followed, plain, written

pytestmark = pytest.mark.process

BREAKS = """
import torch
class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient @ torch.ones(7, 7)
def product(x, y):
    return x @ y
try:
    Broken.apply(torch.ones(100, 100, requires_grad=True)).sum().backward()
except RuntimeError as error:
    first = error
try:
    product(torch.ones(100, 100), torch.ones(99, 2))
except RuntimeError as error:
    raise ValueError("both") from ExceptionGroup("of torch", [first, error])
"""


def test_a_traceback_shows_the_programs_lines_alone(tmp_path: Path) -> None:
    written(tmp_path, BREAKS)
    expected, done = plain("train.py", folder=tmp_path), followed("train.py", folder=tmp_path)
    assert "return x @ y" in expected.said and "gradient @" in expected.said
    assert (done.code, done.said) == (expected.code, expected.said)
