import json

import pytest

from syncline.errors import UserError
from syncline.modeling.load import build_meta_model, resolve_config


@pytest.mark.parametrize(
    ("model_config", "message"),
    [
        ({"hidden_size": 64}, "no model_type"),
        ({"model_type": "lama"}, "'lama'.*Did you mean llama"),
        ({"model_type": "llama", "hiden_size": 64}, "'hiden_size'.*Did you mean hidden_size"),
        ({"model_type": "llama", "hidden_size": "64"}, "hidden_size.*expected int"),
        ({"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}, "not a multiple"),
    ],
)
def test_a_wrong_mapping_is_one_clear_error(model_config, message):
    with pytest.raises(UserError, match=message):
        resolve_config(None, model_config)


def test_names_of_other_transformers_versions_are_known():
    config = resolve_config(None, {"model_type": "llama", "rope_theta": 5000.0, "torch_dtype": "bfloat16"})
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert resolve_config(None, {"model_type": "gpt2", "hidden_size": 64}).n_embd == 64


def test_exactly_one_model_must_be_named(tmp_path):
    with pytest.raises(UserError, match="no model"):
        resolve_config(None, None)
    with pytest.raises(UserError, match="each of them names the model"):
        resolve_config(str(tmp_path), {"model_type": "llama"})


def test_a_folder_is_read_and_a_wrong_one_refused(tmp_path):
    with pytest.raises(UserError, match=r"no config\.json"):
        resolve_config(str(tmp_path), None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    assert resolve_config(str(tmp_path), None).hidden_size == 96
    with pytest.raises(UserError, match="it is a file"):
        resolve_config(str(tmp_path / "config.json"), None)
    with pytest.raises(UserError, match="no such folder"):
        resolve_config(str(tmp_path / "missing"), None)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be used"):
        resolve_config(str(tmp_path), None)


def test_the_meta_model_takes_no_memory_and_leaves_the_config_alone():
    config = resolve_config(None, {"model_type": "llama"})
    model = build_meta_model(config)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert model.config.use_cache is False
    assert config.use_cache is True
    assert build_meta_model(config, "eager").config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("model_config", "attention", "message"),
    [
        ({"model_type": "t5"}, None, "no causal language model"),
        ({"model_type": "llama"}, "slow", "slow"),
        ({"model_type": "mixtral", "output_router_logits": True}, None, "load-balancing"),
    ],
)
def test_what_cannot_be_trained_is_refused(model_config, attention, message):
    with pytest.raises(UserError, match=message):
        build_meta_model(resolve_config(None, model_config), attention)
