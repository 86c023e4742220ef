"""What a job may not ask for, by name and with the remedy, and what its samples may be."""

import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from port_planner.job import JobError, TrainingJob
from port_planner.job_checks import checked_samples
from port_planner.make_bundle import prepare
from tests.planner.tied_job import ROWS, job


@pytest.mark.slow
def test_arrays_and_lists_are_data_too() -> None:
    x = np.arange(4.0 * ROWS, dtype=np.float32).reshape(ROWS, 4)
    captured = prepare(job(data=(x, x.tolist())))
    assert [column.dtype for column in captured.data] == [torch.float32] * 2
    columns = prepare(job(data=[torch.randn(4, ROWS).T] * 2)).data
    assert all(isinstance(column, torch.Tensor) and column.is_contiguous() for column in columns)


X = torch.randn(ROWS, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": X}, "data is a Tensor; give a list with one tensor per argument of the batch"),
        ({"data": None}, "data is a NoneType"),
        ({"data": "cifar10"}, "data is a str"),
        ({"eval_data": None}, "eval_data is a NoneType"),
        ({"data": []}, "data is missing in the job; give one tensor per argument"),
        ({"data": [torch.tensor(3.0)]}, "column 0 of data is a single number; give a tensor with one row per sample"),
        ({"data": [X, ["a"] * ROWS]}, "column 1 of data is not an array of numbers"),
        ({"data": [X, [[1.0], [2.0, 3.0]]]}, "column 1 of data is not an array of numbers"),
        ({"data": [X, X[1:]]}, rf"the columns of data have different lengths \[9, {ROWS}\]"),
        ({"batch_size": 11}, "batch_size is 11, but data has 10 rows; choose between 1 and 10"),
        ({"data": [X[:0], X[:0]]}, "data has 0 rows; give at least one"),
        ({"data": [X.to(torch.complex128), X]}, "column 0 of data is complex128; give one of bool, uint8"),
        ({"batch_size": "8"}, "batch_size is '8'; it must be a whole number, at least 1"),
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number, at least 1"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm is nan; it must be a number above 0, or None"),
        ({"clip_grad_norm": "1"}, "clip_grad_norm is '1'"),
        ({"data": [X, X[:, :3]]}, r"(?s)on a batch of float32 \[4, 4\], float32 \[4, 3\] failed.*The size of tensor a"),
        ({"batch_size": 4.0}, "batch_size is 4.0; it must be a whole number, at least 1"),
        ({"batch_size": True}, "batch_size is True"),
        ({"accumulate": 0}, "accumulate is 0; it must be a whole number, at least 1"),
        ({"accumulate": 1.5}, "accumulate is 1.5"),
        ({"seed": -5}, r"seed is -5; it must be a whole number, at least 0 and below 2\*\*62"),
        ({"seed": 1 << 62}, "seed is 4611686018427387904"),
        ({"schedule": ReduceLROnPlateau, "eval_data": [X, X]}, "cannot take one with eval_data"),
        ({"schedule": ReduceLROnPlateau, "accumulate": 2}, "epochs of 3 batches that end within an update of 2"),
        ({"schedule": type("Own", (ReduceLROnPlateau,), {})}, "a class of its own"),
        ({"schedule": lambda _: ReduceLROnPlateau(torch.optim.SGD([X.clone()], lr=0.1))}, "one of another optimizer"),
        ({"schedule": lambda optimizer: "cosine"}, "the scheduler is a str; give one of torch.optim.lr_scheduler"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_anything_takes_time(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        prepare(job(**changes), updates=2)


@pytest.mark.parametrize(
    ("name", "message"), [("model", "a torch.nn"), ("optimizer", "a torch.optim"), ("loss_fn", "a function")]
)
def test_parts_that_are_something_else_are_named(name: str, message: str) -> None:
    wrong = job()
    setattr(wrong, name, "resnet18")
    with pytest.raises(JobError, match=f"{name} is a str; give {message}"):
        prepare(wrong)


@pytest.mark.parametrize("of_all", [False, True])
def test_a_hook_before_steps_or_on_all_optimizers_is_refused_whatever_it_does_at_first(of_all: bool) -> None:
    hooked = job()
    register = register_optimizer_step_post_hook if of_all else hooked.optimizer.register_step_pre_hook
    handle = register(lambda *_: None)
    named = "on the steps of all optimizers" if of_all else "before the optimizer's steps"
    try:
        with pytest.raises(JobError, match=rf"test_job_checks\.py:\d+ is a hook {named}"):
            prepare(hooked)
    finally:
        handle.remove()


class _Adding(torch.optim.SGD):
    def zero_grad(self, set_to_none: bool = True) -> None: ...


@pytest.mark.parametrize(("method", "scheduled"), [("step", False), ("step", True), ("zero_grad", False)])
def test_a_method_of_the_optimizer_that_is_the_programs_own_is_named(method: str, scheduled: bool) -> None:
    patched = job()
    own = getattr(patched.optimizer, method)
    setattr(patched.optimizer, method, types.MethodType(lambda self, *rest: own(*rest), patched.optimizer))
    if scheduled:
        torch.optim.lr_scheduler.StepLR(patched.optimizer, 1)
    with pytest.raises(
        JobError, match=rf"test_job_checks\.py:\d+ stands for {method}\(\) of the optimizer .*port-agent exec"
    ):
        prepare(patched)
    overridden = job()
    overridden.optimizer = _Adding(overridden.model.parameters(), 0.1)
    with pytest.raises(JobError, match=r"test_job_checks\.py:\d+ stands for zero_grad\(\) of the optimizer _Adding"):
        prepare(overridden)


def test_a_schedulers_mark_on_the_step_is_no_method_of_the_program() -> None:
    scheduled = job()
    scheduled.scheduler = torch.optim.lr_scheduler.StepLR(scheduled.optimizer, 1)
    prepare(scheduled)


def test_libraries_may_watch_the_steps_of_all_optimizers() -> None:
    library: dict[str, Any] = {}
    exec(compile("def watch(*of_a_step): ...", torch.__file__, "exec"), library)
    handle = register_optimizer_step_pre_hook(library["watch"])
    try:
        prepare(job())
    finally:
        handle.remove()


def test_what_the_optimizer_changes_beside_the_model_is_refused() -> None:
    model = nn.Linear(3, 16)
    centres = [nn.Parameter(torch.randn(4, 16)) for _ in range(5)]
    optimizer = torch.optim.SGD([*model.parameters(), *centres], lr=0.1)
    data = [torch.randn(8, 3), torch.randint(4, (8,))]
    job = TrainingJob(model, lambda m, x, y: (m(x) - centres[0][y]).square().mean(), optimizer, data, 4)
    with pytest.raises(
        JobError, match=r"tensors that the model does not have \(\[4, 16\], \[4, 16\], \[4, 16\], \.\.\.\)"
    ):
        prepare(job)


def test_a_compiled_model_is_not_planned_as_if_it_were_none() -> None:
    made = job()
    made.model.get_submodule("first").compile(backend="eager")
    with pytest.raises(
        JobError, match=r"first is compiled \(torch.compile\), and its kernels differ in the last digits"
    ):
        prepare(made)


def test_a_norm_that_has_gradients_of_what_is_not_trained_is_not_clipped_to() -> None:
    made = job(clip_grad_norm=1.0)
    made.optimizer = torch.optim.SGD([made.model.get_parameter("first.weight")], lr=0.1)
    with pytest.raises(
        JobError, match=r"the optimizer does not train spare.weight, spare.bias: pass them to the optimizer, or freeze"
    ):
        prepare(made)
    made.model.spare.requires_grad_(False)
    prepare(made)


def test_gradients_that_are_there_before_the_first_step_are_named() -> None:
    made = job()
    made.model(torch.randn(4, 4)).sum().backward()
    with pytest.raises(JobError, match=r"weight.* has a gradient before the first step.*zero_grad"):
        checked_samples(made)
    made.optimizer.zero_grad(set_to_none=False)
    checked_samples(made)
