"""`chat`: the command, and the process that answers."""
