"""What a finished run says of itself: above all, what its gradients did."""

from __future__ import annotations

from syncline.callbacks import Evaluation, TrainState
from syncline.job import Job
from syncline.program.costs import reductions
from syncline.progress import format_bytes
from syncline.run_folder import RunFolder
from syncline.runtime.worker import StepResult
from syncline.strategy import SyncMoment

MOMENTS = {
    SyncMoment.EVERY_MICRO_BATCH: "after every micro-batch",
    SyncMoment.LAST_MICRO_BATCH: "at the last micro-batch",
    SyncMoment.AFTER_ACCUMULATION: "once after accumulation",
}


def summary_lines(
    job: Job, state: TrainState, result: StepResult, folder: RunFolder, evaluation: Evaluation | None
) -> list[str]:
    """The closing lines of a run, with what was counted in its last step on rank 0."""
    lines = []
    first, last = state.first_record, state.last_record
    if first is not None and last is not None:
        lines.append(f"loss       {first.loss:.4f} at step {first.step}, {last.loss:.4f} at step {last.step}")
    if evaluation is not None:
        lines.append(f"evaluation loss {evaluation.loss:.6f}, perplexity {evaluation.perplexity:.3f}")
    lines.append(f"model      {folder.model}")
    lines.append(f"metrics    {folder.metrics}")
    lines.append(f"gradients  {gradient_sentence(job, result)}")
    return lines


def gradient_sentence(job: Job, result: StepResult) -> str:
    """One line on the life of a gradient: reductions, bytes sent, bytes held, released or not."""
    strategy = job.strategy
    buckets = len(job.layout.buckets)
    count = sum(reductions(job.program).values())
    if count:
        how = "averaged in the collective" if strategy.average_in_collective else "summed"
        overlap = ", overlapped with the backward" if strategy.overlap else ""
        reduced = f"{count} reductions per step of {buckets} buckets, {MOMENTS[strategy.sync]}{overlap}, {how}"
    else:
        reduced = f"no reduction: one replica, {buckets} buckets"
    held = result.held_gradient_bytes
    between = "released between steps" if held == 0 else f"{format_bytes(held)} held between steps (not released)"
    return (
        f"{reduced}; {format_bytes(result.bytes_sent)} sent per rank and step; "
        f"{format_bytes(result.peak_gradient_bytes)} held at the peak, {between}"
    )
