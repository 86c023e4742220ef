"""Where operators are measured, and compared in pieces: a process beside the one that plans."""
