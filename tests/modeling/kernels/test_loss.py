from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from syncline.data.batch import IGNORED_LABEL
from syncline.modeling.kernels import loss as loss_module
from syncline.modeling.kernels.linear import WeightGradients, accumulate_in_products
from syncline.modeling.kernels.loss import token_loss_sum
from tests.modeling.families import FAMILIES, random_micro_batch, tiny_config, tiny_model


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    """Three rows of 11 logits at a time."""
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", {"cpu": 35})


def logits_and_labels(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 5, 11, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (2, 5), generator=generator)
    labels[0, 1] = labels[1, 4] = IGNORED_LABEL
    return logits, labels


def plain(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def value_and_gradient(function, logits, labels, factor=1.0):
    loss = function(logits, labels)
    (gradient,) = torch.autograd.grad(loss * factor, logits)
    return loss.detach(), gradient


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6)])
def test_it_is_the_plain_cross_entropy(dtype, tolerance):
    logits, labels = logits_and_labels(dtype)
    found = value_and_gradient(token_loss_sum, logits, labels, factor=0.37)
    expected = value_and_gradient(plain, logits, labels, factor=0.37)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found[0].dtype == dtype


def test_low_precision_logits_are_summed_in_float32():
    logits, labels = logits_and_labels(torch.bfloat16)
    loss, gradient = value_and_gradient(token_loss_sum, logits, labels)
    expected_loss, expected_gradient = value_and_gradient(plain, logits.detach().float().requires_grad_(), labels)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected_loss)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient, expected_gradient.bfloat16())


def test_gradient_against_finite_differences():
    logits, labels = logits_and_labels()
    assert torch.autograd.gradcheck(token_loss_sum, (logits, labels))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_valid_tokens_all_is_exactly_zero(dtype):
    logits, labels = logits_and_labels(dtype)
    with torch.no_grad():
        logits[0, 0, 0] = torch.inf
    loss, gradient = value_and_gradient(token_loss_sum, logits, torch.full_like(labels, IGNORED_LABEL))
    assert loss.item() == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_graph_can_be_run_twice():
    logits, labels = logits_and_labels()
    loss = token_loss_sum(logits, labels)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_nothing_but_the_logits_is_kept_for_the_backward():
    logits, labels = logits_and_labels()
    kept = set()

    def keep(tensor):
        kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_loss_sum(logits, labels)
    assert kept == {logits.data_ptr(), labels.data_ptr()}


consuming = partial(token_loss_sum, consume_logits=True)


def hidden_and_labels(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, logits_and_labels()[1]


def main_gradient(weight):
    return weight.grad


def head(*, bias=False, accumulating=False, dtype=torch.float64):
    torch.manual_seed(2)
    module = nn.Linear(7, 11, bias=bias, dtype=dtype)
    if accumulating:
        module.weight.grad = torch.zeros_like(module.weight)
        accumulate_in_products(module, WeightGradients(main_gradient), dtype)
    return module


HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "accumulating": {"accumulating": True},
    "accumulating, bias": {"bias": True, "accumulating": True},
}
AFTER = {
    "nothing": lambda logits: logits,
    "scaled": lambda logits: logits * 3.0,
    "divided": lambda logits: logits / 0.3,
    "learned scale": lambda logits: logits * torch.tensor(3.0, dtype=logits.dtype, requires_grad=True),
    "soft-capped": lambda logits: torch.tanh(logits / 2) * 2,
    "cast": lambda logits: logits.to(torch.float32),
    "not contiguous": lambda logits: logits.transpose(0, 1).contiguous().transpose(0, 1),
    "flat": lambda logits: logits.view(1, -1, logits.shape[-1]),
}
KEPT = {
    "tanh": torch.tanh,
    "softmax": lambda logits: logits.softmax(-1),
    "tanh, seen flat": lambda logits: torch.tanh(logits).view(1, -1, logits.shape[-1]),
    "some columns": lambda logits: logits[..., :10],
    "one row": lambda logits: logits[:, :1].expand(logits.shape),
}
"""After which the logits are needed by a backward, or are a part of something else."""


