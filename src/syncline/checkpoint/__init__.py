"""Weights and models on disk."""
