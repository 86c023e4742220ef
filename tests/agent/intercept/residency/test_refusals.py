"""What is refused names the operator and the program's line; what is not goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from port_agent import budget
from port_agent.intercept.residency.refusals import UnsupportedError
from port_planner.base.errors import program_line


@pytest.fixture
def group() -> Iterator[None]:
    """Be the only process of a group."""
    if not dist.is_available():
        pytest.skip("torch was built without distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_line_is_the_programs() -> None:
    assert program_line().startswith("test_refusals.py:")


WAYS: dict[str, Callable[[], object]] = {
    "allreduce_": lambda: dist.all_reduce(torch.ones(64, 64)),
    "allgather_": lambda: torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64)),
    "broadcast_": lambda: dist.broadcast_object_list([1]),
}


@pytest.mark.parametrize("operator", WAYS)
def test_collectives_are_refused(operator: str, group: None, tmp_path: Path) -> None:
    said = rf"test_refusals\.py:\d+: c10d::{operator} of torch\.distributed .*; run one process"
    with budget(tensors="4K", page_dir=tmp_path).resizing():
        dist.barrier()
        with pytest.raises(UnsupportedError, match=said):
            WAYS[operator]()
        assert float((torch.ones(64, 64) @ torch.ones(64, 64)).sum()) == 64**3


def test_a_dtensor_that_was_made_before_is_refused(group: None, tmp_path: Path) -> None:
    tensor = pytest.importorskip("torch.distributed.tensor")
    mesh = tensor.init_device_mesh("cpu", (1,))
    sharded = tensor.distribute_tensor(torch.randn(64, 64), mesh, [tensor.Shard(0)])
    with (
        budget(tensors="4K", page_dir=tmp_path).resizing(),
        pytest.raises(UnsupportedError, match=r"aten::mm of DTensor"),
    ):
        sharded @ sharded


def test_data_parallel_without_accelerators_is_the_module_itself(tmp_path: Path) -> None:
    model, x = torch.nn.Linear(64, 64), torch.randn(4, 64)
    expected = model(x)
    with budget(tensors="4K", page_dir=tmp_path).resizing():
        assert torch.equal(torch.nn.DataParallel(model)(x), expected)
