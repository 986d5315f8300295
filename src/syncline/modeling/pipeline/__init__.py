"""A Hugging Face model cut into pipeline stages."""
