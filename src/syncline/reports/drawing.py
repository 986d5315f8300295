"""What is drawn of a step: when each rank does what, how long buckets live, how many bytes of gradients there are.

One drawing shows a program as it is simulated, another one a step as it was measured; `page.js` draws both alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from syncline.program.actions import (
    COMPUTATIONS,
    AccumulateShard,
    Action,
    AllocateGradients,
    Backward,
    BackwardInput,
    BackwardWeight,
    Bubble,
    CheckFinite,
    ClipGradients,
    Forward,
    FreeGradients,
    FreeParameters,
    GatherParameters,
    OffloadActivations,
    OptimizerStep,
    Part,
    PointToPoint,
    ReduceGradients,
    ReduceReplicated,
    ScaleGradients,
    WaitGather,
    WaitReduce,
    ZeroGradients,
)
from syncline.program.analysis.costs import gradient_bytes_added, gradient_bytes_between_steps, simulated
from syncline.program.display.text import listing, title
from syncline.program.program import Program
from syncline.reports.timeline import Entry

KINDS: dict[str, tuple[type[Action], ...]] = {
    "forward": (Forward,),
    "backward": (Backward,),
    "backward, input": (BackwardInput,),
    "backward, weights": (BackwardWeight,),
    "message": (PointToPoint,),
    "bubble": (Bubble,),
    "reduction": (ReduceGradients, WaitReduce, ReduceReplicated, AccumulateShard),
    "gather": (GatherParameters, WaitGather, FreeParameters),
    "memory": (AllocateGradients, FreeGradients, ZeroGradients, OffloadActivations),
    "update": (ScaleGradients, ClipGradients, CheckFinite, OptimizerStep),
    "other": (Action,),
}
"""What is drawn in one colour."""

NOMINAL = 0.1
"""Forwards through a stage: how wide an update is drawn in a simulation, in which it takes no time."""

Moment = tuple[int, float, float]
"""A position in the rank's actions, begin and end."""


@dataclass(frozen=True)
class Life:
    """A bucket's gradients, or its shard's, from allocation to release."""

    text: str
    bytes: int
    begin: float
    end: float


@dataclass
class Row:
    """One rank."""

    title: str
    spans: list[tuple[int, float, float, str, int]] = field(default_factory=list)
    """Kind, begin, end, text, and how deep inside another action it is."""
    under_way: list[tuple[float, float, str]] = field(default_factory=list)
    """Collectives on gradients from their start to the end of their wait."""
    lives: list[Life] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    """Bytes of gradients from that time on."""


@dataclass
class Drawing:
    """One step of the ranks of a pipeline."""

    title: str
    unit: str
    """Of the times."""
    note: str
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        """What `page.js` reads."""
        length = max((span[2] for row in self.rows for span in row.spans), default=0.0)
        return {
            "title": self.title,
            "unit": self.unit,
            "note": self.note,
            "length": length,
            "rows": [
                {
                    "title": row.title,
                    "spans": [[kind, _short(begin), _short(end), *rest] for kind, begin, end, *rest in row.spans],
                    "under_way": [[_short(begin), _short(end), text] for begin, end, text in row.under_way],
                    "lives": [[each.text, each.bytes, _short(each.begin), _short(each.end)] for each in row.lives],
                    "memory": [[_short(time), held] for time, held in row.memory],
                }
                for row in self.rows
            ],
        }


def shown_ranks(program: Program) -> list[int]:
    """One rank of each place in the pipeline: the others do the same."""
    return [program.topology.rank(pp=position) for position in range(program.topology.pp)]


def simulated_drawing(program: Program) -> Drawing:
    """The program, where computations take their time and everything else none."""
    moments = simulated(program)
    rows = []
    for rank in shown_ranks(program):
        own = moments[program.topology.position(rank)]
        rows.append(_row(program, rank, list(_simulated_moments(program.ranks[rank], own))))
    return Drawing(
        "The program, simulated",
        "forwards",
        "A forward through a stage, and each half of a backward, takes 1; messages and collectives take nothing. What "
        f"happens inside a computation is spread over it, in order; an update is drawn {NOMINAL:g} wide.",
        rows,
    )


