"""What a finished run says of itself: above all, what its gradients did."""

from __future__ import annotations

from syncline.program.actions import ReduceGradients
from syncline.program.analysis.costs import reductions
from syncline.program.program import Program
from syncline.reports.format import format_bytes
from syncline.runtime.worker import StepResult
from syncline.training.callbacks import Evaluation, TrainState
from syncline.training.job import Job
from syncline.training.run_folder import RunFolder


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
    """One line on the life of a gradient, read off the program: reductions, bytes sent, bytes held, released or not."""
    held = result.held_gradient_bytes
    between = "released between steps" if held == 0 else f"{format_bytes(held)} held between steps (not released)"
    return (
        f"{_reductions(job.program)}; {format_bytes(result.bytes_sent)} sent per rank and step; "
        f"{format_bytes(result.peak_gradient_bytes)} held at the peak, {between}"
    )


def _reductions(program: Program) -> str:
    buckets = sum(not bucket.frozen for bucket in program.layout.buckets)
    found = [action for actions in program.ranks for action in actions if isinstance(action, ReduceGradients)]
    if not found:
        return f"no reduction: one replica, {buckets} buckets"
    counts = reductions(program).values()
    each = f"{min(counts)} each" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)} each"
    where = "inside the backward" if found[0].during is not None else "behind the backward"
    how = {"avg": "averaged by the collective", "sum": "summed"}[found[0].op]
    whither = "" if found[0].kind == "all_reduce" else ", to their owners"
    return f"{sum(counts)} reductions per step of {buckets} buckets, {each}, {where}, {how}{whither}"
