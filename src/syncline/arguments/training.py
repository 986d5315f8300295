"""The options of the optimization itself: batches, steps, optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from syncline.arguments.option import option

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
        "`adamw` (decoupled weight decay) or `sgd` (no momentum). Both run fused, bucket by bucket.",
        effect="what an OptimizerStep does to its bucket",
        cost="adamw keeps two more numbers per parameter; sgd keeps none.",
        choices=("adamw", "sgd"),
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
    adam_beta1: float = _option(0.9, "Decay of adamw's first moment.", cost="Free.", minimum=0, below=1)
    adam_beta2: float = _option(0.999, "Decay of adamw's second moment.", cost="Free.", minimum=0, below=1)
    adam_epsilon: float = _option(1e-8, "Added to the root of adamw's second moment.", cost="Free.", minimum=0)
    max_grad_norm: float = _option(
        1.0,
        "The gradients are scaled down when their global norm is larger. 0: no clipping.",
        effect="one ClipGradients after the last reduction and before the first OptimizerStep",
        cost="No OptimizerStep can start before the last reduction has arrived; one small collective.",
        minimum=0,
    )
