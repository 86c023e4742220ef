"""The referee of a bundle: the script that it was made of, run alone, and the bundle beside it."""
