"""Train a job with plain PyTorch and print what it took: the counterpart of `port-agent train`
in the demo and benchmarks.

`python -m benchmarks.plain SCRIPT BUNDLE STEPS` prints a JSON line for each step, CPU seconds so far among it, and one
at the end: losses, peak resident memory, CPU seconds, and a checksum over the same tensors as
`port-agent train --digest`.
"""

import json
import sys
import time
from pathlib import Path

import torch
import xxhash

from port_planner.base.process_memory import peak_resident_bytes
from port_planner.ir.bundle.bundle import read_manifest
from port_planner.job import TrainingJob
from port_planner.job_sources import load_job
from port_planner.plain_steps import plain_losses


def digest(job: TrainingJob, keys: list[str]) -> str:
    """Return the checksum over the named tensors of model and optimizer, as
    `port_agent.training.trainer` computes it.
    """
    tensors: dict[str, torch.Tensor] = {f"parameter/{n}": p for n, p in job.model.named_parameters()}
    tensors |= {f"buffer/{n}": b for n, b in job.model.named_buffers()}
    for name, parameter in job.model.named_parameters():
        for what, value in job.optimizer.state.get(parameter, {}).items():
            tensors[f"state/{name}/{what}"] = value
    total = xxhash.xxh3_128()
    for key in sorted(keys):
        total.update(key.encode())
        total.update(tensors[key].detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def main(arguments: list[str]) -> int:
    """Run; see the module's docstring."""
    script, bundle, steps = Path(arguments[0]), Path(arguments[1]), int(arguments[2])
    manifest = read_manifest(bundle)
    torch.set_num_threads(manifest.threads)
    job = load_job(script)
    columns = [torch.as_tensor(c) for c in job.data]
    begin, cpu = time.perf_counter(), time.process_time()
    losses = []
    for loss in plain_losses(job, columns, steps):
        losses.append(loss)
        print(json.dumps({"step": len(losses), "loss": loss, "cpu_s": time.process_time() - cpu}), flush=True)
    result = {
        "losses": losses,
        "wall_s": time.perf_counter() - begin,
        "cpu_s": time.process_time() - cpu,
        "peak_rss_bytes": peak_resident_bytes(),
        "digest": digest(job, list(manifest.state)),
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
