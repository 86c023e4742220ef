"""The live page and the parts it shares with the energy report.

Plain HTML, one vendored chart library, no network.
"""
