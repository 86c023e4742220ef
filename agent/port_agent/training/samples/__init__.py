"""What a job trains on: the rows of its bundle (`bundled`), or files that arrive in a directory (`incoming`)."""
