"""Joules: metered, attributed to jobs, kept in a ledger, reported with what they cover."""
