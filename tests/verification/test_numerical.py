from __future__ import annotations

from syncline.arguments import arguments_from_mapping
from syncline.verification.numerical import Report, verify_rank

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


def verify_on_rank(rank: int, world_size: int, keys: dict) -> Report:
    import torch

    arguments = arguments_from_mapping({"model_config": LLAMA, "nproc_per_node": world_size, **keys})
    return verify_rank(arguments, rank, torch.device("cpu"))


def test_one(pool):
    for n, keys in [
        (1, {}),
        (2, {}),
        (3, {}),
        (2, {"pipeline_parallel_degree": 2}),
        (4, {"pipeline_parallel_degree": 2, "gradient_accumulation_steps": 5}),
    ]:
        report = pool.run(n, verify_on_rank, keys)[0]
        print(report)
        assert report.passed, report
