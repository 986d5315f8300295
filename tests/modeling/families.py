"""The model families that are tried, each as a tiny model."""

import torch
from transformers import PreTrainedConfig

from syncline.data.batch import IGNORED_LABEL, MicroBatch
from syncline.modeling.load import build_meta_model, resolve_config
from syncline.modeling.materialise import materialise
from syncline.modeling.pipeline.split import cut, plan_split
from syncline.modeling.shrink import VOCABULARY, shrink_config

SPLIT_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "phi", "olmo2", "gpt_neox"),
    *("starcoder2", "granite", "cohere", "glm4", "mixtral", "qwen3_moe"),
)
FAMILIES = (*SPLIT_FAMILIES, "gpt2")


def tiny_config(family: str, layers: int = 3, tied: bool = False, **values) -> PreTrainedConfig:
    return shrink_config(resolve_config(None, {"model_type": family, "tie_word_embeddings": tied, **values}), layers)


def tiny_model(config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float64):
    model = build_meta_model(config)
    materialise(model, dtype=dtype, device="cpu", seed=seed)
    return model


def tiny_stages(config: PreTrainedConfig, stages: int, seed: int = 0, dtype: torch.dtype = torch.float64):
    meta = build_meta_model(config)
    plan = plan_split(meta, stages)
    parts = [cut(meta, plan, stage) for stage in range(stages)]
    for part in parts:
        materialise(part, dtype=dtype, device="cpu", seed=seed)
    return parts


def random_micro_batch(seed: int = 0) -> MicroBatch:
    """Two rows of 20 tokens; the second holds two documents, and some labels are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (2, 21), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :3] = IGNORED_LABEL
    positions = torch.stack([torch.arange(20), torch.cat([torch.arange(12), torch.arange(8)])])
    return MicroBatch(tokens[:, :-1], labels, positions)


def assert_same(found, expected, tolerance: float = 1e-12) -> None:
    """Two pairs of a loss and gradients by name; the tolerance is relative to the largest gradient."""
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=0)
    found_gradients, expected_gradients = found[1], expected[1]
    assert found_gradients.keys() == expected_gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert (found_gradients[name] - gradient).abs().max() <= tolerance * largest, name
