from dataclasses import replace

import pytest
import torch

from syncline.data.batch import IGNORED_LABEL, MicroBatch

CPU = torch.device("cpu")


def micro_batch(positions: list[list[int]]) -> MicroBatch:
    position_ids = torch.tensor(positions)
    return MicroBatch(torch.zeros_like(position_ids), torch.zeros_like(position_ids), position_ids)


@pytest.mark.parametrize(
    ("positions", "packed"),
    [
        ([[0, 1, 2, 3], [0, 1, 2, 3]], False),
        ([[0, 1, 2, 3], [0, 1, 0, 1]], True),
        ([[0, 1, 2, 0], [0, 1, 2, 3]], True),
        ([[1, 2, 3, 4], [0, 1, 2, 3]], True),
        ([[0], [0]], False),
    ],
)
def test_a_row_is_packed_unless_its_positions_count_from_zero(positions, packed):
    assert micro_batch(positions).is_packed is packed
    assert micro_batch(positions).to(CPU).packed is packed


def test_what_was_seen_and_counted_before_is_not_read_again():
    one = micro_batch([[0, 1, 2], [0, 1, 0]])
    one.labels[0, 1] = IGNORED_LABEL
    elsewhere = one.to(CPU).to(torch.device("meta"))
    assert elsewhere.position_ids.is_meta
    assert elsewhere.valid_tokens == 5
    assert elsewhere.is_packed
    assert replace(one, packed=False).is_packed is False


def test_a_mask_travels_along():
    one = replace(micro_batch([[0, 1, 2]]), attention_mask=torch.ones(1, 3))
    mask = one.to(torch.device("meta")).attention_mask
    assert mask is not None
    assert mask.is_meta
