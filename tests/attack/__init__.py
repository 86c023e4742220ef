"""Attacks on the whole program: each returns an `AttackOutcome`, and the tests here show that none succeeds."""
