"""One pipeline stage of an unmodified Hugging Face model."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from syncline.data.batch import MicroBatch
from syncline.modeling.kernels.loss import token_loss_sum
from syncline.modeling.pipeline.passthrough import Injector


@dataclass(frozen=True)
class TiedSource:
    """The first copy of a parameter that this stage holds a later copy of."""

    name: str
    """The first copy's global name."""
    module: nn.Module
    """The module that owns it, on the meta device: how it is initialised."""


class Stage(nn.Module):
    """Stage `index` of `stages`. `model` keeps the whole model's structure and names, but only this stage's parameters.

    `tied_sources` maps the names of parameters whose first copy lives on an earlier stage; `model_names` holds every
    state-dict name of the whole model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        index: int,
        stages: int,
        injector: Injector | None,
        tied_sources: Mapping[str, TiedSource],
        model_names: Collection[str],
    ) -> None:
        super().__init__()
        self.model = model
        self.index = index
        self.is_first = index == 0
        self.is_last = index == stages - 1
        self.accepts_positions = "position_ids" in inspect.signature(model.forward).parameters
        """False for the few models that know no positions: these cannot keep packed documents apart."""
        self.tied_sources = dict(tied_sources)
        self.model_names = frozenset(model_names)
        # In a tuple, so that it is not registered a second time.
        self._injector = (injector,)
        assert (injector is None) == self.is_first

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """This stage's parameters by global name, in registration order; one tied within the stage under its first
        name.
        """
        return dict(self.model.named_parameters())

    def forward(self, micro_batch: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        """Hidden states (batch, sequence, hidden); on the last stage the scalar sum of the token losses, at least
        float32.

        `hidden` is what the previous stage returned, None on the first stage.
        """
        if self.is_last:
            return token_loss_sum(self.logits(micro_batch, hidden), micro_batch.labels, consume_logits=True)
        base = self.model.base_model
        assert isinstance(base, PreTrainedModel)
        return self._run(base, micro_batch, hidden).last_hidden_state

    def logits(self, micro_batch: MicroBatch, hidden: Tensor | None = None) -> Tensor:
        """Logits (batch, sequence, vocabulary) in the model's dtype. On the last stage only; labels are not read."""
        assert self.is_last, "only the last stage has logits"
        return self._run(self.model, micro_batch, hidden).logits

    def _run(self, model: PreTrainedModel, micro_batch: MicroBatch, hidden: Tensor | None) -> Any:
        arguments: dict[str, Tensor | None] = {"attention_mask": micro_batch.attention_mask}
        # Given positions, transformers reads them to find packed documents, and the host waits for the device. What a
        # model counts by itself when it is given none is the plain 0, 1, 2, ...
        if self.accepts_positions and micro_batch.is_packed:
            arguments["position_ids"] = micro_batch.position_ids
        (injector,) = self._injector
        if injector is None:
            return model(input_ids=micro_batch.input_ids, **arguments)
        assert hidden is not None, "a later stage ran without hidden states"
        # Masks and rotary embeddings need the embeddings' shape, dtype and device, not their values: one zero will do.
        placeholder = hidden.new_zeros(()).expand(hidden.shape)
        injector.hidden = hidden
        try:
            return model(inputs_embeds=placeholder, **arguments)
        finally:
            injector.hidden = None
