"""Where callers come from; how they are answered is tried in `test_show`."""

from port_agent.peers.pairing.callers import plain_host


def test_an_address_as_people_write_it() -> None:
    assert (plain_host("::ffff:10.0.0.2"), plain_host("fe80::1%eth0")) == ("10.0.0.2", "fe80::1%eth0")
