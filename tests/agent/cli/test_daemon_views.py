"""The daemon's answers in a terminal: what is known is shown, what is not says so or stays away."""

import re
import time
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest

from port_agent.cli.daemon_views import (
    doctor_screen,
    flash_life_line,
    job_screen,
    jobs_table,
    promise_lines,
    show_timeline,
    status_screen,
)

FACTS: dict[str, Any] = {
    "power": "external",
    "battery_percent": None,
    "temperature_c": None,
    "throttled": "unknown",
    "voices": [],
    "free_disk_bytes": None,
    "available_memory_bytes": None,
}
STATUS: Mapping[str, Any] = {
    "state": "idle", "reasons": ["no jobs"], "running": [], "waiting": [], "facts": FACTS, "health": [], "mcus": [],
    "flash_written_today_bytes": 0, "flash_budget_bytes": 16 << 30, "peers": None, "paired": [], "next_window": None, "energy": None,
    "usual_day_s": None, "flash_life": None, "sleep": "not held off: no job may run",
}  # fmt: skip
JOB: Mapping[str, Any] = {
    "id": 3, "name": "birds", "state": "queued", "reason": "", "step": 0, "total_steps": None, "loss": None,
    "priority": 0, "deadline_at": None, "retry_in_s": None, "owner": None, "on": None, "guest_of": None, "kind": "train",
}  # fmt: skip
RUN: Mapping[str, Any] = {
    **JOB, "pid": 77, "step": 30, "total_steps": 120, "loss": 0.25, "step_s": 2.0, "eta_s": 180.0, "plan": 1, "plans": 3,
    "planned_peak_bytes": 300 << 20, "memory_limit_bytes": 400 << 20, "peak_rss_bytes": 290 << 20, "planned_joules": 40.0,
    "waits_for": None, "step_written_bytes": 27 << 20, "planned_device_bytes": None, "device_peak_bytes": None,
}  # fmt: skip


def test_an_idle_machine_without_sensors(shown: Any) -> None:
    out = shown(status_screen(STATUS))
    assert out.startswith("idle: no jobs\n")
    words = " ".join(out.split())
    for line in ("Heat no sensor", "In use? unknown", "Free unknown", "0 B of 16.0 GiB written today"):
        assert line in words
    assert "Job" not in out and "Peers" not in out and "Window" not in out and "Board" not in out


def test_a_training_job_with_pace_memory_and_energy(shown: Any) -> None:
    energy = {"job": "3", "job_net_joules": 36.0, "kind": "measured", "source": "rapl", "watts": 4.25}
    out = shown(
        status_screen({**STATUS, "state": "training", "reasons": ["left alone"], "running": [RUN], "energy": energy})
    )
    assert "training: left alone" in out and "3 (birds)" in out and "25%  step 30 of 120" in out
    assert "loss 0.25" in out and "per step" in out and "of training left" in out
    assert "plan 2 of 3, 300.0 MiB planned, limit 400.0 MiB, peak 290.0 MiB" in out
    assert "used by this job (measured, rapl), 4.2 W now" in out and "planned so far" in out
    estimated = {**energy, "kind": "estimated", "source": "estimated"}
    assert "(estimated)" in shown(status_screen({**STATUS, "running": [RUN], "energy": estimated})), "said once"
    other = shown(status_screen({**STATUS, "running": [RUN], "energy": {**energy, "job": "9"}}))
    assert "used by this job" not in other, "another job's joules are not this one's"


def test_a_job_on_a_device_shows_what_it_takes_there(shown: Any) -> None:
    job = {**RUN, "planned_device_bytes": 3 << 30, "device_peak_bytes": 2 << 30}
    out = shown(status_screen({**STATUS, "jobs": [job], "running": [job]}))
    assert "on the device 3.0 GiB planned, on the device peak 2.0 GiB" in " ".join(out.split())


def test_a_program_that_is_attached_shows_whose_it_is(shown: Any) -> None:
    out = shown(status_screen({**STATUS, "running": [{**RUN, "owner": "ada", "total_steps": None}]}))
    assert "3 (birds), program of ada, process 77" in out and "300.0 MiB at most" in out and "plan 2" not in out
    assert "step 30" in out and "%" not in out.split("Energy")[0].split("Progress")[1]
    tuning = {**RUN, "owner": "ada", "kind": "finetune"}
    assert "fine-tuning of ada, process 77" in shown(status_screen({**STATUS, "running": [tuning]}))


def test_of_many_that_wait_six_are_shown(shown: Any) -> None:
    waiting = [{**JOB, "id": number, "name": f"job{number}"} for number in range(1, 10)]
    out = shown(status_screen({**STATUS, "waiting": waiting}))
    assert "job6" in out and "job7" not in out and "and 3 more; port-agent job list" in out


