"""The options of the optimization itself: batches, steps, optimizer and learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from syncline.arguments.option import option
from syncline.arguments.parameter_groups import parse_parameter_groups

_option = partial(option, "Training")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class BatchArguments:
    """How many samples an optimizer step sees, and how many steps there are."""

    per_device_train_batch_size: int = _option(
        8,
        "Samples in one micro-batch. One optimizer step sees this times gradient_accumulation_steps times the number "
        "of replicas.",
        effect="the size of the activations that stages send each other",
        cost="Activation memory grows with it, and so does the hardware's efficiency.",
        minimum=1,
        aliases=("per_gpu_train_batch_size",),
    )
    per_device_eval_batch_size: int = _option(
        8,
        "Samples in one evaluation micro-batch.",
        cost="Memory against speed; no effect on the result.",
        minimum=1,
        aliases=("per_gpu_eval_batch_size",),
    )
    gradient_accumulation_steps: int = _option(
        1,
        "Micro-batches per optimizer step on each replica: k in every formula.",
        effect="k forwards and k backwards per stage",
        cost="A larger global batch at the activation memory of one micro-batch; a pipeline's bubble shrinks with k.",
        minimum=1,
    )
    max_steps: int = _option(
        -1,
        "Optimizer steps to train. Wins over num_train_epochs.",
        cost="Free.",
        minimum=1,
        unset=-1,
        default_text="from num_train_epochs",
    )
    num_train_epochs: float = _option(
        1.0,
        "Passes over the training data, when max_steps is not given. A part of a pass is allowed.",
        cost="Free.",
        above=0,
    )
    seed: int = _option(
        42,
        "Decides random weights and the order of samples.",
        cost="The same seed gives the same weights and samples under every parallelism.",
        minimum=0,
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class OptimizerArguments:
    """What happens to a reduced gradient."""

    optim: str = _option(
        "adamw",
        "`adamw` (decoupled weight decay), `sgd` (no momentum), `adafactor` or `muon`. muon updates the matrices "
        "inside the layers, a fused projection as one matrix; embeddings, the head, experts stored in one tensor, "
        "biases and norms are updated by adamw with the run's settings. Its steps are scaled to the size of adamw's, "
        "so that learning_rate and weight_decay mean the same. adafactor keeps no momentum; it moves a parameter by "
        "min(learning_rate, 1/sqrt(step)) times the parameter's own root mean square (at least 0.001), so that a "
        "learning_rate near 0.01 is usual.",
        effect="what an OptimizerStep does to its bucket",
        cost="adamw keeps two more numbers per parameter, muon one, adafactor one per row and column, sgd none. adamw "
        "and sgd run fused, one kernel per bucket with scaling and clipping inside; adafactor and muon run matrix by "
        "matrix, after a pass that scales. Both look at whole matrices, so they divide among ranks by tensors only "
        "(sharding: stage1).",
        choices=("adamw", "sgd", "adafactor", "muon"),
        spellings={"adamw_torch": "adamw", "adamw_torch_fused": "adamw"},
    )
    learning_rate: float = _option(5e-5, "The peak learning rate.", cost="Free.", minimum=0)
    lr_scheduler_type: str = _option(
        "linear",
        "How the learning rate falls after warm-up: `linear` or `cosine` to min_learning_rate, `polynomial` with "
        "lr_scheduler_power, or not at all (`constant`, and `constant_with_warmup`).",
        cost="Free. It advances once per applied update.",
        choices=("linear", "cosine", "constant", "constant_with_warmup", "polynomial"),
    )
    warmup_steps: int = _option(
        0, "Steps in which the learning rate rises from 0. Wins over warmup_ratio.", cost="Free.", minimum=0
    )
    warmup_ratio: float = _option(
        0.0, "The share of all steps in which the learning rate rises from 0.", cost="Free.", minimum=0, maximum=1
    )
    min_learning_rate: float = _option(
        0.0, "Where the learning rate ends.", cost="Free.", minimum=0, aliases=("lr_end",)
    )
    lr_scheduler_power: float = _option(
        1.0, "The exponent of the polynomial schedule.", cost="Free.", above=0, aliases=("power",)
    )
    weight_decay: float = _option(
        0.0, "Decoupled decay of matrices; biases and norms do not decay.", cost="Free.", minimum=0
    )
    parameter_groups: tuple[Mapping[str, Any], ...] = _option(
        (),
        "Parameters with settings of their own: a list of mappings such as `{pattern: embed_tokens|lm_head, "
        "learning_rate: 2e-5, weight_decay: 0.0}`. `pattern` is a regular expression, searched in parameter names; the "
        "first entry that finds a parameter decides, a tied one under any of its names. `learning_rate` is the "
        "entry's peak, and follows the run's schedule by the same factor. `weight_decay` applies to all that the "
        "pattern finds, biases and norms included. What an entry leaves out is as in the run.",
        effect="an OptimizerStep updates its bucket group by group",
        cost="Parameters with equal settings are updated together; every other setting is one more part of the fused "
        "call.",
        parse=parse_parameter_groups,
    )
    adam_beta1: float = _option(0.9, "Decay of adamw's first moment.", cost="Free.", minimum=0, below=1)
    adam_beta2: float = _option(0.999, "Decay of adamw's second moment.", cost="Free.", minimum=0, below=1)
    adam_epsilon: float = _option(1e-8, "Added to the root of adamw's second moment.", cost="Free.", minimum=0)
    adafactor_epsilon: float = _option(
        1e-15,
        "The least root of adafactor's second moment, and the least mean of a matrix's second moment. PyTorch's own "
        "default, 1.2e-7 in float32, would end the adaptation of matrices whose gradients are below about 1e-4.",
        cost="Free.",
        minimum=1e-19,
    )
    muon_momentum: float = _option(
        0.95, "Decay of muon's momentum, which looks ahead as Nesterov's does.", cost="Free.", minimum=0, below=1
    )
    max_grad_norm: float = _option(
        1.0,
        "The gradients are scaled down when their global norm is larger. 0: no clipping.",
        effect="one ClipGradients after the last reduction and before the first OptimizerStep",
        cost="No OptimizerStep can start before the last reduction has arrived; one small collective.",
        minimum=0,
    )
