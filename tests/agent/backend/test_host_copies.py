"""Copies in the host's memory: one of each key, and a copy that is old is none."""

import torch

from port_agent.backend.cpu import CpuBackend
from port_agent.backend.host_copies import HostCopies


def test_a_key_has_one_copy_of_so_many_bytes_and_it_is_present_once_it_is_current() -> None:
    copies = HostCopies(CpuBackend())
    first = copies.copy_of("w", 10)
    assert first.numel() == 10 and copies.present("w") is None and copies.known() == {"w"}
    first.fill_(7)
    copies.current.add("w")
    again, present = copies.copy_of("w", 10), copies.present("w")
    assert present is not None and present.data_ptr() == again.data_ptr() == first.data_ptr()
    assert torch.equal(present[:10], first)


def test_what_is_dropped_is_known_no_more() -> None:
    copies = HostCopies(CpuBackend())
    for key in ("w", "m"):
        copies.copy_of(key, 10)
        copies.current.add(key)
    copies.drop(["w", "never there"])
    assert copies.known() == copies.current == {"m"} and copies.present("w") is None
