"""The options of a run: where it runs, what it writes, how often it evaluates and how it talks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from syncline.arguments.option import option

_option = partial(option, "Running")


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class RunArguments:
    """The machine, the folder and the terminal."""

    device: str = _option(
        "auto",
        "`cuda` (NCCL), `cpu` (Gloo), or `auto`: cuda where there is a GPU for every local process.",
        effect="the same actions; the collectives run on NCCL or Gloo",
        cost="Free.",
        choices=("auto", "cpu", "cuda"),
        spellings={"gpu": "cuda"},
    )
    distributed_timeout_seconds: int = _option(
        600,
        "How long a collective may wait for another rank before the run fails.",
        cost="Short finds a stuck rank early; long allows for slow starts.",
        minimum=1,
        aliases=("ddp_timeout",),
    )
    output_dir: str = _option(
        "outputs",
        "The folder of the run: config.yaml, metrics.jsonl, program.json and the trained model.",
        cost="The model's size on disk.",
        is_path=True,
    )
    overwrite_output_dir: bool = _option(
        False,
        "An output_dir that holds a run is replaced; without it the run is refused.",
        cost="The older run is lost.",
    )
    logging_steps: int = _option(
        10,
        "A line is printed every so many steps. metrics.jsonl has every step.",
        cost="Free: numbers are read one step late.",
        minimum=1,
    )
    report_to: str = _option(
        "tensorboard",
        "Where metrics go besides metrics.jsonl.",
        cost="An event file in output_dir.",
        choices=("tensorboard", "none"),
    )
    progress: str = _option(
        "auto",
        "`rich` draws a live display, `plain` prints lines, `none` is silent; `auto` is rich on a terminal.",
        cost="Free.",
        choices=("auto", "rich", "plain", "none"),
    )


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class EvaluationArguments:
    """What is measured and kept on the way."""

    eval_steps: int | None = _option(
        None,
        "Evaluate on the validation data every so many steps.",
        cost="Forwards over the whole validation data each time.",
        minimum=1,
        unset=-1,
        default_text="only at the end",
    )
    early_stopping_patience: int | None = _option(
        None,
        "Stop when so many evaluations in a row have not lowered the evaluation loss.",
        cost="Free.",
        minimum=1,
        default_text="never",
    )
    sample_tokens: int = _option(
        0,
        "Generate so many tokens from sample_prompt before and after training. 0: none.",
        cost="One forward per token.",
        minimum=0,
    )
    sample_prompt: str = _option("", "The text that the generated sample continues.", cost="Free.")
    save_strategy: str | None = _option(
        None,
        "`no`: only the trained model is saved, at the end. `steps` and `epoch` arrive with checkpoints.",
        cost="Free.",
        choices=("no", "steps", "epoch"),
        default_text="no",
    )
    save_steps: int | None = _option(
        None,
        "Save a checkpoint every so many steps. Arrives with checkpoints.",
        cost="Time and disk space per checkpoint.",
        minimum=1,
        unset=-1,
    )
    save_total_limit: int | None = _option(
        None, "Keep at most so many checkpoints. Arrives with checkpoints.", cost="Disk space.", minimum=1
    )
    resume_from_checkpoint: str | None = _option(
        None, "A checkpoint to continue from. Arrives with checkpoints.", cost="Reading it."
    )
    load_best_model_at_end: bool = _option(
        False, "Save the checkpoint of the lowest evaluation loss. Arrives with checkpoints.", cost="Reading it."
    )
