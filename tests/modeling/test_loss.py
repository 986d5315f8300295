import pytest
import torch
from torch.nn import functional

from syncline.modeling import loss as loss_module
from syncline.modeling.batch import IGNORED_LABEL
from syncline.modeling.loss import token_loss_sum


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
