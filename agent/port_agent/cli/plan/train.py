"""`train`: train a bundle in the foreground."""

import argparse

from port_agent.cli.arguments import (
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
        description="Train a bundle. Ctrl-C finishes the step and stops; the same command continues from there.",
        epilog="example:\n  port-agent train job.port --epochs 3 --out weights.safetensors\n",
    )
    parser.add_argument("bundle", type=readable_file, help="file made by `port-agent plan`")
    parser.add_argument(
        "--epochs", type=whole_number(1), help="passes over the data, counted from the beginning (default 1)"
    )
    parser.add_argument("--steps", type=whole_number(1), help="batches instead of epochs")
    parser.add_argument("--out", type=writable_file, help="where to write the trained weights (safetensors)")
    parser.add_argument(
        "--state-dir", type=writable_folder, help="directory of checkpoints (default: NAME.state next to the bundle)"
    )
    parser.add_argument(
        "--page-dir",
        type=writable_folder,
        action="append",
        default=[],
        dest="page_dirs",
        metavar="DIR",
        help="where temporaries are paged (default: the state directory); repeat it for each further medium that was "
        "planned for, in the same order",
    )
    parser.add_argument(
        "--plan", type=whole_number(0), default=0, help="number of the plan in the bundle, from 0 (default 0)"
    )
    parser.add_argument("--cpus", type=whole_number(1), metavar="N", help="run on N cores (default: all)")
    parser.add_argument(
        "--verify", type=whole_number(0), default=0, metavar="N", help="compare the first N steps with plain PyTorch's"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="steps between checkpoints (default 1: a killed run loses only the unfinished step; more reduces flash "
        "wear)",
    )
    parser.add_argument(
        "--read-limit",
        type=size,
        help="throttle page-in to this many bytes per second, such as 20M, to try a slower medium",
    )
    parser.add_argument("--write-limit", type=size, help="throttle page-out to this many bytes per second")
    parser.add_argument("--digest", action="store_true", help="print a checksum over weights and optimizer state")
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")
    parser.set_defaults(run=_train)


def _train(arguments: argparse.Namespace) -> int:
    from port_agent.cli.follow_job import follow
    from port_agent.foreground.train import TrainRequest, start_train
    from port_planner.ir.bundle.bundle import read_manifest

    if arguments.cpus is not None:
        use_cores(arguments.cpus)
    request = TrainRequest(
        bundle=arguments.bundle,
        epochs=arguments.epochs,
        steps=arguments.steps,
        out=arguments.out,
        state_dir=arguments.state_dir,
        page_dirs=tuple(page_dirs(arguments.page_dirs)),
        plan=arguments.plan,
        verified_steps=arguments.verify,
        checkpoint_every=arguments.checkpoint_every,
        read_bytes_per_s=arguments.read_limit,
        write_bytes_per_s=arguments.write_limit,
        digest=arguments.digest,
    )
    return follow(start_train(request), read_manifest(arguments.bundle), arguments.plan, as_json=arguments.json)
