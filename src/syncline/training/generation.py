"""A sample of what the model would write, drawn through all stages of the pipeline."""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from syncline.data.batch import IGNORED_LABEL, MicroBatch
from syncline.training.engine import Engine

TEMPERATURE = 0.8


def generate(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt: str,
    tokens: int,
    max_sequence: int,
    seed: int,
    device: torch.device,
) -> str:
    """Draw up to `tokens` tokens that continue `prompt`, and return both as text; all ranks call it together.

    Every token costs a forward over all that precedes it (at most `max_sequence` tokens): this is a glimpse, not a
    serving loop.
    """
    text = tokenizer.encode(prompt, add_special_tokens=False) or [tokenizer.eos_token_id]
    program = engine.prediction_program
    source = program.holder(0, program.last_stage)
    generator = torch.Generator(device).manual_seed(seed)
    with engine.evaluating():
        for _ in range(tokens):
            logits = engine.worker.predict(program, _micro_batch(text[-max_sequence:], device))
            token = torch.zeros(1, dtype=torch.int64, device=device)
            if logits is not None:
                probabilities = torch.softmax(logits[0, -1].float() / TEMPERATURE, dim=-1)
                token = torch.multinomial(probabilities, 1, generator=generator)
            dist.broadcast(token, source)
            text.append(int(token))
            if text[-1] == tokenizer.eos_token_id:
                break
    return str(tokenizer.decode(text, skip_special_tokens=True))


def _micro_batch(tokens: list[int], device: torch.device) -> MicroBatch:
    input_ids = torch.tensor([tokens])
    labels = torch.full_like(input_ids, IGNORED_LABEL)
    return MicroBatch(input_ids, labels, torch.arange(len(tokens)).unsqueeze(0)).to(device)
