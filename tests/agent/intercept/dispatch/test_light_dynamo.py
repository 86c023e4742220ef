"""A program that compiles nothing never loads torch._dynamo; one that compiles gets the real one, whenever it asks."""

from pathlib import Path

import pytest

from tests.agent.intercept.programs import followed, plain

pytestmark = pytest.mark.process

STEP = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(100, 100)
optimizer = torch.optim.Adam(model.parameters())
def step():
    loss = model(torch.randn(4, 100)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
def state_is_that_of_a_module():
    import torch._dynamo.config as config
    return config is sys.modules["torch._dynamo.config"] is torch._dynamo.config and config.__spec__.name == config.__name__
print(step())
"""
COMPILES = {
    "submodule": "print(state_is_that_of_a_module(), step())",
    "attribute": "print(torch._dynamo.config.cache_size_limit > 0, state_is_that_of_a_module(), step())",
    "from": "from torch._dynamo.utils import counters\nprint(type(counters), state_is_that_of_a_module(), step())",
    "disable": "print(torch._dynamo.disable(lambda: 7)(), torch.compiler.disable(lambda: 8)(), step())",
    "compile": "f = torch.compile(lambda x: model(x).relu() * 2, "
    "backend='aot_eager')\n"
    "print(f(torch.ones(2, 100)).sum().item(), step())",
}


def test_a_plain_step_does_not_load_it_and_neither_does_asking_whether_a_model_was_compiled(tmp_path: Path) -> None:
    """accelerate asks so for transformers' `save_pretrained`: 40 MiB came at the end of a
    fine-tuning, past its budget.
    """
    (tmp_path / "train.py").write_text(
        STEP
        + """
print('torch._dynamo.convert_frame' in sys.modules)
Compiled = torch._dynamo.eval_frame.OptimizedModule
print(isinstance(model, Compiled), 'torch._dynamo.convert_frame' in sys.modules)
print(isinstance(torch.compile(model, backend="aot_eager"), Compiled), isinstance(model, Compiled), torch._dynamo.eval_frame.OptimizedModule is Compiled)
"""
    )
    done = followed("train.py", folder=tmp_path)
    assert done.code == 0 and done.output.split()[1:] == ["False", "False", "False", "True", "False", "False"]


@pytest.mark.long
def test_functions_that_a_library_disables_do_not_load_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        STEP
        + """
class Cache:
    @torch.compiler.disable
    def put(self, a, *, b=1):
        "Docs."
        return a + b
    @torch.compiler.disable(recursive=False, reason="because")
    def get(self, a):
        return a
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
print(Cache().put(1, b=2), Cache().get(3), Cache.put.__name__, Cache.put.__doc__, 'torch._dynamo.convert_frame' in sys.modules)
f = torch.compile(lambda x: Cache().put(x * 2) + Cache().get(x), backend="aot_eager")
print(f(torch.ones(3)), Cache.put._torchdynamo_disable, Cache.get._torchdynamo_disable_msg)
print(torch._dynamo._trace_wrapped_higher_order_op.TransformGetItemToIndex is TransformGetItemToIndex)
"""
    )
    expected = plain("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "1G"))
    assert (done.code, done.output.replace("Docs. False", "Docs. True"), done.said) == (
        0,
        expected.output,
        expected.said,
    )
    assert "Docs. False" in done.output


OFTEN = {"from"}
"""Each way takes two processes; the others are looked at before a release."""


@pytest.mark.parametrize(
    "way", [way if way in OFTEN else pytest.param(way, marks=pytest.mark.long) for way in COMPILES]
)
def test_the_real_one_comes_when_it_is_asked(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(STEP + COMPILES[way])
    expected = plain("train.py", folder=tmp_path)
    done = followed("train.py", folder=tmp_path, bound=("--tensors", "1G"))
    assert (done.code, done.output, done.said) == (0, expected.output, expected.said)


def test_what_compiles_to_other_numbers_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        STEP
        + """
from port_agent import budget
with budget(tensors="1M", page_dir=".").resizing():
    for backend in ("inductor", "eager"):
        try:
            torch.compile(model, backend=backend)
        except BaseException as error:
            print("refused:", error)
"""
    )
    done = plain("train.py", folder=tmp_path)
    assert [line[:8] for line in done.output.splitlines()[1:]] == ["refused:"] * 2, done.said
    assert done.output.count("torch.compile") >= 2
