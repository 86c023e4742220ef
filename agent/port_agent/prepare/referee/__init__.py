"""The referee of a bundle: the script that it was made from, run alone, and the bundle alongside it."""
