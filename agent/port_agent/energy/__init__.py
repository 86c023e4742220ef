"""Joules: metered, attributed to jobs, kept in a ledger, and reported with what they cover."""
