"""A run: from a job to the loop, and who watches it."""
