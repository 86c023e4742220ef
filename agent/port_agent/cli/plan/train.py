"""`train`: a bundle trained in the foreground."""

import argparse
import contextlib

from port_agent.cli.arguments import (
    UsageError,
    page_dirs,
    readable_file,
    size,
    use_cores,
    whole_number,
    writable_file,
    writable_folder,
)


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `train`."""
    _add_train(commands)


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "train",
        help="train a bundle in the foreground; run again to resume",
        description="Train a bundle. Ctrl-C finishes the step and stops; the same command goes on from there.",
        epilog="Example: port-agent train job.port --epochs 3 --out weights.safetensors",
    )
    parser.add_argument("bundle", type=readable_file)
    parser.add_argument(
        "--epochs", type=whole_number(1), help="passes over the data, counted from the beginning (default 1)"
    )
    parser.add_argument("--steps", type=whole_number(1), help="batches instead of epochs")
    parser.add_argument("--out", type=writable_file, help="where to write the trained weights (safetensors)")
    parser.add_argument(
        "--state-dir", type=writable_folder, help="checkpoints (default: beside the bundle, NAME.state)"
    )
    parser.add_argument(
        "--page-dir",
        type=writable_folder,
        action="append",
        default=[],
        dest="page_dirs",
        metavar="DIR",
        help="where temporaries are paged (default: the state directory); again for each further medium that was planned for, in "
        "the same order",
    )
    parser.add_argument("--plan", type=whole_number(0), default=0, help="which plan of the bundle (default 0)")
    parser.add_argument("--cpus", type=whole_number(1), metavar="N", help="run on N cores (default: all)")
    parser.add_argument(
        "--verify", type=whole_number(0), default=0, metavar="N", help="compare the first N steps with plain PyTorch's"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="steps between checkpoints (default 1: a killed run loses only the unfinished step; more spares the flash)",
    )
    parser.add_argument(
        "--read-limit",
        type=size,
        help="throttle page-in to so many bytes per second, such as 20M, to try a slower medium",
    )
    parser.add_argument("--write-limit", type=size, help="throttle page-out, bytes per second")
    parser.add_argument("--digest", action="store_true", help="print a checksum over weights and optimizer state")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from port_agent.cli.follow_job import follow
    from port_agent.supervisor.job.plan_choice import data_limit
    from port_agent.system.memory_limit import limit_data_of
    from port_agent.worker.options import TorchOptions
    from port_agent.worker.start import start_worker, torch_worker
    from port_planner.ir.bundle.bundle import read_manifest

    if arguments.cpus is not None:
        use_cores(arguments.cpus)
    manifest = read_manifest(arguments.bundle)
    if not 0 <= arguments.plan < len(manifest.plans):
        raise UsageError(
            f"{arguments.bundle} has {len(manifest.plans)} plans, there is no plan {arguments.plan}; count from 0"
        )
    directories = page_dirs(arguments.page_dirs)
    state_dir = arguments.state_dir or arguments.bundle.with_suffix(".state")
    options = TorchOptions(
        bundle=arguments.bundle, state_dir=state_dir, plan=arguments.plan, verify=arguments.verify,
        checkpoint_every=arguments.checkpoint_every, steps=arguments.steps, epochs=arguments.epochs, out=arguments.out,
        page_dir=next(iter(directories), None), scratch_dirs=tuple(directories[1:]), digest=arguments.digest,
        read_limit=arguments.read_limit,
        write_limit=arguments.write_limit,
    )  # fmt: skip
    command = torch_worker(options)
    peak_bytes = manifest.plans[arguments.plan].peak_bytes
    worker = start_worker(command, limit_bytes=peak_bytes, threads=manifest.threads)
    with contextlib.suppress(OSError):  # it has ended: what it says of that is followed
        limit_data_of(worker.process.pid, data_limit(peak_bytes))
    return follow(worker, manifest, arguments.plan, as_json=arguments.json)
