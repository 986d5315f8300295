"""How combinations are run on real ranks, and what they are compared with: parameters, gradients and bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tools.combinations import keys_of, strategy_of

from syncline.arguments import arguments_from_mapping
from syncline.data.batch import IGNORED_LABEL
from syncline.modeling.load import build_meta_model
from syncline.modeling.materialise import materialise
from syncline.program.actions import Action, ClipGradients, ScaleLoss
from syncline.program.analysis.costs import bytes_sent, gradient_bytes_between_steps
from syncline.program.program import Program
from syncline.program.scales import ONE, Factor
from syncline.runtime.worker import StepResult
from syncline.training.engine import Engine, start_engine
from syncline.training.job import Job, describe_job
from syncline.verification import numerical
from syncline.verification.batches import ROWS, SEQUENCE, GlobalBatch, hard_global_batch
from syncline.verification.double import InFloat64
from tests.groups import reused_groups
from tests.stand_ins import CPU
from tests.verification.mixed import Gradients, summed_gradients, tolerance, whole_batch_gradients

Combination = dict[str, str]

Change = Callable[[int, Sequence[Action]], Sequence[Action]]
"""What becomes of a rank's actions behind the back of all that checks a program."""

LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "vocab_size": 64,
}
PLAIN_TRAINING = {
    "per_device_train_batch_size": ROWS,
    "max_seq_length": SEQUENCE,
    "gradient_bucket_size_MB": 0.004,
    "optim": "sgd",
    "weight_decay": 0.0,
    "max_grad_norm": 0.0,
    "freeze_parameters": [r"layers\.0\.input_layernorm"],
    # Enough for float16 to have something to undo; the gradients of a sum over all tokens still fit.
    "scale_loss": 256,
}
LEARNING_RATES = (0.0, 1.0)
"""Of the two steps of a rounded run: the second one begins where the first one did."""

EXACT_LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}
EXACT_BUCKET_BYTES = 150_000
"""Two buckets to a layer."""


def is_exact(choices: Mapping[str, Any]) -> bool:
    """Whether every number is a float64, so that parameters can be compared after several steps of any optimizer."""
    return choices.get("dtype", "float64") == "float64" and choices.get("wire") != "bfloat16 wire"


def name_of(combination: Combination) -> str:
    return f"[{', '.join(combination.values())}]: {json.dumps(keys_of(combination))}"


def run_all(rank: int, world_size: int, chosen: Sequence[Combination], change: Change | None = None) -> list[list[str]]:
    """What is wrong with each of the combinations, as this rank sees it."""
    runs = [make_run(combination) for combination in chosen]
    references = shared_references(rank, world_size, runs)
    wrong = []
    with reused_groups() as groups:
        for run in runs:
            groups.next_run()
            execute = run_exactly if is_exact(run.combination) else run_rounded
            changed = run if change is None else run.changed(change)
            try:
                wrong.append(execute(changed, references[run.reference_key], rank).wrong)
            except Exception as error:
                raise RuntimeError(f"in {name_of(run.combination)}") from error
    return wrong


def shared_references(rank: int, world_size: int, runs: Sequence[Run]) -> dict[str, Any]:
    """Every reference is computed by one process, each by another, and given to all."""
    distinct = {run.reference_key: run for run in runs}
    own = {
        key: exact_reference(run) if is_exact(run.combination) else rounded_reference(run)
        for key, run in list(distinct.items())[rank::world_size]
    }
    of_all: list[Any] = [None] * world_size
    dist.all_gather_object(of_all, own)
    return {key: reference for found in of_all for key, reference in found.items()}


@dataclass(frozen=True)
class Run:
    """A combination, and its job on a small model."""

    combination: Combination
    job: Job

    @property
    def reference_key(self) -> str:
        """Runs with equal keys have the same reference."""
        of_reference = ("topology", "k", "tying", "tokens", "dtype", "wire", "optimizer", "clipping")
        model = [self.job.config.num_hidden_layers, str(loss_scale_of(self.job))]
        return json.dumps([*(self.combination.get(axis) for axis in of_reference), *model])

    def batch(self, step: int) -> GlobalBatch:
        topology, micro_batches = self.job.strategy.topology, self.job.strategy.micro_batches
        vocabulary = int(self.job.config.vocab_size)
        return self.even(hard_global_batch(self.job.arguments.seed, step, topology.replicas, micro_batches, vocabulary))

    def even(self, batch: GlobalBatch) -> GlobalBatch:
        """With every label in its place, unless token counts shall be uneven."""
        if self.combination["tokens"] == "uneven":
            return batch
        return {
            place: replace(each, labels=torch.where(each.labels == IGNORED_LABEL, each.input_ids, each.labels))
            for place, each in batch.items()
        }

    def changed(self, change: Change) -> Run:
        return replace(self, job=replace(self.job, program=self.job.program.map_ranks(change)))


