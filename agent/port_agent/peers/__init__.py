"""Other agents on the local network: who is there.

Presence only: nothing is trusted, and nothing else is exchanged.
"""
