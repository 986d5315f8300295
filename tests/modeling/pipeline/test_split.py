import pytest
import torch

from syncline.errors import UserError
from syncline.modeling.load import build_meta_model
from syncline.modeling.pipeline.split import cut, plan_split, specs
from tests.modeling.families import tiny_config


def counts(layers, stages):
    plan = plan_split(build_meta_model(tiny_config("llama", layers=layers)), stages)
    assert [layer for layers in plan.layer_ranges for layer in layers] == list(range(layers))
    return [len(layers) for layers in plan.layer_ranges]


def test_layers_left_over_go_to_the_middle_then_to_the_first_stage():
    assert counts(4, 2) == [2, 2]
    assert counts(5, 2) == [3, 2]
    assert counts(5, 3) == [2, 2, 1]
    assert counts(4, 3) == [1, 2, 1]
    assert counts(6, 4) == [1, 2, 2, 1]
    assert counts(7, 4) == [2, 2, 2, 1]


def test_plan_names_every_part():
    plan = plan_split(build_meta_model(tiny_config("gpt_neox")), 2)
    assert plan.before == ("gpt_neox.embed_in", "gpt_neox.emb_dropout")
    assert plan.layers == "gpt_neox.layers"
    assert plan.after == ("gpt_neox.final_layer_norm", "lm_head")
    assert plan.stage_of("gpt_neox.embed_in.weight") == 0
    assert plan.stage_of("gpt_neox.layers.2.attention.dense.weight") == 1
    assert plan.stage_of("lm_head.weight") == 1
    assert plan.stage_of("gpt_neox.rotary_emb.inv_freq") is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_specs_are_the_parameters_of_the_cut_stages_in_their_order(stages, tied):
    model = build_meta_model(tiny_config("qwen2", tied=tied))
    plan = plan_split(model, stages)
    found = specs(model, plan)
    for stage in range(stages):
        expected = {name: tuple(tensor.shape) for name, tensor in cut(model, plan, stage).parameters_by_name().items()}
        assert [(spec.name, spec.shape) for spec in found if spec.stage == stage] == list(expected.items())
    ties = {spec.name: spec.tied_to for spec in found if spec.tied_to}
    assert ties == ({"lm_head.weight": "model.embed_tokens.weight"} if tied and stages > 1 else {})
    assert {spec.settings for spec in found} == {0}


def test_specs_have_the_rules_of_their_parameters_on_every_stage():
    model = build_meta_model(tiny_config("qwen2", tied=True))
    all_settings = {parameter: 0 if parameter.dim() >= 2 else 1 for parameter in model.parameters()}
    all_settings[model.get_parameter("model.embed_tokens.weight")] = 2
    found = specs(model, plan_split(model, 2), all_settings=all_settings)
    assert {spec.name for spec in found if spec.settings == 1} == {
        name for name, parameter in model.named_parameters() if parameter.dim() < 2
    }
    assert {spec.name for spec in found if spec.settings == 2} == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("stages", [1, 2])
def test_specs_know_their_block_and_when_it_is_used(stages):
    model = build_meta_model(tiny_config("llama"))
    found = {spec.name: spec for spec in specs(model, plan_split(model, stages))}
    uses = [("model.embed_tokens", 0), *((f"model.layers.{layer}", layer + 1) for layer in range(3)), ("lm_head", 5)]
    for block, use in uses:
        of_block = [spec for name, spec in found.items() if name.startswith(f"{block}.")]
        assert of_block
        assert {(spec.block, spec.first_use, spec.last_use) for spec in of_block} == {(block, use, use)}


def test_specs_take_the_uses_that_they_are_given():
    model = build_meta_model(tiny_config("llama"))
    uses = {parameter: (place, place + 1) for place, parameter in enumerate(model.parameters())}
    found = specs(model, plan_split(model, 1), uses=uses)
    assert [(spec.first_use, spec.last_use) for spec in found] == [(n, n + 1) for n in range(len(found))]


def test_a_tied_parameter_is_used_twice_on_one_stage_and_each_copy_once_on_two():
    model = build_meta_model(tiny_config("llama", tied=True))
    (both,) = (spec for spec in specs(model, plan_split(model, 1)) if "embed" in spec.name)
    assert (both.first_use, both.last_use) == (0, 5)
    copies = [
        spec
        for spec in specs(model, plan_split(model, 2))
        if spec.name in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    assert [(spec.stage, spec.first_use, spec.last_use) for spec in copies] == [(0, 0, 0), (1, 5, 5)]


def test_freeze_takes_regular_expressions_and_both_copies_of_a_tie():
    model = build_meta_model(tiny_config("llama", tied=True))
    plan = plan_split(model, 2)
    frozen = {spec.name for spec in specs(model, plan, [r"layers\.1\..*norm", "lm_head"]) if spec.frozen}
    assert frozen == {
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    with pytest.raises(UserError, match="freeze_parameters 'layer_norm': it matches no parameter"):
        specs(model, plan, ["layer_norm"])
    with pytest.raises(UserError, match=r"freeze_parameters '\(': it is no regular expression"):
        specs(model, plan, ["("])
    with pytest.raises(UserError, match="every parameter of the model is frozen"):
        specs(model, plan, ["norm", "proj", "embed"])


def test_cut_leaves_the_model_as_it_is():
    model = build_meta_model(tiny_config("llama"))
    before = {name: type(module) for name, module in model.named_modules()}
    cut(model, plan_split(model, 2), 1)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_models_without_plan_are_refused_only_for_several_stages():
    model = build_meta_model(tiny_config("gpt2"))
    assert plan_split(model, 1).stages == 1
    with pytest.raises(UserError, match=r"no pipeline plan.*pipeline_parallel_degree 1"):
        plan_split(model, 2)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(
        UserError,
        match=r"the model has 3 layers.*Write a pipeline_parallel_degree, times virtual_pp_degree .*, of 3 or less",
    ):
        plan_split(build_meta_model(tiny_config("llama", layers=3)), 4)


def test_a_parameter_outside_the_plan_is_refused():
    model = build_meta_model(tiny_config("llama"))
    model.model.prompt = torch.nn.Parameter(torch.empty(4, 64, device="meta"))
    with pytest.raises(UserError, match=r"model\.prompt"):
        plan_split(model, 2)


def test_layers_that_share_parameters_across_stages_are_refused():
    model = build_meta_model(tiny_config("llama", layers=4))
    layers = model.model.layers
    layers[3].mlp.up_proj.weight = layers[2].mlp.up_proj.weight
    plan_split(model, 2)
    layers[3].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(UserError, match="shared by layers on several stages"):
        plan_split(model, 2)
