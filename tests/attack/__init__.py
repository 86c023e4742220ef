"""Attacks on a whole: each gives an `AttackOutcome`, and the tests of this room show that none gets through."""
