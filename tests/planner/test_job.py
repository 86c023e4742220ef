"""What the user's own code raises is told with its own lines, what this program raises passes, and
torch's own losses are losses.
"""

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from port_planner.job import Bucket, JobError, ScriptError, TrainingJob, own_code, with_model


def test_what_the_users_code_raises() -> None:
    with pytest.raises(ScriptError) as caught, own_code("reading the data"):
        json.loads("{")
    message = str(caught.value)
    assert message.startswith("reading the data failed; fix it and run the command again:")
    assert 'json.loads("{")' in message and "JSONDecodeError" in message
    assert "decoder.py" not in message and caught.value.exit_code == 2


def test_what_is_said_already_passes() -> None:
    with pytest.raises(JobError, match=r"^said$"), own_code("anything"):
        raise JobError("said")


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(label_smoothing=0.1),
        functools.partial(functional.cross_entropy, label_smoothing=0.1),
        functools.partial(nn.CrossEntropyLoss(label_smoothing=0.1)),
    ],
)
def test_a_loss_of_output_and_target_is_one_of_model_and_batch(loss: Callable[..., Any]) -> None:
    model = nn.Bilinear(3, 4, 5)
    left, right, target = torch.randn(6, 3), torch.randn(6, 4), torch.randint(5, (6,))
    expected = functional.cross_entropy(model(left, right), target, label_smoothing=0.1)
    data, optimizer = [left, right, target], torch.optim.SGD(model.parameters())
    job = TrainingJob(model, loss, optimizer, data, 6, buckets=[Bucket(data, 3, loss), Bucket(data, 2)])
    for bucket in range(3):
        assert torch.equal(job.loss_of(bucket)(model, *data), expected)
    assert with_model(job.loss_fn) is job.loss_fn


def test_a_loss_of_output_and_target_wants_both() -> None:
    with pytest.raises(JobError, match=r"mse_loss as the loss .* a batch must be inputs and a target, not one Tensor"):
        with_model(functional.mse_loss)(nn.Identity(), torch.zeros(2))
    with pytest.raises(JobError, match="L1Loss as the loss"):
        with_model(nn.L1Loss())(nn.Identity(), {"x": 1})
