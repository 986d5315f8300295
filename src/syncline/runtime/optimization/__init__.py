"""What happens to a reduced gradient: the norm, the factor, the update."""
