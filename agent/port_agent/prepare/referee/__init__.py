"""The referee of a bundle: the script from which it was made, run alone, and the bundle beside it."""
