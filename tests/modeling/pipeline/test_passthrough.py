import pytest
import torch
from torch import nn

from syncline.modeling.pipeline.passthrough import Injector, PassThrough


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.attention_type = "sliding_attention"


def test_a_replacement_answers_to_attributes_but_holds_no_parameters():
    replacement = PassThrough(Layer())
    assert replacement.attention_type == "sliding_attention"
    assert not list(replacement.parameters())
    states = torch.ones(2)
    assert replacement(states, attention_mask=None) is states


def test_an_injector_drops_its_input_and_demands_what_was_received():
    injector = Injector(PassThrough(Layer()))
    assert injector.attention_type == "sliding_attention"
    with pytest.raises(AssertionError):
        injector(torch.ones(2))
    injector.hidden = torch.zeros(3)
    assert injector(torch.ones(2), use_cache=False) is injector.hidden