def make_run(combination: Combination) -> Run:
    keys = keys_of(combination)
    tied = keys.pop("model_config.tie_word_embeddings", False)
    if is_exact(combination):
        arguments = arguments_from_mapping({"model_config": {**EXACT_LLAMA, "tie_word_embeddings": tied}, **keys})
        with mock.patch.object(numerical, "BUCKET_BYTES", EXACT_BUCKET_BYTES):
            return Run(combination, numerical.verification_job(arguments))
    stages = strategy_of({**combination, "dtype": "float32"}).placement.stages
    config = {**LLAMA, "num_hidden_layers": stages + 1, "tie_word_embeddings": tied}
    return Run(combination, describe_job(arguments_from_mapping({"model_config": config, **keys, **PLAIN_TRAINING})))


def loss_scale_of(job: Job) -> Factor:
    """The factor with which the program seeds every backward."""
    scales = {action.scale for actions in job.program.ranks for action in actions if isinstance(action, ScaleLoss)}
    assert len(scales) <= 1
    return next(iter(scales), ONE)


@dataclass
class Findings:
    """What one rank found out about one combination."""

    wrong: list[str] = field(default_factory=list)

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)

    def check_figures(self, program: Program, rank: int, results: Sequence[StepResult], peaks: range) -> None:
        """`peaks` are those of gradient bytes that may be counted."""
        gathered = program.peak_gathered_bytes[rank]
        expected = {"sent": bytes_sent(program, rank), "held": gradient_bytes_between_steps(program, rank)}
        for step, result in enumerate(results):
            counted = {"sent": result.bytes_sent, "held": result.held_gradient_bytes}
            self.check(counted == expected, f"step {step}: bytes {counted}, the program says {expected}")
            peak = result.peak_gradient_bytes
            self.check(peak in peaks, f"step {step}: {peak} bytes at the peak, the program says {peaks}")
            peak = result.peak_gathered_bytes
            self.check(peak == gathered, f"step {step}: {peak} bytes gathered at the peak, the program says {gathered}")


# ---- Exact runs: the parameters after three steps --------------------------------------------------------------------


def run_exactly(run: Run, reference: Any, rank: int) -> Findings:
    """As `syncline verify` does it, and every step's figures with it."""
    results: list[StepResult] = []

    def starting(job: Job, rank: int, device: torch.device) -> Engine:
        engine = start_engine(job, rank, device)
        step = engine.worker.step

        def recorded(*arguments, **keys) -> StepResult:
            results.append(step(*arguments, **keys))
            return results[-1]

        engine.worker.step = recorded  # type: ignore[method-assign]
        return engine

    with instead(
        verification_job=lambda arguments: run.job,
        hard_global_batch=lambda *shape: run.even(hard_global_batch(*shape)),
        reference_run=lambda job, steps: reference,
        start_engine=starting,
    ):
        report = numerical.verify_rank(run.job.arguments, rank, CPU)
    findings = Findings()
    findings.check(report.passed, str(report))
    findings.check(len(results) == numerical.STEPS, f"{len(results)} steps")
    # Parameters that no sample uses hold back the reductions of their bucket and of all behind it.
    program = run.job.program
    most = max(program.peak_gradient_bytes[rank], all_gradient_bytes(program, rank))
    findings.check_figures(program, rank, results, range(program.peak_gradient_bytes[rank], most + 1))
    return findings


@contextmanager
def instead(**functions: Callable[..., Any]) -> Iterator[None]:
    """These stand in for functions that `numerical` uses."""
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(numerical, name, function))
        yield


def exact_reference(run: Run) -> Any:
    with InFloat64():
        steps = [run.batch(step) for step in range(numerical.STEPS)]
        found = numerical.reference_run(run.job, steps)
    return replace(found, parameters={name: p.detach() for name, p in found.parameters.items()})


# ---- Rounded runs: the gradients that the optimizer consumes, and the parameters that it makes of them ---------------


@dataclass(frozen=True)
class RoundedReference:
    """One process's."""

    parameters: Gradients
    """At first, in the dtype of the run."""
    gradients: list[Gradients]
    """At these parameters, of the mean loss over all tokens of each step."""


