import pytest
import torch
from transformers import AutoModelForCausalLM

from syncline.errors import UserError
from syncline.modeling.load import build_meta_model
from syncline.modeling.materialise import materialise
from tests.modeling.families import FAMILIES, SPLIT_FAMILIES, tiny_config, tiny_model, tiny_stages


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_the_first_values_do_not_depend_on_the_split(family, tied):
    config = tiny_config(family, tied=tied)
    whole = tiny_model(config, seed=7, dtype=torch.float32)
    values = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    seen = set()
    for stages in (2, 3):
        for stage in tiny_stages(config, stages, seed=7, dtype=torch.float32):
            own = stage.parameters_by_name() | dict(stage.model.named_buffers())
            for name, tensor in own.items():
                assert torch.equal(tensor, values[name]), name
            seen |= own.keys()
    assert seen == values.keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_distributed_as_transformers_draws_them(family):
    config = tiny_config(family)
    torch.manual_seed(0)
    expected = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = tiny_model(config, dtype=torch.float32)
    expected_buffers = dict(expected.named_buffers())
    assert expected_buffers.keys() == dict(found.named_buffers()).keys()
    for name, buffer in found.named_buffers():
        assert buffer.dtype == expected_buffers[name].dtype
        assert torch.equal(buffer, expected_buffers[name]), name
    for name, parameter in expected.named_parameters():
        ours = found.get_parameter(name)
        assert ours.dtype == torch.float32
        assert ours.shape == parameter.shape
        if parameter.std(correction=0) == 0:
            assert torch.equal(ours, parameter), name
        else:
            # Five standard errors of both estimates.
            tolerance = 5 * (2 * 2 / parameter.numel()) ** 0.5
            assert ours.std().item() == pytest.approx(parameter.std().item(), rel=tolerance), name
            assert abs(ours.mean().item()) < 5 * parameter.std().item() / parameter.numel() ** 0.5, name


def test_values_depend_on_seed_and_name():
    config = tiny_config("llama")
    first, again, other = (tiny_model(config, seed=seed).state_dict() for seed in (1, 1, 2))
    name = "model.layers.{}.self_attn.q_proj.weight"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first[name.format(0)], other[name.format(0)])
    assert not torch.equal(first[name.format(0)], first[name.format(1)])


def test_values_are_the_same_in_every_dtype_but_for_rounding():
    config = tiny_config("gpt2")
    exact = tiny_model(config, dtype=torch.float32).state_dict()
    for dtype in (torch.float64, torch.bfloat16):
        rounded = tiny_model(config, dtype=dtype)
        assert {parameter.dtype for parameter in rounded.parameters()} == {dtype}
        for name, parameter in rounded.named_parameters():
            assert torch.equal(parameter, exact[name].to(dtype)), name


def test_nothing_stays_on_the_meta_device_and_tied_parameters_stay_one():
    model = tiny_model(tiny_config("gemma3_text", tied=True))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.lm_head.weight, "_is_hf_initialized")


def test_parameters_that_a_model_creates_off_the_meta_device_are_drawn_as_well():
    first, again = (tiny_model(tiny_config("diffllama")).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_the_global_random_state_is_left_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    tiny_model(tiny_config("llama"))
    assert torch.equal(torch.rand(2), expected)


def test_frozen_stays_frozen():
    model = build_meta_model(tiny_config("llama"))
    model.model.norm.weight.requires_grad_(False)
    materialise(model, dtype=torch.float32, device="cpu", seed=0)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == [
        "model.norm.weight"
    ]


def test_a_parameter_without_rule_is_refused_unless_it_is_to_be_loaded():
    def meta_model():
        model = build_meta_model(tiny_config("llama"))
        model.model.norm.extra = torch.nn.Parameter(torch.empty(3, device="meta"))
        return model

    with pytest.raises(UserError, match=r"model\.norm\.extra"):
        materialise(meta_model(), dtype=torch.float32, device="cpu", seed=0)
    model = meta_model()
    materialise(model, dtype=torch.float32, device="cpu", seed=0, random_weights=False)
    assert torch.isfinite(model.model.rotary_emb.inv_freq).all()
