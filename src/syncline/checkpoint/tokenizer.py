"""Whether an exported folder gives back the tokenizer that was put in."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

PROBE = 'def read(path: str) -> "text":\n    return open(path).read()  # Grüße, 世界 123'


def reloads_alike(folder: Path | str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether `AutoTokenizer` reads the folder's tokenizer as it was written.

    For some model types (qwen2 among them) transformers prefers the type's own tokenizer class to the one that the
    folder names, and so may give other ids to the same text.
    """
    try:
        again = AutoTokenizer.from_pretrained(folder)
        ids: list[int] = again.encode(PROBE, add_special_tokens=False)
    except Exception:  # Whatever goes wrong in there, the answer is no.
        return False
    return ids == tokenizer.encode(PROBE, add_special_tokens=False)
