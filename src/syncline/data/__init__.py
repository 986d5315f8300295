"""Text on disk to micro-batches: sources, tokenizers, packing, sampling and loading."""
