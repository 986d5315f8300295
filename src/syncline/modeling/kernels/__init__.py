"""Layers of a model that compute the same with less memory or time."""
