"""The samples on which a job trains: the rows of its bundle (`bundled`), or files that arrive in
a directory (`incoming`).
"""
