"""Plain PyTorch's training of a job, written out by hand."""

import torch

from port_planner.ir.bundle.data_order import epoch_order
from port_planner.plain_steps import plain_losses
from tests.planner.tied_job import ROWS, job


def test_it_is_the_loop_that_anyone_would_write() -> None:
    settings = {"accumulate": 2, "clip_grad_norm": 0.1, "drop_last": True, "batch_size": 3}
    trained, mine = (job(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), **settings) for _ in range(2))
    found = list(plain_losses(trained, [torch.as_tensor(c) for c in trained.data], 6))
    x, y = (torch.as_tensor(c) for c in mine.data)
    orders = (epoch_order(mine.seed, epoch, ROWS) for epoch in range(2))
    batches = [order[i : i + 3] for order in orders for i in range(0, 9, 3)]
    expected = list[float]()
    for number, rows in enumerate(batches):
        loss = ((mine.model(x[rows]) - y[rows]) ** 2).mean()
        loss.backward()
        expected.append(loss.item())
        if number % 2:
            torch.nn.utils.clip_grad_norm_(mine.model.parameters(), 0.1)
            mine.optimizer.step()
            mine.scheduler.step()
            mine.optimizer.zero_grad()
    assert found == expected
    assert all(map(torch.equal, trained.model.parameters(), mine.model.parameters()))
