"""`port-agent peer identity`: save this device's identity, so that its card can be replaced."""

import argparse
from pathlib import Path

from port_agent.cli.arguments import UsageError, readable_folder, writable_folder
from port_agent.control import places


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands of this area to `commands`."""
    identity = commands.add_parser("identity", help="save this device's identity, and restore it on a replaced card")
    identity.description = (
        "Save the key of this device, its pairings and the privacy budget that its data has spent in a file, and "
        "restore them on a new card or machine, which then is this device to all others. Whoever has the file can "
        "act as this device: keep it like a password, and never run both at once."
    )
    verbs = identity.add_subparsers(dest="verb", metavar="VERB", required=True)
    export = verbs.add_parser("export", help="write this device's identity to a file that only you can read")
    export.add_argument("file", type=Path, help="file to write")
    export.add_argument(
        "--state-dir", type=readable_folder, metavar="DIR", help="the agent's state directory, if not the default"
    )
    export.set_defaults(run=_export)
    taken = verbs.add_parser("import", help="restore an identity from such a file, while no agent is running here")
    taken.add_argument("file", type=Path, help="file that `export` wrote")
    taken.add_argument(
        "--state-dir", type=writable_folder, metavar="DIR", help="the agent's state directory, if not the default"
    )
    taken.set_defaults(run=_import)


def _export(arguments: argparse.Namespace) -> int:
    from port_agent.peers.identity.backup import write_backup

    state_dir = _state_dir(arguments)
    try:
        own, count = write_backup(state_dir, arguments.file)
    except FileNotFoundError as error:
        raise UsageError(
            f"{error.filename}: no such file; `port-agent peer pair` creates an identity when it is needed"
        ) from error
    print(f"{own.id} and {count} paired devices are in {arguments.file}. Whoever has this file can act as this device.")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from port_agent.peers.identity.backup import restore_backup
    from port_agent.system.locks import LOCK_NAME, LockFile

    state_dir = _state_dir(arguments)
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = LockFile(state_dir / LOCK_NAME)
    if not lock.try_lock():
        raise UsageError(f"an agent is running with {state_dir}; stop it first")
    try:
        own, count = restore_backup(arguments.file, state_dir)
    finally:
        lock.close()
    print(f"This device is {own.id} now, and trusts {count} paired devices. Never run the old one beside it.")
    return 0


def _state_dir(arguments: argparse.Namespace) -> Path:
    return Path(arguments.state_dir or places.own_state_dir())
