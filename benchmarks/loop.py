"""An ordinary training script, for `port-agent exec` and for plain Python: `python -m benchmarks.loop MODEL STEPS`.

Nothing in it knows of a budget. It prints one JSON line: losses, CPU and wall seconds of each
step, peak resident memory.
"""

import json
import resource
import sys
import time

import torch

from benchmarks.models import CASES, make_optimizer, workload
from port_planner.ir.bundle.data_order import batch_rows


def main() -> None:
    """Train; see the module's docstring."""
    name, steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    optimizer_name, batch_size = CASES[name]
    work = workload(name, batch_size=batch_size)
    optimizer = make_optimizer(optimizer_name, work.model.parameters())
    data = [torch.cat(columns) for columns in zip(*(work.batch(i) for i in range(steps)), strict=True)]
    torch.manual_seed(0)
    losses, cpu, wall = [], [], []
    for (_, rows), _ in zip(batch_rows(0, len(data[0]), batch_size, drop_last=False), range(steps), strict=False):
        begin, began = time.process_time(), time.perf_counter()
        loss = work.loss_fn(work.model, *(column[rows] for column in data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        cpu.append(time.process_time() - begin)
        wall.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps({"losses": losses, "cpu_s": cpu, "wall_s": wall, "peak_mib": peak}))


if __name__ == "__main__":
    main()
