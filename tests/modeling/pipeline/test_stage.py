from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from syncline.data.batch import IGNORED_LABEL, MicroBatch
from syncline.modeling.checks import run_chained
from tests.modeling.families import (
    FAMILIES,
    SPLIT_FAMILIES,
    assert_same,
    random_micro_batch,
    tiny_config,
    tiny_model,
    tiny_stages,
)


def run_whole(model, micro_batch):
    """Shares nothing with the stages but the model's code."""
    logits = model(input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids).logits
    loss = functional.cross_entropy(
        logits.flatten(0, 1), micro_batch.labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_stages_compute_what_the_whole_model_computes(family, tied):
    config = tiny_config(family, layers=5, tied=tied)
    micro_batch = random_micro_batch()
    expected = run_whole(tiny_model(config).eval(), micro_batch)
    for stages in (2, 3, 4):
        assert_same(run_chained([stage.eval() for stage in tiny_stages(config, stages)], micro_batch), expected)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_stage_is_the_whole_model(family, tied):
    config = tiny_config(family, layers=2, tied=tied)
    micro_batch = random_micro_batch()
    expected = run_whole(tiny_model(config).eval(), micro_batch)
    assert_same(run_chained([tiny_stages(config, 1)[0].eval()], micro_batch), expected)


def test_a_padding_mask_reaches_every_stage():
    config = tiny_config("llama", layers=3)
    micro_batch = random_micro_batch()
    mask = torch.ones_like(micro_batch.input_ids)
    mask[:, 15:] = 0
    masked = type(micro_batch)(micro_batch.input_ids, micro_batch.labels, micro_batch.position_ids, mask)
    expected = tiny_model(config).eval()(
        input_ids=masked.input_ids, position_ids=masked.position_ids, attention_mask=mask
    )
    stages = [stage.eval() for stage in tiny_stages(config, 3)]
    hidden = stages[1](masked, stages[0](masked))
    torch.testing.assert_close(stages[2].logits(masked, hidden), expected.logits, rtol=1e-12, atol=1e-14)


def test_hidden_states_are_let_go_after_the_forward():
    first, last = tiny_stages(tiny_config("llama"), 2)
    micro_batch = random_micro_batch()
    last(micro_batch, first(micro_batch))
    assert all(getattr(module, "hidden", None) is None for module in last.modules())


def test_a_model_without_positions_runs_as_one_stage():
    config = tiny_config("bloom", layers=2)
    (stage,) = tiny_stages(config, 1)
    assert not stage.accepts_positions
    assert stage(random_micro_batch()).isfinite()


def plain_micro_batch() -> MicroBatch:
    """Every row is one document."""
    micro_batch = random_micro_batch()
    return replace(micro_batch, position_ids=torch.arange(20).expand(2, 20).contiguous())


@pytest.mark.parametrize("family", [*FAMILIES, "opt", "falcon"])
def test_positions_that_a_model_counts_itself_change_no_bit(family):
    (stage,) = tiny_stages(tiny_config(family, layers=3), 1, dtype=torch.float32)
    stage.eval()
    micro_batch = plain_micro_batch()
    given = stage.logits(replace(micro_batch, packed=True))
    assert torch.equal(stage.logits(micro_batch), given)


@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_nor_do_they_in_a_pipeline(family):
    stages = [stage.eval() for stage in tiny_stages(tiny_config(family, layers=3), 2, dtype=torch.float32)]
    micro_batch = plain_micro_batch()
    found, given = (
        stages[1].logits(each, stages[0](each)) for each in (micro_batch, replace(micro_batch, packed=True))
    )
    assert torch.equal(found, given)


def test_positions_are_given_to_the_model_only_where_a_row_is_packed():
    first, last = tiny_stages(tiny_config("llama"), 2)
    given = []
    for stage in (first, last):
        stage.model.base_model.register_forward_pre_hook(
            lambda module, arguments, keywords: given.append(keywords.get("position_ids")), with_kwargs=True
        )
    packed = random_micro_batch()
    for micro_batch in (plain_micro_batch(), packed):
        last(micro_batch, first(micro_batch))
    assert given[:2] == [None, None]
    assert all(positions is packed.position_ids for positions in given[2:])
    assert len(given) == 4
