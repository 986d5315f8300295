"""Samples of seeded random tokens, for measuring and testing without any text."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from syncline.data.packing import Sample

RANDOM_TOKENS = "random-tokens"


@dataclass(frozen=True)
class RandomTokenDataset:
    """`sample_count` sequences of uniformly random tokens; each is a document of its own and made when it is read."""

    sample_count: int
    max_seq_length: int
    vocabulary_size: int
    seed: int
    first_sample: int = 0
    """Where this dataset begins in the endless series of samples of its seed, to keep two datasets apart."""

    @property
    def token_count(self) -> int:
        return self.sample_count * self.max_seq_length

    def __len__(self) -> int:
        return self.sample_count

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.sample_count:
            raise IndexError(f"sample {index} of {self.sample_count}")
        generator = np.random.Generator(np.random.PCG64([self.seed, self.first_sample + index]))
        tokens = generator.integers(self.vocabulary_size, size=self.max_seq_length + 1)
        return Sample(tokens[:-1], tokens[1:], np.arange(self.max_seq_length))
