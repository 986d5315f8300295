"""A program as one self-contained HTML page: every rank's actions as a lane, in the order in which they happen."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from syncline.arguments import TrainingArguments, resolved_yaml
from syncline.program.actions import (
    AccumulateShard,
    Action,
    AllocateGradients,
    Backward,
    BackwardInput,
    BackwardWeight,
    CheckFinite,
    ClipGradients,
    Forward,
    FreeGradients,
    FreeParameters,
    GatherParameters,
    OptimizerStep,
    PointToPoint,
    ReduceGradients,
    ReduceReplicated,
    WaitGather,
    WaitReduce,
)
from syncline.program.program import Program
from syncline.program.text import listing, title, to_text

KINDS: dict[str, tuple[type[Action], ...]] = {
    "forward": (Forward,),
    "backward": (Backward, BackwardInput, BackwardWeight),
    "message": (PointToPoint,),
    "reduction": (ReduceGradients, WaitReduce, ReduceReplicated),
    "gather": (GatherParameters, WaitGather),
    "memory": (AllocateGradients, FreeGradients, AccumulateShard, FreeParameters),
    "update": (ClipGradients, CheckFinite, OptimizerStep),
}
"""The colours of the page; everything else is grey."""

STYLE = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; max-width: 100rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.lanes { display: flex; gap: 1rem; overflow-x: auto; align-items: flex-start; }
.lane { min-width: 21rem; } .lane h3 { font-size: .95rem; margin: .3rem 0; }
.action { border-left: .4rem solid #8884; padding: 0 .5rem; margin: 1px 0; white-space: nowrap; }
.inside { margin-left: 1.2rem; }
.forward { border-color: #3b82f6; background: #3b82f61c; } .backward { border-color: #f97316; background: #f973161c; }
.message { border-color: #a3a3a3; } .reduction { border-color: #16a34a; background: #16a34a1c; }
.gather { border-color: #0891b2; background: #0891b21c; }
.memory { border-color: #a855f7; background: #a855f71c; } .update { border-color: #dc2626; background: #dc26261c; }
.legend span { display: inline-block; margin-right: .6rem; }
pre { overflow-x: auto; background: #8881; padding: .8rem; }
"""


def program_page(program: Program, arguments: TrainingArguments) -> str:
    """The page for `program`, which follows from `arguments`; one rank of each place in the pipeline has a lane."""
    shown = [program.topology.rank(pp=position) for position in range(program.topology.pp)]
    lanes = "\n".join(_lane(program, rank) for rank in shown)
    legend = "".join(f'<span class="action {kind}">{kind}</span>' for kind in KINDS)
    text = to_text(program)
    summary = text[text.rindex("\n\n") :].strip()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Syncline: one step</title>\n'
        f"<style>{STYLE}</style></head><body>\n"
        f"<h1>One optimizer step: {escape(text.splitlines()[0])}</h1>\n"
        f'<pre>{escape(summary)}</pre>\n<p class="legend">{legend}</p>\n'
        f'<div class="lanes">\n{lanes}\n</div>\n'
        f"<h2>The configuration</h2>\n<pre>{escape(resolved_yaml(arguments))}</pre>\n</body></html>\n"
    )


def _lane(program: Program, rank: int) -> str:
    actions = "\n".join(map(_entry, program.ranks[rank], listing(program, rank)))
    return f'<div class="lane"><h3>{title(program, rank)}</h3>\n{actions}\n</div>'


def _entry(action: Action, text: str) -> str:
    classes: Sequence[str] = ["action", _kind(action)]
    if getattr(action, "during", None) is not None:
        classes = [*classes, "inside"]
    return f'<div class="{" ".join(filter(None, classes))}">{escape(text)}</div>'


def _kind(action: Action) -> str:
    return next((kind for kind, types in KINDS.items() if isinstance(action, types)), "")
