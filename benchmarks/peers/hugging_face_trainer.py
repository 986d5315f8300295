"""The Hugging Face Trainer in plain data parallelism, its own loop, loss and logging included.

The loop runs in a thread of its own and is stopped at the beginning of every step until the step is asked for.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from threading import Semaphore, Thread
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from against_ddp import ACCUMULATION, REFERENCE
from ranks import RANKS
from syncline.data.batch import MicroBatch
from trainers import LEARNING_RATE, MAX_GRADIENT_NORM, SEED, Trainer, build_model

ENDLESS = 10**6
"""Steps."""


def start(rank: int) -> Trainer:
    return TrainerInSteps()


class TrainerInSteps:
    def __init__(self) -> None:
        self._gate = Gate()
        self._trainer = HuggingFaceTrainer(
            model=build_model(REFERENCE), args=_arguments(), train_dataset=Samples(), callbacks=[self._gate]
        )
        self._trainer.remove_callback(PrinterCallback)
        self._error: BaseException | None = None
        Thread(target=self._train, daemon=True).start()
        self._wait()

    def step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The Trainer reads the same samples from its data set."""
        self._gate.opened.release()
        self._wait()

    def loss(self) -> float:
        return self._gate.loss

    def _train(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
        finally:
            self._gate.reached.release()

    def _wait(self) -> None:
        self._gate.reached.acquire()
        if self._error is not None:
            raise self._error


class Gate(TrainerCallback):
    """Holds the loop before every step, when the samples of the step are already there."""

    def __init__(self) -> None:
        self.reached = Semaphore(0)
        self.opened = Semaphore(0)
        self.loss = float("nan")
        """As logged: the mean over all ranks."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.reached.release()
        self.opened.acquire()

    def on_log(self, *_: Any, **given: Any) -> None:
        self.loss = given["logs"]["loss"]


class Samples(Dataset[dict[str, Tensor]]):
    """One step's samples, again and again, in the order in which the Trainer deals micro-batches to the ranks."""

    def __init__(self) -> None:
        of_ranks = [REFERENCE.micro_batches(rank, ACCUMULATION) for rank in range(RANKS)]
        self._dealt = [micro_batch for dealt in zip(*of_ranks, strict=True) for micro_batch in dealt]

    def __len__(self) -> int:
        return ENDLESS * REFERENCE.rows * len(self._dealt)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        micro_batch, row = divmod(index, REFERENCE.rows)
        dealt = self._dealt[micro_batch % len(self._dealt)]
        labels = dealt.labels[row]
        # The loss takes labels that are shifted already under this name, and is computed only where labels are.
        return {"input_ids": dealt.input_ids[row], "labels": labels, "shift_labels": labels}


def _arguments() -> TrainingArguments:
    return TrainingArguments(
        output_dir=tempfile.mkdtemp(prefix="syncline-benchmark-"),
        use_cpu=True,
        ddp_backend="gloo",
        ddp_bucket_cap_mb=int(REFERENCE.bucket_mebibytes),
        ddp_find_unused_parameters=False,
        per_device_train_batch_size=REFERENCE.rows,
        gradient_accumulation_steps=ACCUMULATION,
        max_steps=ENDLESS,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        optim="adamw_torch_fused",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=MAX_GRADIENT_NORM,
        seed=SEED,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
