"""Runs what was rewritten beside the original, on made-up data, and compares every byte."""
