"""Proof, on a tiny model of the same kind, of what is asked of a model: that cut into stages it computes what the whole
one computes, and that it keeps the documents of a row apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from syncline.data.batch import MicroBatch
from syncline.errors import UserError
from syncline.modeling.kernels.loss import token_loss_sum
from syncline.modeling.load import build_meta_model, portable_attention
from syncline.modeling.materialise import materialise
from syncline.modeling.pipeline.split import SplitPlan, cut, plan_split
from syncline.modeling.pipeline.stage import Stage
from syncline.modeling.shrink import VOCABULARY, shrink_config

_TOLERANCE = 1e-10
_LEAK_TOLERANCE = 1e-5
"""Rounding: routers, for example, group the tokens of several rows for one product."""
_FIRST_DOCUMENT, _SECOND_DOCUMENT = 15, 9
"""Tokens of the documents that share a row."""
_SEED = 0

Gradients = dict[str, Tensor]


def check_split(config: PreTrainedConfig, stages: int, attn_implementation: str | None = None) -> None:
    """Raise `UserError` unless the kind of model that `config` describes can be cut into `stages`.

    A shrunk model runs forward and backward in float64 on the CPU, whole and cut, from separately drawn weights. Loss
    and every gradient must agree to 1e-10 of the largest. One stage needs no proof. Attention that only computes on a
    GPU is replaced by `eager`.
    """
    if stages == 1:
        return
    attention = portable_attention(attn_implementation)
    plan_split(build_meta_model(config, attention), stages)
    meta = build_meta_model(shrink_config(config, layers=stages + 1), attention)
    plan = plan_split(meta, stages)
    micro_batch = _random_micro_batch()
    try:
        parts = [cut(meta, plan, stage).eval() for stage in range(stages)]
        whole = cut(meta, SplitPlan(1), 0).eval()
        for part in (whole, *parts):
            materialise(part, dtype=torch.float64, device="cpu", seed=_SEED)
        expected = _run_whole(whole.model, micro_batch)
        found = run_chained(parts, micro_batch)
    except Exception as error:
        # Whatever a model trips over when parts of it are gone is a reason against cutting it.
        raise _refusal(meta, stages, f"fails: {type(error).__name__}: {error}") from error
    difference = _difference(expected, found)
    if difference is not None:
        raise _refusal(meta, stages, f"computes something else: {difference}")


def check_isolation(config: PreTrainedConfig, attn_implementation: str | None, rows: int) -> None:
    """Raise `UserError` unless the kind of model that `config` describes keeps the documents of a row apart.

    In a shrunk model with random weights, in float32 on the CPU, other tokens in a row's first document must leave the
    second one's logits as they are, to 1e-5 of the largest. Attention that only computes on a GPU is replaced by
    `eager`, and known to keep documents apart or not: transformers' flash attention does only with `rows`, the number
    of rows in a micro-batch, equal to 1.
    """
    if attn_implementation is not None and "flash" in attn_implementation and rows > 1:
        raise UserError(
            f"isolate_documents with attn_implementation {attn_implementation} and {rows} rows in a micro-batch",
            "transformers' flash attention keeps documents apart only where a micro-batch is one row",
            "Write per_device_train_batch_size 1 and per_device_eval_batch_size 1, or attn_implementation sdpa",
        )
    try:
        reaches = _reaches_across(config, portable_attention(attn_implementation))
    except Exception as error:
        # As above: whatever the trial trips over is a reason against it.
        raise _isolation_refusal(config, f"trying it fails: {type(error).__name__}: {error}") from error
    if reaches:
        raise _isolation_refusal(config, "what it computes for a document depends on those before it in the row")


def run_chained(stages: Sequence[Stage], micro_batch: MicroBatch) -> tuple[Tensor, Gradients]:
    """Forward and backward through all stages of a model, one after the other in this process.

    Returns the sum of the token losses and the gradients by global name; those of copies tied across stages are summed
    under the first copy's name. A parameter without gradient is left out.
    """
    passes: list[tuple[Tensor | None, Tensor]] = []
    for stage in stages:
        received = passes[-1][1].detach().requires_grad_() if passes else None
        passes.append((received, stage(micro_batch, received)))
    gradient = None
    for received, output in reversed(passes):
        output.backward(gradient)
        gradient = received.grad if received is not None else None
    gradients: Gradients = {}
    for stage in stages:
        for name, own in _gradients_of(stage.model).items():
            first = stage.tied_sources[name].name if name in stage.tied_sources else name
            gradients[first] = gradients[first] + own if first in gradients else own
    return passes[-1][1].detach(), gradients


def _reaches_across(config: PreTrainedConfig, attention: str | None) -> bool:
    """Whether the second document's logits depend on the first document."""
    kinds = set(getattr(config.get_text_config(), "layer_types", None) or ())
    meta = build_meta_model(shrink_config(config, layers=max(2, len(kinds))), attention)
    stage = cut(meta, SplitPlan(1), 0).eval()
    materialise(stage, dtype=torch.float32, device="cpu", seed=_SEED)
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in stage.parameters():
            # Projections that start at zero would hide what reaches across.
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
        first, second = _FIRST_DOCUMENT, _SECOND_DOCUMENT
        tokens = torch.randint(0, VOCABULARY, (2, first + second), generator=generator)
        tokens[1, first:] = tokens[0, first:]
        positions = torch.cat([torch.arange(first), torch.arange(second)]).expand(2, -1)
        one, other = stage.logits(MicroBatch(tokens, tokens, positions))[:, first:]
    # Written so that not-a-number reaches across.
    return not (one - other).abs().max() <= _LEAK_TOLERANCE * one.abs().max()


