"""Hugging Face causal language models, unmodified, as pipeline stages."""
