import pytest

from syncline.errors import UserError
from syncline.modeling.check import check_split
from syncline.modeling.load import resolve_config
from syncline.modeling.passthrough import Injector, PassThrough


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe"])
def test_families_that_can_be_cut_pass(family):
    check_split(resolve_config(None, {"model_type": family}), 3)


def test_one_stage_is_never_refused():
    check_split(resolve_config(None, {"model_type": "gpt2"}), 1)


def test_the_true_reason_comes_first():
    with pytest.raises(UserError, match="no pipeline plan"):
        check_split(resolve_config(None, {"model_type": "gpt2"}), 2)
    with pytest.raises(UserError, match="the model has 2 layers"):
        check_split(resolve_config(None, {"model_type": "llama", "num_hidden_layers": 2}), 3)


def test_a_cut_that_computes_something_else_is_refused(monkeypatch):
    monkeypatch.setattr(PassThrough, "forward", lambda self, hidden_states, **_: hidden_states * (1 + 1e-6))
    with pytest.raises(UserError, match="computes something else"):
        check_split(resolve_config(None, {"model_type": "llama"}), 3)


def test_a_cut_that_fails_is_refused(monkeypatch):
    monkeypatch.setattr(Injector, "forward", lambda self, hidden_states, **_: hidden_states.mlp)
    with pytest.raises(UserError, match="fails: AttributeError"):
        check_split(resolve_config(None, {"model_type": "llama"}), 2)
