"""`chat`: the command, and the process that it becomes."""
