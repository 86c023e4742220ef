"""The planning problem as a mixed-integer linear program (FORMULATION.md), and HiGHS."""
