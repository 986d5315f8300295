"""Collectives and messages between ranks, and the count of what they send."""
