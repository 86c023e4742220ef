"""Settings of torch's arithmetic are read as they are in this thread."""

import torch

from port_planner.ir.torch_arithmetic import arithmetic


def test_each_setting_is_read() -> None:
    """What a file's tests change is put back after it (`tests.torch_settings`)."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    assert (arithmetic().threads, arithmetic().flush_denormal) == (1, True)
    torch.set_flush_denormal(False)
    assert not arithmetic().flush_denormal
