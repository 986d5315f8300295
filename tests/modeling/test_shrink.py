import pytest

from syncline.errors import UserError
from syncline.modeling.load import build_meta_model, resolve_config
from syncline.modeling.shrink import shrink_config
from tests.modeling.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_a_default_configuration_becomes_tiny(family):
    config = shrink_config(resolve_config(None, {"model_type": family}), 3)
    model = build_meta_model(config)
    assert config.num_hidden_layers == 3
    assert config.max_position_embeddings >= 128
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        ids = getattr(config, name)
        assert all(0 <= token < config.vocab_size for token in (ids if isinstance(ids, list) else [ids or 0]))


@pytest.mark.parametrize(("heads", "key_value_heads", "expected"), [(32, 32, 4), (32, 16, 2), (24, 8, 1), (8, 1, 1)])
def test_key_value_heads_stay_in_proportion(heads, key_value_heads, expected):
    values = {"model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": key_value_heads}
    config = resolve_config(None, values | {"hidden_size": heads * 16})
    assert shrink_config(config, 2).num_key_value_heads == expected


def test_every_kind_of_layer_is_kept():
    config = resolve_config(None, {"model_type": "gemma3_text"})
    assert config.layer_types[:6] == ["sliding_attention"] * 5 + ["full_attention"]
    assert shrink_config(config, 3).layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert len(shrink_config(config, 40).layer_types) == 40


def test_rotary_factors_fit_the_small_heads():
    factors = {"short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096, **factors}
    config = resolve_config(None, {"model_type": "phi3", "rope_parameters": rope, "max_position_embeddings": 131072})
    assert len(shrink_config(config, 2).rope_parameters["long_factor"]) == 8


def test_what_cannot_be_shrunk_is_one_clear_error():
    config = resolve_config(None, {"model_type": "mamba2"})
    with pytest.raises(UserError, match="no tiny copy"):
        shrink_config(config, 2)
