import pytest
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from syncline.errors import UserError
from syncline.modeling import checks
from syncline.modeling.checks import check_isolation, check_split
from syncline.modeling.load import resolve_config
from syncline.modeling.pipeline.passthrough import Injector, PassThrough
from tests.modeling.families import FAMILIES


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


def test_attention_that_needs_a_gpu_is_tried_as_eager(monkeypatch):
    used = []
    honest = checks.build_meta_model

    def build(config, attn_implementation):
        used.append(attn_implementation)
        return honest(config, attn_implementation)

    monkeypatch.setattr(checks, "build_meta_model", build)
    config = resolve_config(None, {"model_type": "llama"})
    for kernel in ("flash_attention_2", "kernels-community/flash-attn", "flex_attention"):
        check_split(config, 2, kernel)
    assert set(used) == {"eager"}
    used.clear()
    for asked in ("sdpa", "eager", None):
        check_split(config, 2, asked)
    assert used == ["sdpa", "sdpa", "eager", "eager", None, None]


@pytest.mark.parametrize("family", [*FAMILIES, "falcon"])
def test_families_that_isolate_documents_pass(family):
    check_isolation(resolve_config(None, {"model_type": family}), None, rows=2)


@pytest.mark.parametrize(
    ("family", "attention"),
    [("bloom", "eager"), ("opt", None), ("opt", "eager"), ("xglm", None), ("mamba", None), ("jamba", None)],
)
def test_a_model_that_reaches_across_documents_is_refused(family, attention):
    with pytest.raises(UserError, match=rf"'{family}'.*depends on those before it.*isolate_documents: false"):
        check_isolation(resolve_config(None, {"model_type": family}), attention, rows=2)


def test_flash_attention_isolates_documents_in_single_rows_only():
    config = resolve_config(None, {"model_type": "llama"})
    check_isolation(config, "flash_attention_2", rows=1)
    with pytest.raises(UserError, match=r"one row.*per_device_train_batch_size 1"):
        check_isolation(config, "flash_attention_2", rows=2)


def test_a_leak_as_small_as_one_forgotten_mask_is_found(monkeypatch):
    """One layer of several attends across."""
    honest = LlamaDecoderLayer.forward

    def forward(self, hidden_states, *arguments, **keywords):
        if self.self_attn.layer_idx == 1:
            keywords["attention_mask"] = None
        return honest(self, hidden_states, *arguments, **keywords)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", forward)
    with pytest.raises(UserError, match="depends on those before it"):
        check_isolation(resolve_config(None, {"model_type": "llama"}), None, rows=2)


def test_isolation_of_a_model_that_cannot_be_tried_is_refused():
    with pytest.raises(UserError, match=r"trying it fails.*no tiny copy"):
        check_isolation(resolve_config(None, {"model_type": "mamba2"}), None, rows=1)