def test_what_is_in_use_is_asked_the_other_way_round(shown: Any) -> None:
    voices = [{"name": "mouse", "idle": "no"}, {"name": "load", "idle": "yes"}, {"name": "login", "idle": "unknown"}]
    facts = {**FACTS, "voices": voices, "temperature_c": 61.4, "throttled": "yes", "battery_percent": 80.0}
    out = shown(status_screen({**STATUS, "facts": facts}))
    assert "mouse yes, load no, login unknown" in out and "61 °C, throttled" in out and "external, battery 80 %" in out


def test_what_is_wrong_stands_with_its_remedy(shown: Any) -> None:
    item = {
        "code": "sensor",
        "key": "temperature/thermal_zone0",
        "severity": "warning",
        "title": "a sensor cannot be read",
        "text": "[temp]: no answer",
        "remedy": "see [doctor]",
    }
    out = shown(status_screen({**STATUS, "health": [item, {**item, "severity": "error", "remedy": ""}]}))
    assert "! a sensor cannot be read: [temp]: no answer\n  see [doctor]" in out and "✗ a sensor" in out
    assert "Heat cannot be read" in " ".join(out.split())


def test_reasons_in_brackets_are_shown_and_break_nothing(shown: Any) -> None:
    """An error names a port or a dtype; rich would read a style into it."""
    reason = "needs [float32], found [/dev/ttyACM0]"
    job = {**JOB, "state": "backoff", "reason": reason, "retry_in_s": 29.6, "priority": 5}
    assert f"{reason}; retries in 30.0 s; priority 5" in shown(jobs_table([job]))
    detail = {
        **job, "submitted_at": time.time(), "trained_s": 90.0, "attempts": 1, "planned_joules": 0.0,
        "result": "/home/[me]/out", "inbox": None, "promise": None, "metered_joules": None, "directory": "/var/[x]", "history": [{"at": 0.0, "kind": "failed", "text": reason}],
    }  # fmt: skip
    out = shown(job_screen(detail))
    assert out.count(reason) == 2 and "/home/[me]/out" in out and "/var/[x]" in out and "in 1 run" in out
    assert "Inbox" not in out and "Energy" not in out and "Federation" not in out
    member = {"leader": "shed", "round": 4, "waits": "for its training (step 9)"}
    assert "shed leads, round 4; waiting: for its training (step 9)" in shown(
        job_screen({**detail, "federation": member})
    )


PROMISE: Mapping[str, Any] = {
    "plan": 0,
    "peak_bytes": 300 << 20,
    "step_s": 2.0,
    "step_joules": 8.0,
    "written_bytes": 20 << 20,
    "steps": 900,
    "ends_at": None,
    "nights": None,
}


def test_what_was_promised_stands_beside_what_happened(shown: Any) -> None:
    detail: dict[str, Any] = {
        **JOB, "submitted_at": 0.0, "trained_s": 210.0, "attempts": 1, "planned_joules": None, "result": None,
        "inbox": None, "directory": "/var", "history": [], "step": 100, "total_steps": 900, "finished_at": None,
        "measured": {"peak_rss_bytes": 290 << 20}, "written_bytes": 2500 << 20, "metered_step_joules": 8.25,
        "metered_joules": 81.0,
        "promise": PROMISE,
    }  # fmt: skip
    assert "81.00 J used since the agent started" in shown(job_screen(detail))
    assert "81.00 J used since the agent started, 6.72 J planned so far" in shown(
        job_screen({**detail, "planned_joules": 6.72})
    )
    rows = [" ".join(re.sub("[│┃]", " ", line).split()) for line in shown(job_screen(detail)).splitlines()]
    for row in (
        "promised so far",
        "memory 300.0 MiB 290.0 MiB",
        "time a step 2.0 s 2.1 s",
        "energy a step 8.00 J 8.25 J",
        "written a step 20.0 MiB 25.0 MiB, checkpoints included",
        "done 30 min 00 s of training; the number of nights is known once the agent has watched this device for a "
        "day step 100 of 900",
    ):
        assert row in rows, rows
    tomorrow = datetime.now().replace(hour=7, minute=10) + timedelta(days=1)
    known = {**PROMISE, "ends_at": tomorrow.timestamp(), "nights": 1}
    over = shown(
        job_screen({**detail, "promise": known, "finished_at": tomorrow.timestamp() + 60.0, "state": "finished"})
    )
    assert "happened" in over and f"{tomorrow:%a %d %b} 07:10, 1 night of training" in over and "07:11" in over
    before = shown(job_screen({**detail, "step": 0, "measured": {"peak_rss_bytes": None}, "metered_step_joules": None}))
    assert "290.0 MiB" not in before and "8.25" not in before
    of_data = shown(job_screen({**detail, "promise": {**PROMISE, "steps": None}}))
    assert "it depends on the data that arrives" in of_data


