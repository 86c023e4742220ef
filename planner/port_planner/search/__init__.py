"""From a problem to a verified plan: greedy, exact, anytime, and the frontier of them."""
