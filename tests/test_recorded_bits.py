"""What is computed stays the same, bit by bit, while the code is arranged anew."""

import pytest
import torch

from tests.recorded_bits import digests, recorded

pytestmark = pytest.mark.ranks


def test_forty_trainings_end_with_the_bits_on_record(pool):
    record = recorded()
    if torch.__version__.split("+")[0] != record["torch"].split("+")[0]:
        pytest.skip(f"the record is of PyTorch {record['torch']}; this is {torch.__version__}")
    trainings = record["trainings"]
    assert len(trainings) == 40
    found = digests(pool, trainings)
    changed = [each["keys"] for each, digest in zip(trainings, found, strict=True) if digest != each["digest"]]
    assert not changed, f"{len(changed)} of {len(trainings)}: {changed}"
