"""From a plan to a straight-line program for the executor."""
