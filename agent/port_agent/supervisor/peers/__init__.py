"""The supervisor's side of other devices: which are present and paired, and what they are told about this one."""
