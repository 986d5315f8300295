"""When a model's forward uses its parameters, without running it for real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from syncline.modeling.access import order
from syncline.modeling.access.order import block_of, uses_by_registration, uses_in_forward
from syncline.modeling.load import build_meta_model
from syncline.verification.probes import decoder_layers
from tests.modeling.families import FAMILIES, tiny_config


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3"),
        ("model.layers.10.input_layernorm.weight", "model.layers.10"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.norm.weight", "model.norm"),
        ("lm_head.weight", "lm_head"),
        ("transformer.h.0.attn.c_attn.bias", "transformer.h.0"),
        ("model.layers.1.experts.2.weight", "model.layers.1"),
        ("weight", ""),
    ],
)
def test_a_block_is_a_layer_or_a_module_outside_of_them(name, block):
    assert block_of(name) == block


def places(family: str, *, tied: bool = False, layers: int = 3) -> dict[str, tuple[int, int]]:
    model = build_meta_model(tiny_config(family, layers, tied=tied))
    uses = uses_in_forward(model)
    return {name: uses[parameter] for name, parameter in model.named_parameters()}


def test_a_forward_uses_the_embedding_then_layer_by_layer_then_the_head():
    found = places("llama")
    assert found["model.embed_tokens.weight"] == (0, 0)
    for layer in range(3):
        of_layer = {use for name, use in found.items() if name.startswith(f"model.layers.{layer}.")}
        assert of_layer == {(layer + 1, layer + 1)}
    assert found["model.norm.weight"] == (4, 4)
    assert found["lm_head.weight"] == (5, 5)


def test_a_tied_embedding_is_used_again_at_the_end():
    found = places("llama", tied=True)
    assert found["model.embed_tokens.weight"] == (0, 5)
    assert "lm_head.weight" not in found
    assert found["model.norm.weight"] == (4, 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_parameters_are_used_layer_by_layer(family):
    model = build_meta_model(tiny_config(family))
    uses = uses_in_forward(model)
    assert set(uses) == set(model.parameters())
    assert all(first <= last for first, last in uses.values())
    of_layers = [{uses[parameter] for parameter in layer.parameters()} for layer in decoder_layers(model)]
    assert all(len(places) == 1 for places in of_layers), "a layer is used in one place"
    in_order = [places.pop() for places in of_layers]
    assert in_order == sorted(set(in_order))
    assert uses[embedding_of(model)][0] == 0


def embedding_of(model: PreTrainedModel) -> nn.Parameter:
    return next(model.get_input_embeddings().parameters())


class NotTried(Exception):
    """The order was taken from the registration."""


@pytest.mark.parametrize(
    "family",
    [family for family in FAMILIES if "moe" not in family and family != "mixtral"],
)
def test_a_forward_is_tried_for_every_family_without_experts(monkeypatch, family):
    """Experts that are multiplied in groups need bfloat16 for that; these models' order is that of registration."""

    def refuse(model: nn.Module) -> None:
        raise NotTried

    monkeypatch.setattr(order, "uses_by_registration", refuse)
    assert uses_in_forward(build_meta_model(tiny_config(family)))


def test_the_order_is_that_of_use_and_not_of_registration():
    """OPT registers the last norm before the layers."""
    model = build_meta_model(tiny_config("opt"))
    names = [name for name, _ in model.named_parameters()]
    norm, layer = "model.decoder.final_layer_norm.weight", "model.decoder.layers.2.fc1.weight"
    assert names.index(norm) < names.index(layer)
    registered, used = uses_by_registration(model), uses_in_forward(model)
    assert registered[model.get_parameter(norm)] < registered[model.get_parameter(layer)]
    assert used[model.get_parameter(norm)] > used[model.get_parameter(layer)]


def test_by_registration_every_block_has_a_place():
    model = nn.ModuleDict(
        {"in": nn.Linear(2, 2), "layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "out": nn.Linear(2, 2)}
    )
    uses = uses_by_registration(model)
    found = {name: uses[parameter] for name, parameter in model.named_parameters()}
    assert found == {
        **dict.fromkeys(("in.weight", "in.bias"), (0, 0)),
        **dict.fromkeys(("layers.0.weight", "layers.0.bias"), (1, 1)),
        **dict.fromkeys(("layers.1.weight", "layers.1.bias"), (2, 2)),
        **dict.fromkeys(("out.weight", "out.bias"), (3, 3)),
    }


def test_by_registration_a_tied_parameter_is_used_under_each_of_its_names():
    model = build_meta_model(tiny_config("llama", tied=True))
    uses = uses_by_registration(model)
    assert uses[embedding_of(model)] == (0, 5)


def test_what_a_model_decides_by_values_cannot_be_tried_and_counts_as_registered():
    model = build_meta_model(tiny_config("llama"))

    def look_at_values(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.sum() > 0:
            raise AssertionError("there are no values on the meta device")

    model.get_submodule("model.norm").register_forward_hook(look_at_values)
    assert uses_in_forward(model) == uses_by_registration(model)


def test_a_parameter_that_the_trial_leaves_out_makes_all_count_as_registered():
    model = build_meta_model(tiny_config("opt"))
    model.get_submodule("model.decoder").add_module("never", nn.Linear(2, 2, device="meta"))
    uses = uses_in_forward(model)
    assert uses == uses_by_registration(model)
    assert set(uses) == set(model.parameters())


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_the_trial_leaves_no_trace(family):
    model = build_meta_model(tiny_config(family))
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    state = torch.get_rng_state()
    uses_in_forward(model)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta and parameter.grad is None for parameter in model.parameters())


def test_models_that_borrow_parameters_of_modules_they_do_not_call_are_seen():
    """A head that multiplies by the embedding's matrix by itself."""
    model = build_meta_model(tiny_config("llama"))

    class Borrowing(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden @ embedding_of(model).T

    model.set_submodule("lm_head", Borrowing())
    assert uses_in_forward(model)[embedding_of(model)] == (0, 5)
