"""Forty trainings whose every bit is on record: what must stay the same when the code is arranged anew.

`recorded_bits.json` has for each of them the keys that a user would write, and a digest of the parameters, losses and
norms on all ranks. Pool processes compute with kernels that are the same on every processor (`tests/pool.py`), so the
digests hold on every x86-64 machine, for the version of PyTorch that is named beside them.

`python -m tests.recorded_bits` records them again, after a change that is meant to change bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from tests.groups import reused_groups
from tests.pool import Pool
from tests.test_bitwise import LLAMA, trained

RECORD = Path(__file__).with_name("recorded_bits.json")
STEPS = 3

Training = Mapping[str, Any]
"""`ranks`, `keys`, `digest`."""


def recorded() -> dict[str, Any]:
    """`torch`, the version; and `trainings`, those of as many ranks together."""
    document: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return document


def digests(pool: Pool, trainings: Sequence[Training]) -> list[str]:
    """What each of the trainings comes to, all ranks together."""
    found = []
    for ranks, some in groupby(trainings, key=lambda training: training["ranks"]):
        by_rank = pool.run(ranks, train_all, [training["keys"] for training in some], timeout=600.0)
        found += [sha256("".join(each).encode()).hexdigest() for each in zip(*by_rank, strict=True)]
    return found


def train_all(rank: int, world_size: int, trainings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A digest of what this rank ends with, for each of the trainings."""
    found = []
    with reused_groups() as groups:
        for keys in trainings:
            groups.next_run()
            digest = sha256()
            config = {"model_config": {**LLAMA, "num_hidden_layers": 5, **keys.get("model_config", {})}}
            for name, value in sorted(trained(rank, world_size, {**keys, **config}, STEPS).items()):
                digest.update(name.encode())
                digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            found.append(digest.hexdigest())
    return found


def main() -> None:
    trainings = recorded()["trainings"]
    pool = Pool()
    try:
        found = digests(pool, trainings)
    finally:
        pool.close()
    again = [{**training, "digest": digest} for training, digest in zip(trainings, found, strict=True)]
    lines = ",\n".join(f"    {json.dumps(training)}" for training in again)
    document = f'{{\n  "torch": "{torch.__version__}",\n  "trainings": [\n{lines}\n  ]\n}}\n'
    RECORD.write_text(document, encoding="utf-8")


if __name__ == "__main__":
    main()
