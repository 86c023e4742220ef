"""Whether a program under `exec` keeps plain PyTorch's bits:
`python -m benchmarks.zoo [--features | --operators | --programs N] [--bundles]`.

Models are tiny random instances of every model type and task of transformers' auto mappings, of diffusers' models and
of peft's methods: four AdamW steps with dropout on. Each runs in a child process: twice plainly, then with an ample
budget, with half of the bytes that it then had in tensors, and with 4 KiB, where everything is evicted all the time.
Losses, parameters, buffers, gradients, optimizer state and random states are compared to the bit. Results are appended
as they come and a run continues where the last one ended.

`--operators`: each function of torch's own database of operators instead, with the samples that torch tests it with.

`--device cuda`: with tensors on a GPU, within budgets of its memory: half of what a program took there, and 4 KiB.

`--bundles`: one class of each model type as a job instead, captured, planned with all the memory it wants and with half
of it, and trained by a worker, equal or refused; with `--programs N` that many random jobs, with `--operators` each
function, with `--strangers` jobs of the kinds that strangers bring, for longer than `plan` compares them.

`--commands`: of those jobs, judged by `port-agent plan` and `port-agent train` on a script, beside a
loop in a process of its own.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.follow_zoo import features
from benchmarks.follow_zoo.children import Case, Judged, run_in_children
from benchmarks.follow_zoo.command_line import LENGTHS, CommandCase
from benchmarks.follow_zoo.compare import ALL_SETTINGS, WRONG, Outcome
from benchmarks.follow_zoo.on_device import DeviceCase
from benchmarks.follow_zoo.table import Results, counts, markdown

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "diffusers", "peft")


def main() -> int:
    """Parse the command line, run, write the table; return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="parts of names: only cases that contain one of them")
    parser.add_argument(
        "--features", action="store_true", help="loops, data types, optimizers, hooks ... instead of models"
    )
    parser.add_argument("--operators", action="store_true", help="torch's functions instead of models")
    parser.add_argument("--programs", type=int, metavar="N", help="this many random programs instead of models")
    parser.add_argument("--bundles", action="store_true", help="jobs that are planned and trained by a worker")
    parser.add_argument("--strangers", action="store_true", help="with --bundles: jobs of strangers' kinds")
    parser.add_argument(
        "--commands", action="store_true", help="with --bundles: judge by the commands that a user types"
    )
    parser.add_argument("--device", help="make tensors on this device and bound its memory, such as cuda")
    parser.add_argument("--seed", type=int, default=0, help="of the sample, and of the first random program")
    parser.add_argument("--sample", type=int, metavar="N", help="only N cases, drawn by the seed")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="per case")
    parser.add_argument(
        "--again", choices=["wrong", "all"], help="run what the results say is wrong, or everything, again"
    )
    parser.add_argument("--results", type=Path, help="file of JSON lines; the table goes beside it as .md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asked of CUDA itself, no child could use it
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # products have the same bits each time
    kind = _kind(arguments)
    suffix = f"_{arguments.device}" if arguments.device else "_by_commands" if arguments.commands else ""
    path = arguments.results or RESULTS / f"{kind}{suffix}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    results = Results.read(path)
    chosen = list(_chosen(kind, arguments, results))
    unbounded = arguments.device is not None or arguments.commands
    found = run_and_tell(chosen, results, arguments.jobs, arguments.timeout, on_device=unbounded)
    results.compact()
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in PACKAGES if importlib.util.find_spec(p))
    notes = f"Written by `python -m benchmarks.zoo`; {versions}; one thread. {TITLES[kind][1]}"
    if arguments.commands:
        notes += " Judged by the commands: a script, `port-agent plan`, `port-agent train`, and a plain loop in a process of its own."
    path.with_suffix(".md").write_text(markdown(TITLES[kind][0], notes, results.outcomes.values()))
    print(f"this run: {counts(found)}")
    print(f"all so far: {counts(results.outcomes.values())}")
    return 1 if any(o.verdict in WRONG for o in found) else 0


