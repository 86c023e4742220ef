"""What operators are called with, where they do not check that themselves: one module for each family."""
