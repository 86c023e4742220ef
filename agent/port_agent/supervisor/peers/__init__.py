"""The supervisor's part of dealing with other devices: which are present and paired, and what
they receive about this one.
"""