def test_a_submitted_job_says_what_is_promised() -> None:
    assert promise_lines({"promise": None}) == []
    first, last = promise_lines({"promise": PROMISE})
    assert first == "It fits in 300.0 MiB. A step: 2.0 s, 8.00 J, 20.0 MiB written to flash (0.0189 TB in total)."
    assert last.startswith("Done: 30 min 00 s of training; the number of nights is known once")


def test_the_usual_day_is_shown_once_it_is_known(shown: Any) -> None:
    assert "Usual" not in shown(status_screen(STATUS))
    assert "8 h 00 min of training on an average day" in shown(status_screen({**STATUS, "usual_day_s": 8 * 3600.0}))


def test_a_table_of_jobs(shown: Any) -> None:
    assert "no jobs; add one with `port-agent job submit job.port`" in shown(jobs_table([]))
    done = {**JOB, "state": "waiting_data", "reason": "waiting_data", "step": 5, "total_steps": 9, "loss": 1e-5}
    out = shown(jobs_table([done, {**JOB, "owner": "ada"}]))
    moved = shown(
        jobs_table([{**JOB, "state": "away", "on": "cellar", "reason": "trains"}, {**JOB, "guest_of": "attic"}])
    )
    assert "on cellar; trains" in moved and "of attic" in moved
    assert "waiting data" in out and "5/9" in out and "1e-05" in out and "program of ada" in out
    assert "waiting_data" not in out, "a state is not its own reason"


def test_a_moment_of_today_needs_no_date(shown: Any) -> None:
    today = datetime.now().replace(hour=12, minute=34)
    tomorrow = today + timedelta(days=1)
    out = shown(jobs_table([{**JOB, "deadline_at": moment.timestamp()} for moment in (today, tomorrow)]))
    assert "due 12:34" in out and f"due {tomorrow:%a %d %b} 12:34" in out


def test_paired_devices_are_a_line_of_the_status(shown: Any) -> None:
    there = {"name": "[b]cellar[/b]", "state": "training", "is_connected": True}
    out = shown(status_screen({**STATUS, "paired": [there, {**there, "name": "attic", "is_connected": False}]}))
    assert "Paired" in out and "[b]cellar[/b] training, attic offline" in out
    assert "and 2 more" in shown(status_screen({**STATUS, "paired": [there] * 7}))


def test_seen_agents_are_a_line_of_the_status(shown: Any) -> None:
    peer = {"name": "[bold]evil[/bold]", "state": "unknown"}
    line = shown(status_screen({**STATUS, "peers": [peer] * 7}))
    assert line.count("[bold]evil[/bold] unknown") == 5 and "and 2 more; port-agent peer list" in line


def test_the_doctor_counts_what_needs_attention(shown: Any) -> None:
    good = {"name": "torch", "verdict": "good", "finding": "2.13", "cure": ""}
    bad = {"name": "cgroup", "verdict": "bad", "finding": "not delegated", "cure": "run under systemd"}
    assert "everything needed works" in shown(doctor_screen({"checks": [good], "health": []}))
    item = {"severity": "info", "title": "no temperature sensor", "text": "none", "remedy": ""}
    out = shown(doctor_screen({"checks": [good, bad], "health": [item]}))
    assert "✗ cgroup: not delegated\n  run under systemd" in out and "1 of 2 checks need attention" in out
    assert "The running agent reports:\n· no temperature sensor: none" in out


def test_how_long_the_card_lasts(shown: Any) -> None:
    life = {
        "medium": "SD card",
        "endurance_bytes": 20_000_000_000_000,
        "assumed": True,
        "used_share": None,
        "left_bytes": 20_000_000_000_000,
        "bytes_per_day": 5e9,
        "years_left": 10.95,
    }
    words = " ".join(shown(status_screen({**STATUS, "flash_life": life, "running": [RUN]})).split())
    assert "this SD card, assumed to endure 20 TB, lasts 11 years at today's rate, 7.1e+05 steps of job 3" in words
    used = {**life, "medium": "eMMC", "assumed": False, "used_share": 0.3, "years_left": None}
    assert flash_life_line(used, []) == "this eMMC, which endures 20 TB, 30% of its life used by its own count"


def test_a_line_of_the_timeline_is_not_wrapped_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    text = "the device is in use: " + "last input 0 s ago (i8042); " * 5 + "woke from sleep 0 s ago"
    show_timeline([{"at": 1.8e9, "text": text, "codes": []}])
    assert text in capsys.readouterr().out