def _kind(arguments: argparse.Namespace) -> str:
    if arguments.operators:
        return "operator_jobs" if arguments.bundles else "operators"
    if arguments.strangers:
        return "stranger_jobs"
    if arguments.bundles:
        return "jobs" if arguments.programs else "bundles"
    if arguments.features:
        return "features"
    return "programs" if arguments.programs else "zoo"


TITLES = {
    "zoo": ("Models under a budget", "Four AdamW steps of tiny random instances, dropout on."),
    "features": ("Features under a budget", "Small programs, each about one thing."),
    "operators": (
        "Operators under a budget",
        "Each function of torch's database of operators (`OpInfo`) that has a gradient.",
    ),
    "operator_jobs": (
        "Operators as bundles",
        "Each function of torch's database of operators (`OpInfo`) that has a gradient. Some of its samples seed "
        "torch's generator in the step, which `plan` refuses.",
    ),
    "bundles": ("Models as bundles", "A job of six batches, captured, planned and trained by a worker, dropout on."),
    "stranger_jobs": (
        "Jobs of strangers' kinds as bundles",
        "Losses, networks, optimizers, and what decides or changes something in the 29th step or later: trained for 44 "
        "batches, of which `plan` compares up to 24.",
    ),
    "jobs": ("Random jobs as bundles", "The name is the seed. Refused is what `plan` does not take."),
    "programs": ("Random programs under a budget", "The name is the seed."),
}


def run_and_tell(
    chosen: list[Judged], results: Results, jobs: int, timeout_s: float, *, on_device: bool = False
) -> list[Outcome]:
    """Run the cases in children, keep each outcome at once, print a line for each."""
    found = []
    for outcome in run_in_children(chosen, jobs, timeout_s, on_device=on_device):
        results.add(outcome)
        found.append(outcome)
        where = f" at {outcome.setting}" if outcome.setting else ""
        print(
            f"{len(found)}/{len(chosen)} {outcome.verdict.value:<13}{outcome.seconds:6.1f} s  {outcome.name}{where}"
            f"  {outcome.detail[:200]}",
            flush=True,
        )
    return found


def _chosen(kind: str, arguments: argparse.Namespace, results: Results) -> Iterator[Judged]:
    """Yield the cases of this run: by name, or sampled by seed, without those that already have a result unless
    they are requested again.
    """
    everything = list(cases_of(kind, arguments.programs or 0, arguments.seed))
    if arguments.device:
        everything = [
            DeviceCase(c.name, c.program, arguments.device)
            for c in everything
            if isinstance(c, Case) and c.name not in features.KNOWN_WRONG
        ]
    if arguments.commands:
        everything = [CommandCase(c.name, *LENGTHS[kind]) for c in everything]
    if arguments.names:
        everything = [c for c in everything if any(n in c.name for n in arguments.names)]
    if arguments.sample is not None:
        everything = random.Random(arguments.seed).sample(everything, min(arguments.sample, len(everything)))
    for case in everything:
        known = results.outcomes.get(case.name)
        if known is None or arguments.again == "all" or (arguments.again == "wrong" and known.verdict in WRONG):
            yield case


def cases_of(kind: str, programs: int, seed: int) -> Iterator[Judged]:
    """Yield every case of a kind, one of TITLES."""
    if kind == "features":
        for name, program in features.registered().items():
            yield Case(name, program, ALL_SETTINGS)
    elif kind == "programs":
        from benchmarks.follow_zoo import programs as generator

        for i in range(seed, seed + programs):
            yield Case(f"program/{i}", generator.program(i), ALL_SETTINGS)
    elif kind in ("operators", "operator_jobs"):
        from benchmarks.follow_zoo import operators

        yield from operators.cases() if kind == "operators" else operators.job_cases()
    elif kind == "bundles":
        from benchmarks.follow_zoo import bundles

        yield from bundles.cases()
    elif kind == "stranger_jobs":
        from benchmarks.follow_zoo import bundles

        yield from bundles.stranger_cases()
    elif kind == "jobs":
        from benchmarks.follow_zoo import bundles

        yield from bundles.random_cases(programs, seed)
    else:
        from benchmarks.follow_zoo import diffusers_models, peft_methods, transformers_models

        yield from transformers_models.cases()
        yield from diffusers_models.cases()
        yield from peft_methods.cases()


if __name__ == "__main__":
    sys.exit(main())
