"""What stands in a pipeline stage's model in place of the modules that other stages own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class PassThrough(nn.Module):
    """Returns its first argument.

    It answers to the plain attributes of the module it replaces: models read some of their layers' (such as
    `attention_type`).
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        own = vars(self)
        own.update((name, value) for name, value in vars(replaced).items() if name not in own)

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        return hidden_states


class Injector(PassThrough):
    """Stands in the first layer's place and returns the hidden states received from the previous stage.

    What the model has computed before its layers is dropped here. So nothing that it does to the embeddings (scaling,
    dropout) can be done a second time, which would happen if the received states were handed to it as embeddings.
    """

    hidden: Tensor | None = None

    def forward(self, hidden_states: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        assert self.hidden is not None, "a later stage ran without hidden states"
        return self.hidden
