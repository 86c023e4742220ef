"""What steps leave to later ones: found where it is read, and where it is gathered; gone with the last who holds it."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from port_planner.capture.cross_step_state import StepResults
from port_planner.capture.recorder import storage_identity


def left_by(results: StepResults, *tensors: torch.Tensor) -> None:
    results.add((StorageWeakRef(t.untyped_storage()), f"train.py:{t.numel()}") for t in tensors)


def address(tensor: torch.Tensor) -> int:
    return storage_identity(tensor.untyped_storage())


def test_what_a_step_made_is_known_again_by_its_storage() -> None:
    results, made, other = StepResults(), torch.ones(3), torch.ones(3)
    left_by(results, made)
    assert results.hold(address(made.view(3, 1))) and not results.hold(address(other))


def test_what_one_step_left_is_not_gathered_and_what_two_left_is() -> None:
    results, first, second = StepResults(), torch.ones(3), torch.ones(4)
    left_by(results, first, torch.ones(6))
    left_by(results, torch.ones(5))
    assert results.gathered(set()) is None
    left_by(results, second)
    assert results.gathered(set()) == ["train.py:3", "train.py:4"]
    assert results.gathered({address(first)}) is None, "the model has it now"
    del first
    assert results.gathered(set()) is None


def test_what_only_refers_to_itself_is_gone() -> None:
    results = StepResults()
    for _ in range(2):
        loop: list[object] = [torch.ones(3)]
        left_by(results, loop[0])  # type: ignore[arg-type]
        loop.append(loop)
        del loop
    assert results.gathered(set()) is None
