"""Evaluate a trained model with nothing but transformers, on the validation data of its run.

    python examples/evaluate_exported_model.py OUTPUT_DIR

Loads OUTPUT_DIR/model with `AutoModelForCausalLM.from_pretrained`, computes the mean token loss over the validation
samples that OUTPUT_DIR/config.yaml names, and compares it with the run's own last evaluation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from syncline.arguments import load_arguments
from syncline.training.samples import prepare_samples

TOLERANCE = 1e-4
BATCH = 16


def main(folder: Path) -> int:
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    arguments = load_arguments(folder / "config.yaml")
    validation = prepare_samples(arguments, AutoConfig.from_pretrained(folder / "model")).validation
    assert validation is not None, "the run had no validation data"
    total, tokens = 0.0, 0
    for start in range(0, len(validation), BATCH):
        samples = [validation[index] for index in range(start, min(start + BATCH, len(validation)))]
        input_ids = torch.stack([torch.as_tensor(sample.input_ids) for sample in samples])
        labels = torch.stack([torch.as_tensor(sample.labels) for sample in samples])
        with torch.no_grad():
            logits = model(input_ids=input_ids).logits
        total += functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        tokens += int((labels != -100).sum())
    evaluation = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    difference = abs(total / tokens - evaluation["loss"])
    print(
        f"{folder / 'model'} in transformers: evaluation loss {total / tokens:.6f} on {tokens:,} tokens, "
        f"{difference:.1e} from the run's own"
    )
    return 0 if difference <= TOLERANCE else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1])))
