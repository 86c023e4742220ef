"""The supervisor's side of other devices: who is there, who is paired, what they are told of this one."""