def rounded_reference(run: Run) -> RoundedReference:
    dtype = getattr(torch, run.job.strategy.parameter_dtype)
    model = whole_model(run.job, dtype)
    parameters = {name: p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    gradients = [rounded_gradients(run, dtype, run.batch(step)) for step in range(len(LEARNING_RATES))]
    return RoundedReference(parameters, gradients)


def rounded_gradients(run: Run, dtype: torch.dtype, batch: GlobalBatch) -> Gradients:
    if dtype in (torch.float64, torch.float32):
        model = whole_model(run.job, torch.float64)
        with InFloat64():
            return whole_batch_gradients(model, batch.values())
    # What 16 bits round depends on the seed of the backward, so it is the program's own.
    scales = quantities(run.job, batch)
    seed = loss_scale_of(run.job).evaluate(scales, 1.0)
    summed = summed_gradients(whole_model(run.job, dtype), batch.values(), seed)
    return {name: gradient.double() / (seed * scales["tokens"]) for name, gradient in summed.items()}


def whole_model(job: Job, dtype: torch.dtype) -> Any:
    model = build_meta_model(job.config)
    materialise(model, dtype=dtype, device="cpu", seed=job.arguments.seed)
    return model.train()


def quantities(job: Job, batch: GlobalBatch) -> dict[str, float]:
    return {
        "loss_scale": job.arguments.scale_loss,
        "tokens": sum(micro_batch.valid_tokens for micro_batch in batch.values()),
        "replicas": job.strategy.topology.replicas,
    }


def run_rounded(run: Run, reference: RoundedReference, rank: int) -> Findings:
    job, findings, results = run.job, Findings(), []
    engine, replica = start_engine(job, rank, CPU), job.strategy.topology.replica(rank)
    for step, learning_rate in enumerate(LEARNING_RATES):
        batch = run.batch(step)

        def observe(action: Action, step=step, batch=batch) -> None:
            if isinstance(action, ClipGradients):
                factor = action.scale.evaluate(quantities(job, batch), 1.0)
                for what, error in gradient_errors(engine, rank, factor, reference.gradients[step]):
                    findings.check(error <= tolerance(job.strategy), f"step {step}: {what} is off by {error:.1e}")

        own = [batch[replica, index] for index in range(job.strategy.micro_batches)]
        results.append(engine.worker.step(own, learning_rate, observe))
        findings.check(not results[-1].skipped, f"step {step} was skipped")
    with engine.worker.parameters.whole():
        for what, error in parameter_errors(engine, reference):
            findings.check(error <= tolerance(job.strategy), f"{what} is off by {error:.1e}")
    peak = least = job.program.peak_gradient_bytes[rank]
    again = [bucket.id for bucket in job.program.buckets(rank) if bucket.last_use > bucket.first_use]
    if job.strategy.parameter_dtype != job.strategy.gradient_dtype:
        # Autograd itself sums the gradients of all uses of a parameter, and hands them over with the last one.
        least -= sum(map(job.program.gradient_bytes, again))
    findings.check_figures(job.program, rank, results, range(least, peak + 1))
    return findings


def gradient_errors(engine: Engine, rank: int, factor: float, expected: Gradients) -> Iterator[tuple[str, float]]:
    """The largest error in what this rank owns of each bucket, relative to the largest gradient of all.

    The buckets' gradients still lack `factor`.
    """
    largest = max(gradient.abs().max() for gradient in expected.values())
    for id, bucket in engine.worker.gradients.buckets.items():
        start, stop = engine.worker.program.owned(rank, id)
        flat = torch.zeros(bucket.bucket.numel, dtype=torch.float64)
        for slot in bucket.bucket.slots:
            flat[slot.offset : slot.offset + slot.numel] = expected[slot.name].flatten()
        if start < stop:
            error = (bucket.consumed.double() * factor - flat[start:stop]).abs().max() / largest
            names = ", ".join(slot.name for slot in bucket.bucket.slots)
            yield f"the gradient of {names}", float(error.nan_to_num(torch.inf))


def parameter_errors(engine: Engine, reference: RoundedReference) -> Iterator[tuple[str, float]]:
    """The largest error of each parameter beyond the rounding of its own dtype, relative to the largest update."""
    (*_, gradients), (*_, learning_rate) = reference.gradients, LEARNING_RATES
    largest = learning_rate * max(gradient.abs().max() for gradient in gradients.values())
    for name, parameter in engine.parameters_by_name().items():
        update = learning_rate * gradients[name].double() if parameter.requires_grad else 0.0
        expected = reference.parameters[name].double() - update
        rounding = torch.finfo(parameter.dtype).eps * expected.abs()
        error = ((parameter.detach().double() - expected).abs() - rounding).max() / largest
        yield f"parameter {name}", float(error.nan_to_num(torch.inf))


def all_gradient_bytes(program: Program, rank: int) -> int:
    return sum(program.storage_bytes(rank, bucket, part) for bucket, part in program.storages(rank))
