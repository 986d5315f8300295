"""From the meta device to memory, with random weights that do not depend on how the model is cut.

Every module is initialised by its model's own initialiser under a seed of its own, drawn from the run's seed and the
module's global name. So a layer starts with the same values on whichever stage it lies, and no stage draws for layers
it does not own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import guard_torch_init_functions

from syncline.errors import UserError
from syncline.modeling.pipeline.stage import Stage

Initialise = Callable[[nn.Module], None]


def materialise(
    model: PreTrainedModel | Stage,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    random_weights: bool = True,
) -> None:
    """Give every parameter and buffer of a model on the meta device its memory and first values, in place.

    Parameters become `dtype`; buffers keep the dtype that the model gives them. Weights are drawn on the CPU in
    float32, so they are the same on every device and, but for rounding, in every dtype; this takes 4 bytes per
    parameter of CPU memory meanwhile. Without `random_weights` parameters are left uninitialised, to be loaded. The
    global random state is left as it was.

    Raises `UserError` when transformers does not say how a parameter or buffer is initialised.
    """
    whole = model.model if isinstance(model, Stage) else model
    if dtype == torch.float64:
        # Grouped matrix multiplications, the default for experts, take no float64.
        whole.set_experts_implementation("eager")
    staging = ("cpu", torch.float32) if random_weights else (device, dtype)
    _allocate(whole, *staging)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), guard_torch_init_functions():
        if random_weights:
            drawn = _draw_tied_copies(model, seed) if isinstance(model, Stage) else set()
            _initialise(whole, "", whole._init_weights, seed, drawn)
        else:
            with _kept(whole.parameters()):
                _initialise(whole, "", whole._init_weights, seed, set())
    _refuse_uninitialised(whole, random_weights)
    for parameter in whole.parameters():
        parameter.data = parameter.data.to(device, dtype)
    for module in whole.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _allocate(model: nn.Module, device: torch.device | str, dtype: torch.dtype) -> None:
    """Memory for parameters and meta buffers; tied parameters stay one. Not-a-number marks what has no value yet."""
    real: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter not in real:
                values = torch.full(parameter.shape, torch.nan, dtype=dtype, device=device)
                real[parameter] = nn.Parameter(values, parameter.requires_grad)
            module._parameters[name] = real[parameter]
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                fill = torch.nan if buffer.is_floating_point() else 0
                module._buffers[name] = torch.full(buffer.shape, fill, dtype=buffer.dtype)


def _initialise(module: nn.Module, name: str, initialiser: Initialise, seed: int, drawn: set[nn.Parameter]) -> None:
    """Children first, as transformers does it, for some initialisers of a parent correct its children.

    A parameter in `drawn` is kept when its module comes: so the embedding's initialiser, which is met first, holds
    for a tied head.
    """
    for child_name, child in module.named_children():
        of_child = child._init_weights if isinstance(child, PreTrainedModel) else initialiser
        _initialise(child, f"{name}.{child_name}" if name else child_name, of_child, seed, drawn)
    own = set(module.parameters(recurse=False))
    torch.default_generator.manual_seed(_module_seed(seed, name))
    with _kept(own & drawn):
        initialiser(module)
    drawn |= own


def _draw_tied_copies(stage: Stage, seed: int) -> set[nn.Parameter]:
    """A later copy starts as its first copy does, whose module is initialised here for that alone."""
    parameters = stage.parameters_by_name()
    for name, source in stage.tied_sources.items():
        module_name, _, parameter_name = source.name.rpartition(".")
        module = deepcopy(source.module)
        _allocate(module, "cpu", torch.float32)
        _initialise(module, module_name, _initialiser_of(stage.model, module_name), seed, set())
        parameters[name].copy_(module.get_parameter(parameter_name))
    return {parameters[name] for name in stage.tied_sources}


def _initialiser_of(model: PreTrainedModel, name: str) -> Initialise:
    """The initialiser of the innermost model around module `name`."""
    initialiser = model._init_weights
    module: nn.Module = model
    for part in name.split("."):
        module = module.get_submodule(part)
        if isinstance(module, PreTrainedModel):
            initialiser = module._init_weights
    return initialiser


def _module_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


@contextmanager
def _kept(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Meanwhile transformers' initialisers leave these parameters alone: that is what its flag on them means."""
    flagged = [parameter for parameter in parameters if not hasattr(parameter, "_is_hf_initialized")]
    for parameter in flagged:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    yield
    for parameter in flagged:
        del parameter._is_hf_initialized  # type: ignore[attr-defined]


def _refuse_uninitialised(model: PreTrainedModel, random_weights: bool) -> None:
    to_be_loaded = set() if random_weights else model.state_dict().keys()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name not in to_be_loaded and tensor.is_floating_point() and torch.isnan(tensor).any():
            raise UserError(
                f"{type(model).__name__} with random weights" if random_weights else type(model).__name__,
                f"transformers does not say how {name} is initialised",
                "Start from a folder with weights" if random_weights else "Use another model",
            )
    for module_name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise UserError(
                    type(model).__name__,
                    f"{module_name}.{attribute} is a tensor but neither a parameter nor a buffer",
                    "Use another model",
                )
