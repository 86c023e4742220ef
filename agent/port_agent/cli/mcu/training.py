"""`mcu train`, `eval`, `record` and `simulate`: a model on a board, or on a simulated one."""

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

from port_agent.cli.mcu.views import TrainView, judgement, show_firmware, show_json, show_summary, summary_of
from port_agent.mcu.board.board_errors import McuError
from port_agent.mcu.board.catalogue import find_board
from port_agent.mcu.board.firmware import build_firmware
from port_agent.mcu.board.simulate import Simulator
from port_agent.mcu.data import keep_shard, load_rows, reach
from port_agent.mcu.job import DEFAULT_SIMULATED, BoardJobSpec, load_data, make_link, read_job, with_settings
from port_agent.mcu.protocol.board_model import read_model
from port_agent.mcu.protocol.effects import INFER_MAX, Rule
from port_agent.mcu.protocol.ports import simulator_folder
from port_agent.mcu.snapshot import keep_weights_only
from port_agent.mcu.stream import RecordingTotals, open_stream, record
from port_agent.mcu.trainer import BoardTrainer
from port_agent.system.checksum import bytes_checksum


def _spec(arguments: argparse.Namespace) -> BoardJobSpec:
    spec = read_job(arguments.job)
    given = {name: getattr(arguments, name, None) for name in ("data", "test", "port", "serial", "out", "shard")}
    spec = replace(spec, **{name: value for name, value in given.items() if value is not None})
    rule = getattr(arguments, "rule", None)
    names = ("epochs", "steps", "learning_rate", "seed", "snapshot_every", "save_every")
    changes = {name: getattr(arguments, name, None) for name in names}
    return with_settings(spec, **changes, rule=None if rule is None else Rule[rule.upper()])


def run_train(arguments: argparse.Namespace) -> int:
    """Train on a board, with a progress bar, until done or interrupted."""
    spec = _spec(arguments)
    folder = arguments.job if arguments.job.is_dir() else arguments.job.parent
    state_dir = arguments.state_dir or folder / "state"
    if arguments.keep_weights:
        keep_weights_only(state_dir)
    return _train(spec, state_dir, arguments.json)


def _train(spec: BoardJobSpec, state_dir: Path, as_json: bool, port: Path | None = None) -> int:
    model = read_model(spec.model)
    training, held_out = load_data(spec, model)
    if spec.shard is not None:
        state_dir.mkdir(parents=True, exist_ok=True)
        keep_shard(state_dir, spec.shard, training)
    clipped = training.clipped + (held_out.clipped if spec.test is not None else 0)
    _warn_of_clipped(clipped, model.name)
    link = make_link(spec, model, port)
    view = TrainView(_total(spec, len(training)), as_json)
    trainer = BoardTrainer(link, model, training, spec.settings, state_dir, view, held_out=held_out)
    start = time.monotonic()
    trainer.start()
    begun = trainer.position.step
    if trainer.finished and not as_json:
        print(
            f"all {trainer.total_steps:,} samples are already trained; give more --epochs, or --keep-weights to start "
            "a new training"
        )
    with view:
        _run_until_interrupted(trainer)
    trainer.write_result(spec.out)
    figures = summary_of(link.device, view, trainer.position.step, time.monotonic() - start, begun)
    trainer.close()
    if as_json:
        show_json({"event": "finished", **figures, "clipped_values": clipped})
    else:
        show_summary(figures)
    return 0


def _warn_of_clipped(values: int, name: str) -> None:
    if values:
        print(
            f"{values:,} values lie outside the range that {name} was calibrated for and are clipped", file=sys.stderr
        )


def _total(spec: BoardJobSpec, samples: int) -> int:
    whole = spec.settings.epochs * samples
    return whole if spec.settings.steps is None else min(whole, spec.settings.steps)


def _run_until_interrupted(trainer: BoardTrainer) -> None:
    """Train; on Ctrl-C save the position, so that the next run resumes there."""
    try:
        trainer.run(lambda: False)
    except KeyboardInterrupt:
        try:
            trainer.leave()
        except McuError:
            print("the board no longer answers; the next run continues from the last snapshot")
        raise


def run_eval(arguments: argparse.Namespace) -> int:
    """Evaluate the weights on the board."""
    spec = _spec(arguments)
    model = read_model(spec.model)
    training, held_out = load_data(spec, model)
    samples = held_out if len(held_out) else training
    _warn_of_clipped(samples.clipped, model.name)
    link = make_link(spec, model, None)
    link.connect()
    with tempfile.TemporaryDirectory() as folder:
        result = BoardTrainer(link, model, training, spec.settings, Path(folder), lambda event: None).evaluate(samples)
    link.close()
    if arguments.json:
        show_json({"accuracy": result.accuracy, "loss": result.loss, "samples": result.samples})
    else:
        print(f"{judgement(result)} on {result.samples:,} samples")
    return 0


