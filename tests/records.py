"""The metrics of a step, for those who read or write them."""

from __future__ import annotations

from syncline.reports.metrics import StepMetrics

RECORD = StepMetrics(
    step=1,
    loss=4.25,
    learning_rate=3e-4,
    grad_norm=1.5,
    tokens=512,
    tokens_per_second=1024.0,
    step_seconds=0.5,
    forward_backward_seconds=0.25,
    reduce_wait_seconds=0.125,
    optimizer_seconds=0.0625,
    peak_memory_bytes=2**29,
    gradient_bytes=2**20,
    bytes_sent=2**21,
    skipped=False,
    gradient_bytes_held=2**19,
    reductions=5,
    bytes_sent_by_group={"dp": 2**21},
)
