"""What a followed program may not do, and threads that it starts."""

import threading
from pathlib import Path

import pytest
import torch

from agent import budget
from agent.follow.patches.refusals import NotFollowedError


@pytest.mark.parametrize("backend", ["inductor", "eager"])
def test_what_was_compiled_before_the_budget_is_refused_when_it_is_called(backend: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(8, 8)
    model, function = torch.compile(layer, backend=backend), torch.compile(torch.nn.functional.relu, backend=backend)
    with budget(tensors="1G", page_dir=tmp_path):
        for compiled in (model, function):
            with pytest.raises(NotFollowedError, match=r"torch\.compile"):
                compiled(torch.ones(2, 8))
        assert layer(torch.ones(2, 8)).shape == (2, 8)
    if backend == "eager":
        assert torch.equal(model(torch.ones(2, 8)), layer(torch.ones(2, 8))), "after the budget it runs again"


def test_a_thread_is_followed_from_its_start(tmp_path: Path) -> None:
    model, seen = torch.nn.Linear(256, 256), []
    plain = model(torch.ones(4, 256)).detach()
    with budget(tensors="4K", page_dir=tmp_path) as b:
        thread = threading.Thread(target=lambda: seen.append(model(torch.ones(4, 256)).detach()))
        thread.start()
        thread.join()
        assert b.report.written_bytes > 0
    assert torch.equal(seen[0], plain)