def run_infer(arguments: argparse.Namespace) -> int:
    """Show the classes of samples, or the outputs of a model that has targets."""
    model = read_model(arguments.model)
    rows, clipped = load_rows(arguments.data, model)
    _warn_of_clipped(clipped, model.name)
    if model.input is not None and (faint := model.input.faint(reach(rows, model.input))):
        print(f"{arguments.data}: {faint}", file=sys.stderr)
    link = make_link(replace(read_job(arguments.model), port=arguments.port, serial=arguments.serial), model, None)
    device = link.connect()
    if model.target_count:
        for index, row in enumerate(rows):
            _show_outputs(index, device.outputs(row.tobytes()), arguments.json)
        link.close()
        return 0
    chunk = max(1, min(device.samples_per_request(labelled=False), INFER_MAX))
    for start in range(0, len(rows), chunk):
        for index, found in enumerate(device.infer(rows[start : start + chunk].tobytes()), start):
            name = model.classes[found] if found < len(model.classes) else None
            if arguments.json:
                show_json({"sample": index, "class": found, "name": name})
            else:
                print(f"{index:>7}  {found if name is None else name}")
    link.close()
    return 0


def _show_outputs(index: int, outputs: tuple[float, ...], as_json: bool) -> None:
    if as_json:
        show_json({"sample": index, "outputs": outputs})
    else:
        print(f"{index:>7}  {'  '.join(f'{each:.6g}' for each in outputs)}")


def run_record(arguments: argparse.Namespace) -> int:
    """Record a stream until it ends or Ctrl-C."""

    def report(seen: RecordingTotals) -> None:
        if arguments.json:
            print(json.dumps(asdict(seen)), flush=True)
        else:
            bad = f", {seen.bad_lines} bad lines, the newest: {seen.problem}" if seen.bad_lines else ""
            print(f"{seen.samples:,} samples in {seen.files} files{bad}", flush=True)

    with open_stream(arguments.source) as stream:
        record(stream, arguments.inbox, read_model(arguments.model), arguments.per_file, report)
    return 0


def run_simulate(arguments: argparse.Namespace) -> int:
    """Run a model in QEMU until interrupted, or adapt a project from start to finish."""
    from port_agent.mcu.project import SCRIPT

    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(143)
    )  # raises SystemExit, so that the simulated board is switched off
    if (arguments.model / SCRIPT).is_file():
        return _simulate_project(arguments)
    with (
        tempfile.TemporaryDirectory() as work,
        _simulator(arguments.model, arguments.board, Path(work), arguments.model) as simulator,
    ):
        port = simulator.start()
        if arguments.json:
            print(json.dumps({"port": str(port), "board": simulator.firmware.board.name}), flush=True)
        else:
            print(f"{simulator.firmware.board.title} on {port}; Ctrl-C ends it. In another terminal:")
            data = " --data DATA" if read_job(arguments.model).data is None else ""
            print(f"  port-agent mcu train {arguments.model}{data} --port {port}", flush=True)
        _wait_for_interrupt(simulator)
    return 0


def _simulator(model: Path, board: str | None, work: Path, of: Path) -> Simulator:
    """Return the simulator of a model.

    Its port and storage belong to the model or project `of`, identified by its full path.
    """
    chosen = find_board(board or read_job(model).board or DEFAULT_SIMULATED)
    place = of.resolve()
    folder = simulator_folder() / f"{chosen.name}-{place.name}-{bytes_checksum(os.fsencode(place))[:8]}"
    return Simulator(build_firmware(chosen, model, work), folder)


def _wait_for_interrupt(simulator: Simulator) -> None:
    ended = threading.Event()
    while simulator.running and not ended.wait(1.0):
        pass


def _simulate_project(arguments: argparse.Namespace) -> int:
    from port_agent.mcu.project import load_project, write_project

    project = load_project(arguments.model)
    if project.note and not arguments.json:
        print(project.note)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        spec = read_job(write_project(project, work / "model"))
        with _simulator(work / "model", arguments.board, work / "firmware", arguments.model) as simulator:
            if not arguments.json:
                show_firmware(simulator.firmware)
            return _train(spec, work / "state", arguments.json, simulator.start())
