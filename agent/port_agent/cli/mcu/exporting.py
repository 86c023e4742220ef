"""`mcu export`: what a board learned, as a state_dict of the PyTorch module."""

import argparse
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open

from port_agent.cli.mcu.views import show_json
from port_agent.mcu.board.board_errors import BoardJobError
from port_agent.mcu.layers import Arrays, LayerTables
from port_agent.mcu.protocol.board_model import ModelDirectory, read_model
from port_agent.mcu.protocol.link import Link
from port_agent.mcu.protocol.ports import PortSelector
from port_agent.mcu.snapshot import BEST_NAME, SNAPSHOT_NAME, read_snapshot
from port_agent.system.atomic_file import write_atomically
from port_planner.ir.bundle.safetensors_io import Chunks, encode


def run_export(arguments: argparse.Namespace) -> int:
    """Write the weights of a training, a file or a board."""
    model = read_model(arguments.model)
    tables = LayerTables(model)
    if arguments.from_board:
        parameters = _of_board(model, PortSelector(path=arguments.port, serial=arguments.serial))
    elif arguments.result is not None:
        parameters = _of_result(model, arguments.result)
    else:
        name = BEST_NAME if arguments.best else SNAPSHOT_NAME
        parameters = _of_snapshot(model, (arguments.state_dir or arguments.model / "state") / name)
    arrays = tables.code_tensors(parameters) if arguments.codes else tables.state_dict(parameters)
    write_atomically(arguments.out, safetensors_file(arrays, model))
    if arguments.json:
        show_json({"out": str(arguments.out), "tensors": len(arrays), "codes": arguments.codes})
    else:
        how = "codes and scales" if arguments.codes else "module.load_state_dict(safetensors.torch.load_file(FILE))"
        print(f"wrote {len(arrays)} tensors to {arguments.out}: {how}")
    return 0


def safetensors_file(arrays: Arrays, model: ModelDirectory) -> bytes:
    """Return arrays as a safetensors file; the same weights give the same bytes."""
    chunks = {
        name: Chunks(str(values.dtype), values.shape, partial(lambda data: [data], values.tobytes()))
        for name, values in sorted(arrays.items())
    }
    about = {"format": "pt", "model": model.name, "model_sha256": model.sha256.hex()}
    return b"".join(encode(chunks, metadata=about))


def _of_board(model: ModelDirectory, selector: PortSelector) -> bytes:
    link = Link(selector, model)
    parameters = link.connect().read_parameters()
    link.close()
    return parameters


def _of_snapshot(model: ModelDirectory, path: Path) -> bytes:
    snapshot = read_snapshot(path)
    if snapshot is None:
        raise BoardJobError(f"no training in {path.parent}; name its --state-dir, give --result FILE, or --from-board")
    return _checked(model, snapshot.parameters, snapshot.model_sha256.hex(), str(path))


def _of_result(model: ModelDirectory, path: Path) -> bytes:
    try:
        with safe_open(path, "numpy") as file:
            parameters, about = file.get_tensor("parameters").tobytes(), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise BoardJobError(
            f"cannot read {path} ({error}); give the file that mcu train --out FILE.safetensors wrote"
        ) from error
    return _checked(model, parameters, about.get("model_sha256", "none"), str(path))


def _checked(model: ModelDirectory, parameters: bytes, sha256: str, place: str) -> bytes:
    if sha256 != model.sha256.hex() or len(parameters) != model.parameter_bytes:
        raise BoardJobError(
            f"{place} belongs to model {sha256[:12]}, but {model.path} holds {model.sha256.hex()[:12]}; name the model "
            "that it was trained with"
        )
    return parameters
