"""Other agents on the local network.

Discovery only shows which are present: nothing is trusted, and nothing else is exchanged.
"""
