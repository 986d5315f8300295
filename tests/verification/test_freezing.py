import re

import pytest

from syncline.modeling.freezing import frozen_parameters
from syncline.modeling.load import build_meta_model
from syncline.verification.freezing import small_patterns
from syncline.verification.probes import add_probes, is_probe
from tests.modeling.families import tiny_config


def small_model(family: str = "llama", *, layers: int = 3, tied: bool = False):
    model = build_meta_model(tiny_config(family, layers=layers, tied=tied))
    add_probes(model)
    return model


def frozen_names(model, *patterns: str) -> set[str]:
    frozen = frozen_parameters(model, small_patterns(patterns, model))
    return {name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter in frozen}


@pytest.mark.parametrize(
    ("family", "norm"),
    [("llama", "model.layers.0.input_layernorm.weight"), ("gpt2", "transformer.h.0.ln_1.weight")],
)
@pytest.mark.parametrize("patterns", [(), (r"layers\.20\.", "h.77.")])
def test_a_norm_is_frozen_where_nothing_else_would_be(family, norm, patterns):
    assert frozen_names(small_model(family), *patterns) == {norm}


def test_what_the_patterns_find_is_frozen_probes_included():
    model = small_model()
    expected = {name for name, _ in model.named_parameters() if re.search(r"layers\.1\.", name)}
    assert any(map(is_probe, expected))
    assert frozen_names(model, r"layers\.1\.", r"layers\.20\.") == expected


@pytest.mark.parametrize("tied", [False, True])
def test_something_is_trained_where_all_would_be_frozen(tied):
    model = small_model(tied=tied)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    trained = {name for name in names if name.startswith("model.layers.2.")}
    assert frozen_names(model, r"layers\.[0-9]\.", "embed", "norm", "lm_head") == names - trained
    assert frozen_names(model, ".") == names - trained


def test_one_trained_parameter_is_not_enough():
    names = frozen_names(small_model(), r"layers\.", "embed", "lm_head")
    assert "model.embed_tokens.weight" in names
    assert not any(name.startswith("model.layers.2.") for name in names)
