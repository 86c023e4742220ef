"""Figures of the agent in Prometheus' text format."""

from typing import Any

from agent.control.agent_metrics import agent_families
from agent.system.prometheus import exposition


def test_metrics_follow_the_text_format() -> None:
    status: dict[str, Any] = {
        "state": "training",
        "may_train": True,
        "uptime_s": 12.5,
        "facts": {
            "power": "battery",
            "battery_percent": 50.0,
            "temperature_c": 41.5,
            "free_disk_bytes": 1,
            "available_memory_bytes": None,
        },
        "flash_written_today_bytes": 7,
        "health": [{"severity": "error"}],
        "job": {
            "id": 3,
            "name": 'a"b\\c',
            "step": 5,
            "total_steps": None,
            "loss": 0.5,
            "step_s": None,
            "memory_limit_bytes": None,
        },
    }
    text = exposition(agent_families(status, []))
    assert 'port_agent_job_step{job="3",name="a\\"b\\\\c"} 5.0\n' in text
    assert "port_agent_external_power 0.0\n" in text
    assert "memory_available" not in text and "total_steps" not in text
    for line in text.splitlines():
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2
