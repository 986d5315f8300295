"""What is recomputed is what was asked for, and no bit of a gradient changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from syncline.errors import UserError
from syncline.modeling.checks import run_chained
from syncline.modeling.recompute import enable_recompute
from tests.modeling.families import assert_same, random_micro_batch, tiny_config, tiny_stages

GRANULARITIES = ("full", "full_attn")
LAYERS = 4


def forwards(stages) -> Counter[str]:
    """Counts, from now on, how often each projection of the layers begins; a recomputation ends within its last one."""
    counts: Counter[str] = Counter()
    for stage in stages:
        for name, module in stage.model.named_modules():
            if isinstance(module, torch.nn.Linear) and ".layers." in name:
                module.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
    return counts


def layer_of(name: str) -> int:
    return int(name.split(".layers.")[1].split(".")[0])


@pytest.mark.parametrize("interval", [1, 2, 3])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox"])
def test_every_interval_th_layer_is_computed_twice_and_no_gradient_changes(family, granularity, interval):
    config = tiny_config(family, layers=LAYERS)
    micro_batch = random_micro_batch()
    expected = run_chained(tiny_stages(config, 2), micro_batch)
    stages = tiny_stages(config, 2)
    for stage in stages:
        enable_recompute(stage.model, granularity, interval)
    counts = forwards(stages)
    found = run_chained(stages, micro_batch)
    assert_same(found, expected, tolerance=0)
    assert {layer_of(name) for name in counts} == set(range(LAYERS))
    for name, count in counts.items():
        recomputed = layer_of(name) % interval == 0 and (granularity == "full" or "att" in name)
        assert count == (2 if recomputed else 1), name


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_dropouts_are_repeated(granularity):
    config = tiny_config("gpt_neox", layers=LAYERS)
    config.attention_dropout, config.hidden_dropout = 0.5, 0.0
    config._attn_implementation = "eager"
    micro_batch = random_micro_batch()
    found = []
    for recomputes in (False, True):
        stages = [stage.train() for stage in tiny_stages(config, 1)]
        if recomputes:
            enable_recompute(stages[0].model, granularity)
        torch.manual_seed(3)
        found.append(run_chained(stages, micro_batch))
    assert_same(found[1], found[0], tolerance=0)


def test_an_evaluation_recomputes_nothing():
    (stage,) = tiny_stages(tiny_config("llama", layers=LAYERS), 1)
    enable_recompute(stage.model, "full_attn")
    counts = forwards([stage])
    with torch.no_grad():
        stage.eval()(random_micro_batch())
    assert set(counts.values()) == {1}


def test_models_that_cannot_are_refused():
    (stage,) = tiny_stages(tiny_config("llama"), 1)
    stage.model.supports_gradient_checkpointing = False
    with pytest.raises(UserError, match="does not support gradient checkpointing"):
        enable_recompute(stage.model)
    for layer in stage.model.model.layers:
        layer.self_attn = torch.nn.Identity()
    with pytest.raises(UserError, match="none of its layers has a module that is called attention"):
        enable_recompute(stage.model, "full_attn")
