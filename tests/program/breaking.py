"""Ways to break a program, and what the verifier must say of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from syncline.program.actions import Action
from syncline.program.program import Program
from syncline.program.verification.verify import Violation, verify

Change = Callable[[int, list[Action]], list[Action]]
"""What becomes of one rank's actions."""


def assert_rejected(whole: Program, change: Change, rule: int, *, updates: bool = True) -> None:
    """The program as it is passes; changed, it breaks `rule`, and the error says so."""
    verify(whole, updates=updates)
    broken = whole.map_ranks(lambda rank, actions: change(rank, list(actions)))
    assert broken != whole
    with pytest.raises(Violation) as violation:
        verify(broken, updates=updates)
    assert violation.value.rule == rule, str(violation.value)
    assert f"rule {rule}" in str(violation.value)
    assert "rank " in str(violation.value)


def all_of(actions: list[Action], kind: type[Action], /, **fields: object) -> list[int]:
    """The places of the actions of a kind that have these fields."""
    return [
        index
        for index, action in enumerate(actions)
        if isinstance(action, kind) and all(getattr(action, name) == value for name, value in fields.items())
    ]


def first(actions: list[Action], kind: type[Action], /, **fields: object) -> int:
    return all_of(actions, kind, **fields)[0]


def without(kind: type[Action], /, ranks: tuple[int, ...] = (0, 1, 2, 3), **fields: object) -> Change:
    def change(rank: int, actions: list[Action]) -> list[Action]:
        if rank in ranks:
            del actions[first(actions, kind, **fields)]
        return actions

    return change


def without_any(*kinds: type[Action], **fields: object) -> Change:
    """On no rank is any of these left."""

    def change(rank: int, actions: list[Action]) -> list[Action]:
        gone = {index for kind in kinds for index in all_of(actions, kind, **fields)}
        return [action for index, action in enumerate(actions) if index not in gone]

    return change


def moved(kind: type[Action], before: type[Action], ranks: tuple[int, ...] = (0, 1, 2, 3)) -> Change:
    def change(rank: int, actions: list[Action]) -> list[Action]:
        if rank in ranks:
            action = actions.pop(first(actions, kind))
            actions.insert(first(actions, before), action)
        return actions

    return change


def doubled(kind: type[Action], /, ranks: tuple[int, ...] = (0, 1, 2, 3), **fields: object) -> Change:
    def change(rank: int, actions: list[Action]) -> list[Action]:
        if rank in ranks:
            index = first(actions, kind, **fields)
            actions.insert(index, actions[index])
        return actions

    return change


def replaced(kind: type[Action], /, ranks: tuple[int, ...] = (0, 1, 2, 3), **fields: object) -> Change:
    """The first of a kind has other fields."""

    def change(rank: int, actions: list[Action]) -> list[Action]:
        if rank in ranks:
            index = first(actions, kind)
            actions[index] = replace(actions[index], **fields)
        return actions

    return change


def all_replaced(kind: type[Action], /, where: dict[str, object] | None = None, **fields: object) -> Change:
    """Every one of a kind, where it has the fields `where`, has other fields, on every rank."""

    def change(rank: int, actions: list[Action]) -> list[Action]:
        for index in all_of(actions, kind, **(where or {})):
            actions[index] = replace(actions[index], **fields)
        return actions

    return change


def swapped(kind: type[Action], /, ranks: tuple[int, ...] = (0,), **fields: object) -> Change:
    """The first two of a kind are issued the other way round."""

    def change(rank: int, actions: list[Action]) -> list[Action]:
        if rank in ranks:
            a, b = all_of(actions, kind, **fields)[:2]
            actions[a], actions[b] = actions[b], actions[a]
        return actions

    return change
