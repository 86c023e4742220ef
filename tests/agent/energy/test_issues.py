"""What is wrong with metering now: one issue for each code and key, until it is cleared."""

from port_agent.energy.issues import EnergyIssue, IssueList


def test_an_issue_holds_once_for_its_key_until_it_is_cleared() -> None:
    issues = IssueList()
    issues.report("energy-source", "torn off", "plug it in", key="chip")
    issues.report("energy-source", "silent", "wait", key="plug")
    issues.report("energy-source", "still torn off", "plug it in", key="chip")
    issues.report("energy-ledger", "full", "free some space")
    assert issues.all() == (
        EnergyIssue("energy-source", "chip", "still torn off", "plug it in"),
        EnergyIssue("energy-source", "plug", "silent", "wait"),
        EnergyIssue("energy-ledger", "", "full", "free some space"),
    )
    for key in ("chip", "nobody", ""):
        issues.clear("energy-source", key)
    issues.clear("energy-ledger")
    assert [issue.key for issue in issues.all()] == ["plug"]
