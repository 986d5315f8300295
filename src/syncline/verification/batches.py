"""Hard global batches: uneven token counts, masked rows, a masked micro-batch, a rank with nothing to say."""

from __future__ import annotations

import torch

from syncline.data.batch import IGNORED_LABEL, MicroBatch

ROWS = 2
SEQUENCE = 12

GlobalBatch = dict[tuple[int, int], MicroBatch]
"""(replica, micro-batch) -> its samples."""


def hard_global_batch(seed: int, step: int, replicas: int, micro_batches: int, vocabulary: int) -> GlobalBatch:
    """One step's samples, a function of the arguments alone; at least one token of the global batch is valid.

    Every row keeps a random share of its labels. In step 1 the last replica has no valid token at all; in every step
    one micro-batch in four has none, on a replica that varies.
    """
    generator = torch.Generator().manual_seed(seed * 1009 + step)
    batch: GlobalBatch = {}
    for replica in range(replicas):
        for micro_batch in range(micro_batches):
            tokens = torch.randint(0, vocabulary, (ROWS, SEQUENCE + 1), generator=generator)
            labels = tokens[:, 1:].clone()
            kept = torch.rand(ROWS, 1, generator=generator)
            masked = torch.rand(ROWS, SEQUENCE, generator=generator) > kept
            masked |= torch.tensor((replica + micro_batch + step) % 4 == 3)
            masked |= torch.tensor(step == 1 and replica == replicas - 1 and replicas > 1)
            labels[masked] = IGNORED_LABEL
            if (replica, micro_batch) == (0, 0):
                labels[0, 0] = tokens[0, 1]
            positions = torch.arange(SEQUENCE).expand(ROWS, SEQUENCE).contiguous()
            batch[replica, micro_batch] = MicroBatch(tokens[:, :-1].contiguous(), labels, positions)
    return batch
