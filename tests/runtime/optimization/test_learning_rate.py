import pytest
import torch
from transformers import get_scheduler

from syncline.runtime.optimization.learning_rate import LearningRateSchedule, ScheduleKind, learning_rate

PEAK, WARMUP, TOTAL = 3e-4, 7, 40


def reference(name: str, warmup: int = WARMUP, **specific) -> list[float]:
    """The learning rate of each update, as an optimizer under transformers' own scheduler sees it."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=TOTAL, scheduler_specific_kwargs=specific
    )
    rates = []
    for _ in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, WARMUP])
@pytest.mark.parametrize(
    ("kind", "minimum", "power", "name", "specific"),
    [
        ("linear", 0.0, 1.0, "linear", {}),
        ("cosine", 0.0, 1.0, "cosine", {}),
        ("cosine", 3e-5, 1.0, "cosine_with_min_lr", {"min_lr": 3e-5}),
        ("constant", 0.0, 1.0, "constant", {}),
        ("constant_with_warmup", 0.0, 1.0, "constant_with_warmup", {}),
        ("polynomial", 1e-7, 1.0, "polynomial", {"lr_end": 1e-7}),
        ("polynomial", 1e-5, 2.5, "polynomial", {"lr_end": 1e-5, "power": 2.5}),
    ],
)
def test_every_step_equals_transformers(kind, minimum, power, name, specific, warmup):
    schedule = LearningRateSchedule(ScheduleKind(kind), PEAK, TOTAL, warmup, minimum, power)
    ours = [learning_rate(schedule, step) for step in range(TOTAL)]
    assert ours == pytest.approx(reference(name, warmup, **specific), rel=1e-12, abs=1e-18)


def test_linear_decays_to_its_minimum():
    schedule = LearningRateSchedule(ScheduleKind.LINEAR, 1.0, total_steps=10, minimum=0.2)
    assert learning_rate(schedule, 5) == pytest.approx(0.6)
    assert learning_rate(schedule, 10) == pytest.approx(0.2)


@pytest.mark.parametrize("kind", [ScheduleKind.LINEAR, ScheduleKind.COSINE, ScheduleKind.POLYNOMIAL])
def test_after_the_last_step_the_minimum_stays(kind):
    schedule = LearningRateSchedule(kind, 1.0, total_steps=10, warmup_steps=2, minimum=0.1)
    assert [learning_rate(schedule, step) for step in (10, 11, 500)] == pytest.approx([0.1] * 3)


def test_a_warmup_of_the_whole_run():
    schedule = LearningRateSchedule(ScheduleKind.LINEAR, 1.0, total_steps=4, warmup_steps=4)
    assert [learning_rate(schedule, step) for step in range(4)] == pytest.approx([0.0, 0.25, 0.5, 0.75])