def consumed(module, after):
    """Loss, gradients of hidden states and parameters, and whether the logits have been written over."""
    hidden, labels = hidden_and_labels()
    logits = after(module(hidden))
    before = logits.detach().clone()
    loss = consuming(logits, labels.clamp(max=9))
    loss.backward()
    gradients = [hidden.grad, *(parameter.grad for parameter in module.parameters())]
    return loss.detach(), gradients, not torch.equal(logits, before)


def expected(module, after):
    hidden, labels = hidden_and_labels()
    loss = plain(after(functional.linear(hidden, module.weight, module.bias)), labels.clamp(max=9))
    return loss.detach(), list(torch.autograd.grad(loss, [hidden, *module.parameters()]))


@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("kind", HEADS)
def test_consumed_logits_make_place_for_their_gradient(kind, after):
    module = head(**HEADS[kind])
    *found, written_over = consumed(module, AFTER[after])
    tolerance = 1e-6 if after == "cast" else 1e-12
    torch.testing.assert_close(tuple(found), expected(module, AFTER[after]), rtol=tolerance, atol=tolerance)
    assert written_over is (after != "not contiguous"), "there what was copied for the loss is written over"


@pytest.mark.parametrize("bias", [False, True])
def test_logits_scaled_in_place_give_the_right_gradients(bias):
    module = head(bias=bias)
    *found, _ = consumed(module, lambda logits: logits.mul_(3.0))
    torch.testing.assert_close(tuple(found), expected(module, lambda logits: 3 * logits), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("after", KEPT)
def test_logits_that_their_own_backward_needs_are_kept(after):
    module = head()
    *found, written_over = consumed(module, KEPT[after])
    torch.testing.assert_close(tuple(found), expected(module, KEPT[after]), rtol=1e-12, atol=1e-12)
    assert not written_over


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_lies_where_the_logits_lay(dtype):
    hidden, labels = hidden_and_labels(dtype)
    logits = head(dtype=dtype)(hidden)
    untouched = logits.detach().clone().requires_grad_()
    gradients: list[torch.Tensor] = []
    logits.register_hook(gradients.append)
    consuming(logits, labels).backward()
    assert [gradient.data_ptr() for gradient in gradients] == [logits.data_ptr()]
    assert torch.equal(gradients[0], value_and_gradient(token_loss_sum, untouched, labels)[1])
    assert not gradients[0][0, 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_consumed_infinities_in_ignored_rows_do_no_harm(dtype):
    hidden, labels = hidden_and_labels(dtype)
    logits = head(dtype=dtype)(hidden)
    with torch.no_grad():
        logits.detach()[0, 1] = torch.inf
        logits.detach()[1, 4, 0] = torch.nan
    consuming(logits, labels).backward()
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()
    assert not hidden.grad[0, 1].any()
    assert not hidden.grad[1, 4].any()


def test_logits_that_nothing_has_computed_are_kept():
    logits, labels = logits_and_labels()
    before = logits.detach().clone()
    first, second = (value_and_gradient(consuming, logits, labels) for _ in range(2))
    assert torch.equal(first[1], second[1])
    assert torch.equal(logits, before)


def test_without_consent_logits_are_kept():
    hidden, labels = hidden_and_labels()
    logits = head()(hidden)
    before = logits.detach().clone()
    token_loss_sum(logits, labels).backward()
    assert torch.equal(logits, before)


def test_consumed_logits_have_one_backward():
    hidden, labels = hidden_and_labels()
    loss = consuming(head()(hidden), labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_whoever_else_keeps_consumed_logits_is_told():
    hidden, labels = hidden_and_labels()
    logits = head()(hidden)
    penalty = logits.square().sum()
    consuming(logits, labels).backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


@pytest.mark.parametrize("family", [*FAMILIES, "opt", "bloom", "falcon"])
def test_the_logits_of_every_family_can_be_consumed(family, monkeypatch):
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", {"cpu": 600})
    model = tiny_model(tiny_config(family, layers=1)).eval()
    micro_batch = random_micro_batch()
    kept = []
    for consume in (False, True):
        logits = model(input_ids=micro_batch.input_ids).logits
        before = logits.detach().clone()
        token_loss_sum(logits, micro_batch.labels, consume_logits=consume).backward()
        assert torch.equal(logits, before) is not consume
        kept.append([parameter.grad for parameter in model.parameters()])
        model.zero_grad()
    for found, wanted in zip(*kept, strict=True):
        assert torch.equal(found, wanted) if wanted is not None else found is None
