"""How microcontrollers are shown: what is unknown says so, and each event is one JSON line or one line of text."""

import json

import pytest

from port_agent.cli.mcu.views import (
    ListedPort,
    TrainView,
    bytes_or_unknown,
    listed_json,
    show_json,
    show_list,
    show_summary,
    status_json,
)
from port_agent.mcu.protocol.ports import PortInfo
from port_agent.mcu.protocol.queries import DeviceInfo, DeviceStatus, ResetReason
from port_agent.mcu.trainer import BoardEvaluation, BoardInterrupted, SnapshotTaken

INFO = DeviceInfo(
    protocol=1, oldest_protocol=1, firmware=(0, 1, 0), max_payload=256, ram_bytes=65536, flash_bytes=262144, nonce=0xABC,
    next_sequence=1, class_count=4, input_bytes=64, parameter_bytes=100, arena_bytes=200, trains=True, has_q88=True,
    has_storage=False, has_snapshot=False, has_targets=False, slot_bytes=0, ticks_hz=1000, model_hash=bytes(range(32)), board="posix",
    model="small", serial=bytes(8),
)  # fmt: skip
STATUS = DeviceStatus(
    frames=10, bad_crc=1, bad_cobs=2, overlong=3, duplicates=4, refused=5, overruns=0, trained=6, evaluated=7, saves=8,
    stack_used_bytes=None, stack_bytes=None, static_ram_bytes=1000, reset_reason=ResetReason.WATCHDOG, ticks=2500,
)  # fmt: skip
PORT = PortInfo("/dev/ttyACM0", None, None, "a serial port", ())


def test_a_size_that_no_one_knows_is_not_zero() -> None:
    assert (bytes_or_unknown(None), bytes_or_unknown(0), bytes_or_unknown(65536)) == ("unknown", "0 B", "65,536 B")


def test_a_number_that_is_not_finite_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"loss": float("nan")})
    assert json.loads(capsys.readouterr().out) == {"loss": None}


def test_a_port_without_an_answer_is_listed_with_its_problem(capsys: pytest.CaptureFixture[str]) -> None:
    silent, speaking = ListedPort(PORT, None, "no answer"), ListedPort(PORT, INFO, None)
    assert (listed_json(silent)["board"], listed_json(silent)["problem"]) == (None, "no answer")
    assert (listed_json(speaking)["board"], listed_json(speaking)["model_hash"]) == ("posix", bytes(range(32)).hex())
    show_list([silent, speaking])
    said = capsys.readouterr().out
    assert "no answer" in said and "000102030405" in said and "ready" in said


def test_counters_keep_what_the_board_cannot_tell_apart_from_nothing() -> None:
    told = status_json(INFO, STATUS, None)
    assert (told["ram_used_bytes"], told["static_ram_bytes"], told["serial"]) == (None, 1000, None)
    assert (told["frame_errors"], told["uptime_s"], told["reset_reason"]) == (6, 2.5, "watchdog")


def test_each_event_is_one_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    with TrainView(total=10, as_json=True) as view:
        view(BoardEvaluation(step=4, accuracy=0.5, loss=1.25, samples=8))
        view(SnapshotTaken(step=4, size_bytes=300, wall_s=0.5))
        view(BoardInterrupted("unplugged", None))
        view(BoardInterrupted("unplugged", 4))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["event"] for line in lines] == ["eval", "snapshot", "interrupted", "interrupted"]
    assert lines[0] == {"event": "eval", "step": 4, "accuracy": 0.5, "loss": 1.25, "samples": 8}
    assert (view.interruptions, [evaluation.step for evaluation in view.evaluations]) == (1, [4])


def test_the_summary_compares_before_and_after_where_both_were_measured(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "accuracy_before": 0.25, "accuracy_after": 0.75, "accuracy_best": 0.75, "best_step": 1200, "explains": False, "steps": 1200, "board": "posix", "wall_s": 3.0,
        "ram_used_bytes": None, "ram_limit_bytes": 65536, "retries": 2, "duplicates": 1, "interruptions": 0,
    }  # fmt: skip
    show_summary(figures)
    said = capsys.readouterr().out
    assert "25.0%" in said and "75.0%" in said and "RAM unknown of 65,536 B" in said and "2 retries" in said
    show_summary(figures | {"accuracy_before": None})
    said = capsys.readouterr().out
    assert "25.0%" not in said and "not measured" in said and "75.0%" in said
    assert "fell" not in said
    show_summary(figures | {"accuracy_best": 0.875, "best_step": 600})
    assert "it fell from 87.5% after 600 samples; mcu export --best" in " ".join(capsys.readouterr().out.split())
    show_summary(figures | {"accuracy_before": None, "accuracy_after": None, "accuracy_best": None})
    assert "measured" not in capsys.readouterr().out