def _run_whole(model: PreTrainedModel, micro_batch: MicroBatch) -> tuple[Tensor, Gradients]:
    logits = model(input_ids=micro_batch.input_ids, position_ids=micro_batch.position_ids).logits
    loss = token_loss_sum(logits, micro_batch.labels)
    loss.backward()
    return loss.detach(), _gradients_of(model)


def _random_micro_batch() -> MicroBatch:
    """One row is one document, the other two: so masks between documents are tried as well."""
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(0, VOCABULARY, (2, 25), generator=generator)
    documents = torch.cat([torch.arange(_FIRST_DOCUMENT), torch.arange(_SECOND_DOCUMENT)])
    positions = torch.stack([torch.arange(24), documents])
    return MicroBatch(tokens[:, :-1], tokens[:, 1:].contiguous(), positions)


def _gradients_of(model: PreTrainedModel) -> Gradients:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _difference(expected: tuple[Tensor, Gradients], found: tuple[Tensor, Gradients]) -> str | None:
    """What differs, in words; None when nothing does."""
    (expected_loss, expected_gradients), (found_loss, found_gradients) = expected, found
    # Both comparisons are written so that not-a-number differs.
    if not (found_loss - expected_loss).abs() <= _TOLERANCE * expected_loss:
        return f"the loss is {found_loss:.12g} instead of {expected_loss:.12g}"
    if expected_gradients.keys() != found_gradients.keys():
        names = expected_gradients.keys() ^ found_gradients.keys()
        return f"only one of the two has a gradient for {min(names)}"
    scale = max(gradient.abs().max() for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        if not (found_gradients[name] - gradient).abs().max() <= _TOLERANCE * scale:
            return f"the gradient of {name} differs"
    return None


def _refusal(model: PreTrainedModel, stages: int, wrong: str) -> UserError:
    return UserError(
        f"{stages} pipeline stages with {type(model).__name__}",
        f"a tiny copy of the model, cut into stages, {wrong}",
        "Write pipeline_parallel_degree 1 (data parallelism works with every model)",
    )


def _isolation_refusal(config: PreTrainedConfig, wrong: str) -> UserError:
    return UserError(
        f"isolate_documents with model type {config.model_type!r}",
        wrong,
        "Write isolate_documents: false, or use a model whose attention stays inside a document, such as llama",
    )
