"""Energy in joules: metered, attributed to jobs, kept in a ledger, and reported with what the figures cover."""
