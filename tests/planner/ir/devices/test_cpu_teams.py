"""Teams of threads say what they are."""

from port_planner.ir.devices.cpu_teams import CpuTeam


def test_a_team_says_how_many_threads_it_has_and_where() -> None:
    assert CpuTeam(1).text == "1 thread" and CpuTeam(4).text == "4 threads"
    assert CpuTeam(2, (4, 5)).text == "2 threads on cores 4, 5"
