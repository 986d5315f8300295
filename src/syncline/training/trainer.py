"""The loop: samples in, steps through the worker, events out."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.arguments import TrainingArguments
from syncline.checkpoint.huggingface import finish_folder, save_stage_weights
from syncline.checkpoint.tokenizer import reloads_alike
from syncline.data.loader import MicroBatchLoader
from syncline.data.prepare import PreparedData
from syncline.data.sampler import GlobalBatchSampler
from syncline.program.actions import (
    ADDING_GRADIENTS,
    COMPUTATIONS,
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Bubble,
    Forward,
)
from syncline.reports.metrics import StepMetrics
from syncline.reports.timeline import TimelineFile
from syncline.runtime.optimization.learning_rate import LearningRateSchedule, ScheduleKind, learning_rate
from syncline.runtime.timing import Phase
from syncline.runtime.worker import StepResult
from syncline.training.callbacks import Callback, CallbackList, EarlyStopping, Evaluation, TrainControl, TrainState
from syncline.training.engine import Engine, start_engine
from syncline.training.evaluation import evaluate
from syncline.training.generation import generate
from syncline.training.job import Job
from syncline.training.progress import ProgressMode, ProgressReport
from syncline.training.run_folder import RunFolder
from syncline.training.trackers import MetricsFile, TensorBoard


@dataclass(frozen=True)
class _Unread:
    """A step whose results may still be on their way from the device."""

    step: int
    began: float
    learning_rate: float
    result: StepResult


_BEGINS: dict[type[Action], str] = {
    Forward: "on_forward_begin",
    Backward: "on_backward_begin",
    BackwardInput: "on_backward_begin",
}
_ENDS: dict[type[Action], str] = {
    Forward: "on_forward_end",
    Backward: "on_backward_end",
    BackwardWeight: "on_backward_end",
}
"""The events of computations."""


class Trainer:
    """Trains a job on this rank; every rank of the job makes one and calls the same methods in the same order."""

    def __init__(
        self, job: Job, data: PreparedData, rank: int, device: torch.device, callbacks: Iterable[Callback] = ()
    ) -> None:
        self.job = job
        self.data = data
        self.rank = rank
        self.device = device
        self.folder = RunFolder.of(job.arguments)
        self.engine: Engine = start_engine(job, rank, device)
        self.timeline = TimelineFile(self.folder.path, rank, job.program.ranks[rank])
        arguments, topology = job.arguments, job.strategy.topology
        replicas, micro_batches = topology.replicas, job.strategy.micro_batches
        size = arguments.per_device_train_batch_size
        self.sampler = GlobalBatchSampler(
            len(data.train), size * micro_batches * replicas, arguments.seed, arguments.shuffle
        )
        self.loader = MicroBatchLoader(
            data.train, self.sampler, size, micro_batches, topology.replica(rank), replicas, device
        )
        total = total_steps(arguments, self.sampler.steps_per_epoch)
        self.schedule = schedule_of(arguments, total)
        self.state = TrainState(max_steps=total, is_main_rank=rank == 0)
        self.control = TrainControl()
        self.callbacks = CallbackList([*_own_callbacks(arguments, self.folder), *callbacks])
        self.applied_updates = 0
        self.last_result: StepResult | None = None
        self._unread: _Unread | None = None
        self._last_evaluation: tuple[int, Evaluation] | None = None
        self.callbacks.on_init_end(self.state, self.control)

    def train(self) -> Evaluation | None:
        """The whole run, with samples and evaluations; the last evaluation, if there is validation data."""
        try:
            self.callbacks.on_train_begin(self.state, self.control)
            self._sample()
            while self.state.step < self.state.max_steps and not self.control.should_stop:
                self._step()
                self._after_step()
            self._read_results()
            evaluation = self.evaluate()
            self._sample()
            self.callbacks.on_train_end(self.state, self.control)
        except BaseException as error:
            self.callbacks.on_exception(self.state, self.control, error=error)
            raise
        return evaluation

    def evaluate(self) -> Evaluation | None:
        """Evaluate on the validation data, unless that was done after the latest step; None without any data."""
        if self.data.validation is None:
            return None
        if self._last_evaluation is not None and self._last_evaluation[0] == self.state.step:
            return self._last_evaluation[1]
        self._read_results()
        size = self.job.arguments.per_device_eval_batch_size
        evaluation = evaluate(
            self.engine, self.data.validation, self.job.strategy.topology, self.rank, size, self.device
        )
        self._last_evaluation = (self.state.step, evaluation)
        best = self.state.best_metric
        self.state.best_metric = evaluation.loss if best is None else min(best, evaluation.loss)
        if self.state.is_main_rank:
            self.folder.write_evaluation(evaluation)
        self.callbacks.on_evaluate(self.state, self.control, evaluation=evaluation)
        return evaluation

    def export(self) -> Path:
        """Write the model as a Hugging Face folder, each stage its share, and return the folder."""
        stages = self.job.strategy.placement.stages
        with self.engine.worker.parameters.whole():
            if self.job.strategy.topology.replica(self.rank) == 0:
                for stage in self.engine.stages:
                    save_stage_weights(self.folder.model, stage, stages)
            dist.barrier()
        if self.rank == 0:
            finish_folder(self.folder.model, self.job.config, self.data.tokenizer, stages)
            self._warn_of_another_tokenizer()
        dist.barrier()
        self.callbacks.on_export(self.state, self.control, path=self.folder.model)
        return self.folder.model

    def write_reports(self) -> None:
        """Write what the run can be read from: its page and, with timers, its trace. What cannot be written is warned
        of: the run itself is done.
        """
        dist.barrier()  # Every rank has written what it writes.
        if self.rank != 0:
            return
        try:
            self.folder.write_reports(self.job.program)
        except (OSError, ValueError) as error:
            print(f"syncline: warning: the run's page cannot be written: {error}", file=sys.stderr)

    def _warn_of_another_tokenizer(self) -> None:
        tokenizer, folder = self.data.tokenizer, self.folder.model
        if tokenizer is not None and not reloads_alike(folder, tokenizer):
            print(
                f"syncline: warning: for model type {self.job.config.model_type} AutoTokenizer does not read the "
                f"tokenizer in {folder} as it was written; use PreTrainedTokenizerFast.from_pretrained there",
                file=sys.stderr,
            )

    # ---- One step --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        step = self.state.step
        began = time.perf_counter()
        if step % self.sampler.steps_per_epoch == 0:
            self.callbacks.on_epoch_begin(self.state, self.control)
        self.callbacks.on_step_begin(self.state, self.control)
        rate = learning_rate(self.schedule, self.applied_updates)
        result = self.engine.worker.step(self.loader.step(step), rate, self._after, self._before)
        self._read_results(ended=began)
        if not result.skipped:
            self.callbacks.on_optimizer_step(self.state, self.control)
        self._unread = _Unread(step + 1, began, rate, result)
        self.applied_updates += not result.skipped
        self.state.step = step + 1
        self.state.epoch = self.state.step / self.sampler.steps_per_epoch
        self.state.tokens_seen += result.tokens
        if self.device.type == "cpu":
            # Results are there. On a device that runs behind the host they are read once the next step is queued.
            self._read_results()
        self.callbacks.on_step_end(self.state, self.control)
        if self.state.step % self.sampler.steps_per_epoch == 0:
            self.callbacks.on_epoch_end(self.state, self.control)

    def _before(self, action: Action) -> None:
        self._tell_of_computation(_BEGINS, action)
        if isinstance(action, Bubble):
            self.callbacks.on_bubble(self.state, self.control, index=action.index, capacity=action.capacity)

    def _after(self, action: Action) -> None:
        self._tell_of_computation(_ENDS, action)
        # The backward through the rank's first stage is the last that a micro-batch comes to.
        if isinstance(action, ADDING_GRADIENTS) and action.stage == self.engine.stages[0].index:
            self.callbacks.on_substep_end(self.state, self.control, micro_batch=action.micro_batch)

    def _tell_of_computation(self, events: Mapping[type[Action], str], action: Action) -> None:
        event = events.get(type(action))
        if event is not None:
            assert isinstance(action, COMPUTATIONS)
            tell = getattr(self.callbacks, event)
            tell(self.state, self.control, stage=action.stage, micro_batch=action.micro_batch)

    def _after_step(self) -> None:
        every = self.job.arguments.eval_steps
        due = every is not None and self.state.step % every == 0 and self.state.step < self.state.max_steps
        if due or self.control.should_evaluate:
            self.evaluate()
        self.control.should_evaluate = False

    def _read_results(self, ended: float | None = None) -> None:
        """Turn the results of the latest step into a record, once they are needed."""
        if self._unread is None:
            return
        unread, self._unread = self._unread, None
        result = unread.result
        loss, norm = result.numbers.values()
        seconds = (time.perf_counter() if ended is None else ended) - unread.began
        phases = result.clock.seconds()
        record = StepMetrics(
            step=unread.step,
            loss=float("nan") if result.tokens == 0 else loss,
            learning_rate=unread.learning_rate,
            grad_norm=norm,
            tokens=result.tokens,
            tokens_per_second=result.tokens / seconds,
            step_seconds=seconds,
            forward_backward_seconds=phases[Phase.FORWARD_BACKWARD],
            reduce_wait_seconds=phases[Phase.REDUCE_WAIT],
            optimizer_seconds=phases[Phase.OPTIMIZER],
            peak_memory_bytes=peak_memory_bytes(self.device),
            gradient_bytes=result.peak_gradient_bytes,
            bytes_sent=result.bytes_sent,
            skipped=result.skipped,
            gradient_bytes_held=result.held_gradient_bytes,
            gathered_bytes=result.peak_gathered_bytes,
            offloaded_bytes=result.peak_offloaded_bytes,
            reductions=result.reductions,
            bytes_sent_by_group=result.bytes_sent_by_group,
            loss_scale=result.loss_scale,
        )
        self.last_result = result
        self.state.first_record = self.state.first_record or record
        self.state.last_record = record
        if result.timer is not None:
            self.timeline.write(unread.step, result.timer.began(), result.timer.times())
        self.callbacks.on_log(self.state, self.control, record=record)

    def _sample(self) -> None:
        arguments = self.job.arguments
        if not arguments.sample_tokens or self.data.tokenizer is None:
            return
        text = generate(
            self.engine,
            self.data.tokenizer,
            prompt=arguments.sample_prompt,
            tokens=arguments.sample_tokens,
            max_sequence=arguments.max_seq_length,
            seed=arguments.seed,
            device=self.device,
        )
        self.callbacks.on_predict(self.state, self.control, text=text)


def total_steps(arguments: TrainingArguments, steps_per_epoch: int) -> int:
    """Optimizer steps of the whole run; a last window of fewer samples is a step too."""
    if arguments.max_steps > 0:
        return arguments.max_steps
    return max(1, math.ceil(arguments.num_train_epochs * steps_per_epoch))


def schedule_of(arguments: TrainingArguments, total: int) -> LearningRateSchedule:
    warmup = arguments.warmup_steps or math.ceil(arguments.warmup_ratio * total)
    return LearningRateSchedule(
        ScheduleKind(arguments.lr_scheduler_type),
        arguments.learning_rate,
        total,
        warmup,
        arguments.min_learning_rate,
        arguments.lr_scheduler_power,
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The device's peak of allocated memory; on the CPU the process's peak of resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _own_callbacks(arguments: TrainingArguments, folder: RunFolder) -> list[Callback]:
    callbacks: list[Callback] = [
        MetricsFile(folder.metrics),
        ProgressReport(PROGRESS_MODES[arguments.progress], arguments.logging_steps),
    ]
    if arguments.report_to == "tensorboard":
        callbacks.append(TensorBoard(folder.tensorboard))
    if arguments.early_stopping_patience is not None:
        callbacks.append(EarlyStopping(arguments.early_stopping_patience))
    return callbacks


PROGRESS_MODES = {
    "auto": ProgressMode.AUTO,
    "rich": ProgressMode.LIVE,
    "plain": ProgressMode.PLAIN,
    "none": ProgressMode.NONE,
}
