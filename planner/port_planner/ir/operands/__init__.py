"""Checks of operands for operators that do not check them themselves: one module per family of operators."""
