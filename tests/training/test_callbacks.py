import math
from pathlib import Path

import pytest

from syncline.errors import UserError
from syncline.training.callbacks import (
    EVENTS,
    Callback,
    CallbackError,
    CallbackList,
    EarlyStopping,
    Evaluation,
    TrainControl,
    TrainState,
)


def state() -> TrainState:
    return TrainState(max_steps=10, is_main_rank=True)


DETAILS: dict[str, dict] = {
    **{
        f"on_{what}_{when}": {"stage": 0, "micro_batch": 0}
        for what in ("forward", "backward")
        for when in ("begin", "end")
    },
    "on_bubble": {"index": 0, "capacity": 1.0},
    "on_substep_end": {"micro_batch": 0},
    "on_evaluate": {"evaluation": Evaluation(loss=1.0, tokens=1, seconds=1.0)},
    "on_predict": {"text": "once"},
    "on_log": {"record": None},
    "on_save": {"path": Path("checkpoint-1")},
    "on_export": {"path": Path("model")},
    "on_exception": {"error": RuntimeError()},
}


class Spy(Callback):
    def __init__(self, name: str, calls: list) -> None:
        self.name, self.calls = name, calls

    def on_step_end(self, state, control, **details):
        self.calls.append((self.name, state, control, details))


class Failing(Callback):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def on_step_end(self, state, control, **details):
        raise self.error


def test_there_are_twenty_events():
    assert len(EVENTS) == 20


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_does_nothing_by_itself_and_reaches_every_member(event):
    calls: list[str] = []
    spies = [type("Spy", (Callback,), {event: lambda self, state, control, **details: calls.append(event)})()] * 2
    getattr(CallbackList([Callback(), *spies]), event)(state(), TrainControl(), **DETAILS.get(event, {}))
    assert calls == [event, event]


def test_members_are_called_in_order_with_state_control_and_details():
    calls: list[tuple] = []
    at, control = state(), TrainControl()
    CallbackList([Spy("first", calls), Spy("second", calls)]).on_step_end(at, control, extra=3)
    assert calls == [("first", at, control, {"extra": 3}), ("second", at, control, {"extra": 3})]
    assert calls[0][1] is at
    assert calls[0][2] is control


def test_a_misspelt_event_is_refused_where_the_class_is_defined():
    with pytest.raises(TypeError, match=r"Typo\.on_step_ends is not an event.*on_step_end"):
        type("Typo", (Callback,), {"on_step_ends": lambda self: None})


def test_a_failure_carries_callback_and_event_and_cause():
    cause = KeyError("missing")
    with pytest.raises(CallbackError, match=r"Failing\.on_step_end failed: KeyError: 'missing'") as raised:
        CallbackList([Failing(cause)]).on_step_end(state(), TrainControl())
    assert raised.value.event == "on_step_end"
    assert raised.value.__cause__ is cause


def test_a_user_error_passes_unchanged():
    error = UserError("a", "b", "c")
    with pytest.raises(UserError) as raised:
        CallbackList([Failing(error)]).on_step_end(state(), TrainControl())
    assert raised.value is error


def stops_at(early: EarlyStopping, losses: list[float]) -> int | None:
    """The index of the evaluation at which the run is stopped."""
    control = TrainControl()
    for index, loss in enumerate(losses):
        early.on_evaluate(state(), control, evaluation=Evaluation(loss=loss, tokens=1, seconds=1.0))
        if control.should_stop:
            return index
    return None


@pytest.mark.parametrize(
    ("patience", "threshold", "losses", "stop"),
    [
        (1, 0.0, [3.0, 2.0, 1.0], None),
        (1, 0.0, [3.0, 3.0], 1),
        (2, 0.0, [3.0, 3.1, 2.9, 3.0, 2.9], 4),
        (2, 0.5, [3.0, 2.8, 2.6], 2),
        (2, 0.5, [3.0, 2.8, 2.4, 2.2], None),
        (2, 0.0, [math.nan, math.nan], 1),
    ],
)
def test_early_stopping(patience, threshold, losses, stop):
    assert stops_at(EarlyStopping(patience, threshold), losses) == stop


@pytest.mark.parametrize(("patience", "threshold"), [(0, 0.0), (-1, 0.0), (1, -0.1), (1, math.nan)])
def test_early_stopping_refuses_what_has_no_meaning(patience, threshold):
    with pytest.raises(UserError):
        EarlyStopping(patience, threshold)


def test_perplexity_of_a_diverged_loss_is_infinite():
    assert Evaluation(loss=math.log(8), tokens=1, seconds=1.0).perplexity == pytest.approx(8)
    assert Evaluation(loss=1e6, tokens=1, seconds=1.0).perplexity == math.inf
