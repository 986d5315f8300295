"""Runs a program: storage, collectives, messages, updates. It knows actions, and asks about no option."""
