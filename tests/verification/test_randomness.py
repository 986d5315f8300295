import pytest
import torch
from torch import nn

from syncline.modeling.load import resolve_config
from syncline.verification.randomness import silence_dropouts, without_randomness
from tests.modeling.families import tiny_config, tiny_model


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "phimoe", "gpt_neo", "falcon"])
def test_a_model_in_training_computes_the_same_twice(family):
    config = tiny_config(family, layers=2)
    for name in ("resid_pdrop", "dropout", "layerdrop", "hidden_dropout", "input_jitter_noise", "resid_dropout"):
        if hasattr(config, name):
            setattr(config, name, 0.5)
    tokens = torch.arange(40).view(2, 20)

    def outputs(config):
        model = tiny_model(config, dtype=torch.float32).train()
        return [model(input_ids=tokens).logits for _ in range(2)]

    first, second = outputs(config)
    assert not torch.equal(first, second)
    first, second = outputs(without_randomness(config))
    assert torch.equal(first, second)


def test_nested_configurations_are_covered_and_the_given_one_is_left_alone():
    config = resolve_config(None, {"model_type": "mpt", "attn_config": {"attn_pdrop": 1}, "resid_pdrop": 0.2})
    calm = without_randomness(config)
    assert (calm.attn_config.attn_pdrop, calm.resid_pdrop) == (0, 0)
    assert (config.attn_config.attn_pdrop, config.resid_pdrop) == (1, 0.2)


def test_dropouts_with_numbers_of_their_own_are_silenced():
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout1d(0.5)))
    silence_dropouts(model)
    assert torch.equal(model.train()(torch.ones(4, 4)), torch.ones(4, 4))
