"""Other agents on the local network: which are present.

Presence only: nothing is trusted, and nothing else is exchanged.
"""
