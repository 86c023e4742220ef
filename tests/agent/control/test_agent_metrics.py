"""Metrics of the supervisor in Prometheus' text format."""

from port_agent.control.agent_metrics import agent_families
from port_agent.system.prometheus import exposition
from tests.agent.control.examples import status


def test_metrics_follow_the_text_format() -> None:
    text = exposition(agent_families(status(), []))
    assert 'port_agent_job_step{job="3",name="a\\"b\\\\c"} 5.0\n' in text
    assert "port_agent_external_power 0.0\n" in text
    assert 'port_agent_health_items{severity="error"} 1.0\n' in text
    assert 'port_agent_state{state="training"} 1.0\nport_agent_state{state="paused"} 0.0\n' in text
    assert "memory_available" not in text and "total_steps" not in text
    for line in text.splitlines():
        assert line.startswith("# ") or len(line.rsplit(" ", 1)) == 2
