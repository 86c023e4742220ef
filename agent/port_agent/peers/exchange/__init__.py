"""Requests between paired devices, by content hash: questions, answers, and the shared files."""
