"""The supervisor's side of other devices: which are present and paired, and what they receive about this one."""
