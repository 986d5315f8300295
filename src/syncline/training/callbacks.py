"""What may watch a training run, and steer it: callbacks, their events, and the state they are shown.

Every rank fires the same events in the same order, each with callbacks of its own. A callback that *reports* acts on
the main rank only (`state.is_main_rank`). A callback that *decides* (sets a field of `TrainControl`) must decide the
same on every rank, or the ranks part ways and wait for each other. It may use what is equal on all ranks: the
`Evaluation`, and the step, loss and gradient norm of `StepMetrics`; never times, memory or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.errors import UserError
from syncline.reports.metrics import StepMetrics


@dataclass(frozen=True)
class Evaluation:
    """The outcome of one pass over the validation data, equal on all ranks."""

    loss: float
    """Mean token loss over all valid tokens."""
    tokens: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """`exp(loss)`; infinite where that overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


@dataclass
class TrainState:
    """Where the run stands. The trainer writes it, callbacks read it."""

    max_steps: int
    is_main_rank: bool
    step: int = 0
    """Optimizer steps completed."""
    epoch: float = 0.0
    """Passes over the training data completed, with the fraction of the current one."""
    tokens_seen: int = 0
    """Valid tokens trained on, over all ranks."""
    best_metric: float | None = None
    """The lowest evaluation loss so far."""
    first_record: StepMetrics | None = None
    """The metrics of the first step of this run."""
    last_record: StepMetrics | None = None
    """The latest metrics known; they may be one step behind `step`."""


@dataclass
class TrainControl:
    """What callbacks ask of the trainer, which looks after every step, does it, and resets all but `should_stop`."""

    should_stop: bool = False
    should_evaluate: bool = False


class Callback:
    """Something that follows a run. Override the events of interest; the others do nothing.

    An event may bring details as keyword arguments; overrides take `**details` so that more may come.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        unknown = [name for name in vars(cls) if name.startswith("on_") and name not in EVENTS]
        if unknown:
            raise TypeError(f"{cls.__name__}.{unknown[0]} is not an event; the events are {', '.join(EVENTS)}")

    def on_init_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """Model, data and optimizer are ready."""

    def on_train_begin(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """The loop starts; `state.step` is not 0 when the run is resumed."""

    def on_train_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """The loop has ended as it should, and every record was logged."""

    def on_epoch_begin(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """A pass over the training data starts."""

    def on_epoch_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """A pass over the training data is complete."""

    def on_step_begin(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """An optimizer step starts, before its first micro-batch."""

    def on_forward_begin(
        self, state: TrainState, control: TrainControl, *, stage: int, micro_batch: int, **details: Any
    ) -> None:
        """The forward of a micro-batch through one of this rank's stages starts; what it needs is there."""

    def on_forward_end(
        self, state: TrainState, control: TrainControl, *, stage: int, micro_batch: int, **details: Any
    ) -> None:
        """That forward is done; on a GPU, queued."""

    def on_backward_begin(
        self, state: TrainState, control: TrainControl, *, stage: int, micro_batch: int, **details: Any
    ) -> None:
        """The backward of a micro-batch through one of this rank's stages starts."""

    def on_backward_end(
        self, state: TrainState, control: TrainControl, *, stage: int, micro_batch: int, **details: Any
    ) -> None:
        """Its weights' gradients are there too; under halved backwards other computations may have come in between."""

    def on_bubble(
        self, state: TrainState, control: TrainControl, *, index: int, capacity: float, **details: Any
    ) -> None:
        """This rank of a pipeline has nothing to do, for as long as `capacity` forwards through a stage take.

        `index` counts the rank's bubbles in this step. Whatever takes longer here delays the ranks that wait for this
        one.
        """

    def on_substep_end(self, state: TrainState, control: TrainControl, *, micro_batch: int, **details: Any) -> None:
        """The backward of one micro-batch of the step is done on this rank."""

    def on_optimizer_step(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """The parameters were updated; not called for a step that was skipped."""

    def on_step_end(self, state: TrainState, control: TrainControl, **details: Any) -> None:
        """An optimizer step is complete and `state.step` counts it."""

    def on_evaluate(self, state: TrainState, control: TrainControl, *, evaluation: Evaluation, **details: Any) -> None:
        """The validation data was evaluated."""

    def on_predict(self, state: TrainState, control: TrainControl, *, text: str, **details: Any) -> None:
        """A sample was generated."""

    def on_log(self, state: TrainState, control: TrainControl, *, record: StepMetrics, **details: Any) -> None:
        """The metrics of `record.step` are known: once per optimizer step, in order, possibly one step late."""

    def on_save(self, state: TrainState, control: TrainControl, *, path: Path, **details: Any) -> None:
        """A checkpoint was written."""

    def on_export(self, state: TrainState, control: TrainControl, *, path: Path, **details: Any) -> None:
        """The model was written as a Hugging Face folder."""

    def on_exception(self, state: TrainState, control: TrainControl, *, error: BaseException, **details: Any) -> None:
        """The loop ends by `error`, which is raised again afterwards. Other ranks may be gone: do not communicate."""


EVENTS = tuple(name for name in vars(Callback) if name.startswith("on_"))
"""The name of every event: the methods of `Callback`."""


class CallbackError(RuntimeError):
    """A callback failed in an event; the cause is its own exception."""

    def __init__(self, callback: Callback, event: str, error: Exception) -> None:
        self.callback = callback
        self.event = event
        super().__init__(f"{type(callback).__name__}.{event} failed: {type(error).__name__}: {error}")


class CallbackList(Callback):
    """A callback that passes every event on to its members, in order.

    A member's exception ends the dispatch as `CallbackError`; a `UserError` passes as it is.
    """

    def __init__(self, members: Iterable[Callback]) -> None:
        self.members = tuple(members)


def _forward(event: str) -> Callable[..., None]:
    def forward(self: CallbackList, state: TrainState, control: TrainControl, **details: Any) -> None:
        for member in self.members:
            try:
                getattr(member, event)(state, control, **details)
            except UserError:
                raise
            except Exception as error:
                raise CallbackError(member, event, error) from error

    return forward


for _event in EVENTS:
    setattr(CallbackList, _event, _forward(_event))


class EarlyStopping(Callback):
    """Stops the run once `patience` evaluations in a row have not improved the best loss by more than `threshold`.

    It decides by the evaluation loss, which is equal on all ranks, so all ranks stop at the same step.
    """

    def __init__(self, patience: int, threshold: float = 0.0) -> None:
        if patience < 1:
            raise UserError(
                f"early_stopping_patience {patience}", "it counts evaluations without progress", "Give 1 or more."
            )
        if not threshold >= 0:
            raise UserError(
                f"early_stopping_threshold {threshold}",
                "it is the least decrease of the loss that counts as progress",
                "Give 0 or more.",
            )
        self.patience = patience
        self.threshold = threshold
        self.best = math.inf
        self.evaluations_without_progress = 0

    def on_evaluate(self, state: TrainState, control: TrainControl, *, evaluation: Evaluation, **details: Any) -> None:
        if evaluation.loss < self.best - self.threshold:
            self.best = evaluation.loss
            self.evaluations_without_progress = 0
            return
        self.evaluations_without_progress += 1
        if self.evaluations_without_progress >= self.patience:
            control.should_stop = True
