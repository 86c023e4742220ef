"""The text format: escapes, absent values, one newline at the end."""

from port_agent.system.prometheus import MetricFamily, exposition, gauge


def test_families_as_text() -> None:
    counted = MetricFamily("steps_total", "counter", "Steps.", (({"job": 'a"b\\c\n'}, 3.0), ({}, 4.5)))
    assert exposition([counted, gauge("load", "Load.", None), gauge("temperature_celsius", "Heat.", 41)]) == (
        "# HELP port_agent_steps_total Steps.\n"
        "# TYPE port_agent_steps_total counter\n"
        'port_agent_steps_total{job="a\\"b\\\\c\\n"} 3.0\n'
        "port_agent_steps_total 4.5\n"
        "# HELP port_agent_temperature_celsius Heat.\n"
        "# TYPE port_agent_temperature_celsius gauge\n"
        "port_agent_temperature_celsius 41.0\n"
    )
