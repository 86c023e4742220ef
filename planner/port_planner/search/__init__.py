"""From a problem to a verified plan: greedy, exact and anytime search, and the frontier of plans."""
