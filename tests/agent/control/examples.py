"""A status as the supervisor answers it."""

from port_agent.control.http_answers import AgentStatus, DeviceState, FlashLife, IdleSignalState, RunStatus
from port_agent.health.conditions import HealthItem, Severity


def status() -> AgentStatus:
    """Return a status with a job that trains on battery and one thing that is wrong."""
    device = DeviceState(
        power="battery",
        power_detail="BAT0 discharges",
        battery_percent=50.0,
        temperature_c=41.5,
        throttled="no",
        idle_signals=(IdleSignalState("load", "yes", "others use 2 % CPU"),),
        free_disk_bytes=1,
        available_memory_bytes=None,
        memory_pressure_percent=None,
        online="yes",
        metered="unknown",
    )
    run = RunStatus(
        id=3,
        name='a"b\\c',
        kind="train",
        phase="training",
        requested="train",
        pid=17,
        step=5,
        total_steps=None,
        loss=0.5,
        step_s=None,
        eta_s=None,
        plan=0,
        plans=2,
        planned_peak_bytes=None,
        memory_limit_bytes=None,
        peak_rss_bytes=None,
        planned_joules=None,
        deadline_at=None,
    )
    wrong = HealthItem("config", "", Severity.ERROR, "the configuration was rejected", "x", "correct it", 1.0, 2.0)
    return AgentStatus(
        time=1e9,
        uptime_s=12.5,
        state="training",
        may_train=True,
        reasons=("on battery",),
        conditions=(),
        codes=(),
        paused_until=None,
        job=run,
        running=(run,),
        waiting=(),
        facts=device,
        flash_written_today_bytes=7,
        flash_budget_bytes=70,
        flash_life=FlashLife("SD card", 19_200_000_000_000, True, None, 19_200_000_000_000, 1e9, 52.6),
        next_window=None,
        sleep="held off while a job may run",
        usual_day_s=None,
        energy=None,
        health=(wrong,),
    )