def measured_drawing(program: Program, measured: Mapping[int, Sequence[Entry]], step: int) -> Drawing:
    """Optimizer step `step` as it was `measured`: by rank the entries of its timeline for that step."""
    first = min((entry["began"] for entries in measured.values() for entry in entries), default=0.0)
    rows = []
    for rank in shown_ranks(program):
        moments = [
            (entry["position"], entry["began"] - first + entry["start"], entry["began"] - first + entry["end"])
            for entry in measured.get(rank, ())
        ]
        rows.append(_row(program, rank, moments))
    return Drawing(f"Step {step}, measured", "s", "Ranks of several machines are as far apart as their clocks.", rows)


def _simulated_moments(actions: Sequence[Action], computed: Sequence[Any]) -> Iterator[Moment]:
    """When the actions of one rank happen whose computations happen at `computed`, in their order."""
    coming = iter(computed)
    last = max((position for position, action in enumerate(actions) if isinstance(action, COMPUTATIONS)), default=-1)
    now = 0.0
    inside: list[float] = []
    for position, action in enumerate(actions):
        if isinstance(action, COMPUTATIONS):
            moment = next(coming, None)
            if moment is None:  # It would wait for ever, and so does everything behind it.
                return
            # What happens inside it is spread over its time, in order.
            count = _count_inside(actions, position)
            step = (moment.end - moment.begin) / (count + 1)
            inside = [moment.begin + (place + 1) * step for place in range(count)]
            now = moment.end
            yield position, moment.begin, moment.end
        elif getattr(action, "during", None) is not None:
            at = inside.pop(0) if inside else now
            yield position, at, at
        elif isinstance(action, Bubble):
            yield position, now, now + action.capacity
            now += action.capacity
        else:
            updates = position > last and isinstance(action, (*KINDS["update"], ReduceReplicated))
            yield position, now, now + NOMINAL * updates
            now += NOMINAL * updates


def _count_inside(actions: Sequence[Action], position: int) -> int:
    """How many actions happen inside the computation at `position`: they stand right behind it."""
    end = position + 1
    while end < len(actions) and getattr(actions[end], "during", None) is not None:
        end += 1
    return end - position - 1


def _row(program: Program, rank: int, moments: Sequence[Moment]) -> Row:
    actions, texts = program.ranks[rank], listing(program, rank)
    row = Row(title(program, rank))
    kept = program.kept_storages(rank)
    born: dict[tuple[int, Part], float] = dict.fromkeys(kept, 0.0)
    started: dict[int, list[tuple[float, str]]] = {}
    held = gradient_bytes_between_steps(program, rank)
    row.memory.append((0.0, held))
    end_of_all = max((end for _, _, end in moments), default=0.0)
    # In the order of time: what happens inside a computation may happen in another order than it stands.
    for position, begin, end in sorted(moments, key=lambda moment: (moment[1], moment[0])):
        action = actions[position]
        inside = int(getattr(action, "during", None) is not None)
        row.spans.append((_kind(action), begin, end, texts[position], inside))
        if added := gradient_bytes_added(program, rank, action):
            held += added
            row.memory.append((begin, held))
        if isinstance(action, AllocateGradients):
            born[action.bucket, action.part] = begin
        elif isinstance(action, FreeGradients):
            storage = (action.bucket, action.part)
            row.lives.append(_life(program, rank, storage, born.pop(storage, 0.0), end))
        elif isinstance(action, ReduceGradients):
            started.setdefault(action.bucket, []).append((begin, texts[position]))
        elif isinstance(action, WaitReduce) and started.get(action.bucket):
            since, text = started[action.bucket].pop(0)
            row.under_way.append((since, end, text))
    row.lives += [_life(program, rank, storage, since, end_of_all) for storage, since in born.items()]
    row.lives.sort(key=lambda life: (life.text, life.begin))
    return row


def _life(program: Program, rank: int, storage: tuple[int, Part], begin: float, end: float) -> Life:
    bucket, part = storage
    shard = " shard" if part is Part.SHARD else ""
    return Life(f"bucket {bucket:>3}{shard}", program.storage_bytes(rank, bucket, part), begin, end)


def _kind(action: Action) -> int:
    return next(index for index, types in enumerate(KINDS.values()) if isinstance(action, types))


def _short(time: float) -> float:
    """A microsecond is as fine as anybody can see."""
    return round(time, 6)
