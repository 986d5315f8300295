"""Every combination of the options of a gradient's life: what it amounts to, and the proof of its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from syncline.modeling.load import build_meta_model
from syncline.modeling.order import uses_in_forward
from syncline.modeling.split import plan_split, specs
from syncline.program.build import build_program
from syncline.program.costs import bytes_sent, gradient_bytes_between_steps
from syncline.program.program import Program
from syncline.program.verify import verify
from syncline.strategy import Strategy
from syncline.verification.combinations import (
    AXES,
    DEGREES,
    SIDE_AXES,
    combinations,
    counts,
    distinct_programs,
    has_meaning,
    refusal,
    representative,
    representatives,
    sight,
    strategy_of,
    works,
)
from tests.modeling.families import tiny_config
from tests.verification import program_figures as figures
from tests.verification.covering import filled_up, pairwise
from tests.verification.layouts import FROZEN, llama_layout, llama_specs

Combination = dict[str, str]

ALL_PROGRAMS = ("one rank", "dp=2", "pp=2", "dp=2 pp=2", "sharding=2", "dp=2 sharding=2", "sharding=2 pp=2")
"""Topologies of which every program is proven in every run; of the others every pair of choices is, and with `--matrix`
every program.
"""
PROGRAMS_OF_OTHERS = 64
PROVERS = 2
"""Processes among which programs are divided."""
SEED = 20


# ---- The enumeration -------------------------------------------------------------------------------------------------


def test_counts_are_those_of_the_enumeration():
    topologies = ("one rank", "dp=2", "sharding=2")
    listed = sum(1 for topology in topologies for _ in combinations(topology=topology))
    assert listed == 3 * 2**9 * 3 * (1 + 1 + 6)
    programs = distinct_programs(topologies).values()
    refused = sum(refusal(each) is not None for t in topologies for each in representatives(t))
    # A sixth is refused: one of two choices of overlap, with one of three moments.
    assert sum(program.covers for program in programs) == listed * 5 // 6
    assert refused * 6 == sum(1 for t in topologies for _ in representatives(t))
    assert counts().refused * 6 == counts().combinations


def test_only_overlap_after_accumulation_is_refused():
    for combination in random_combinations(600):
        error = refusal(combination)
        nothing_left = combination["gradient_sync"] == "after_accumulation" and combination["overlap"] == "overlapped"
        assert (error is not None) == nothing_left, combination
        assert error is None or "no backward is left to overlap with" in error.wrong


def test_what_a_program_does_not_see_changes_nothing_in_it():
    for combination in random_combinations(600):
        if refusal(combination) is None:
            seen, standing = (strategy_of(each) for each in (combination, representative(combination)))
            assert sight(seen, False) == sight(standing, False), combination


def random_combinations(count: int) -> list[Combination]:
    options = {axis: tuple(choices) for axis, choices in AXES.items()}
    return filled_up([], options, count, SEED, has_meaning)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layouts_of_the_proof_are_those_of_a_model(stages, tied):
    model = build_meta_model(tiny_config("llama", layers=stages + 1, tied=tied))
    rules = {parameter: 0 if parameter.dim() >= 2 else 1 for parameter in model.parameters()}
    found = specs(model, plan_split(model, stages), [FROZEN.replace(".", r"\.")], uses_in_forward(model), rules)
    assert [without_shape(spec) for spec in found] == [without_shape(spec) for spec in llama_specs(stages, tied)]
    for spec, expected in zip(found, llama_specs(stages, tied), strict=True):
        assert len(spec.shape) == len(expected.shape)


def without_shape(spec) -> dict:
    return {name: value for name, value in vars(spec).items() if name != "shape"}


# ---- The proof of every program --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One combination whose program is to be proven."""

    combination: Combination

    def prove(self) -> None:
        strategy = strategy_of(self.combination)
        tied = self.combination["tying"] == "tied"
        layout = llama_layout(strategy, tied)
        program = build_program(strategy, layout, activation_bytes=96 * strategy.topology.pp)
        verify(program)
        assert_figures(program, strategy)


def assert_figures(program: Program, strategy: Strategy) -> None:
    for rank in range(program.topology.world_size):
        assert bytes_sent(program, rank) == figures.expected_bytes(program, strategy, rank), f"sent by rank {rank}"
        held, most = figures.walk_gradients(program, rank)
        assert (
            gradient_bytes_between_steps(program, rank) == held == figures.expected_held_bytes(program, strategy, rank)
        )
        assert program.peak_gradient_bytes[rank] == most <= figures.most_gradient_bytes(program, strategy, rank)
        gathered = figures.check_gathered(program, rank) if strategy.divides_parameters else 0
        assert program.peak_gathered_bytes[rank] == gathered


def prove_share(rank: int, world_size: int, combinations: Sequence[Combination]) -> list[str]:
    """Prove every `world_size`-th program; what was wrong with which."""
    wrong = []
    for combination in combinations[rank::world_size]:
        try:
            Case(combination).prove()
        except Exception as error:
            wrong.append(f"[{', '.join(combination.values())}]: {type(error).__name__}: {error}")
    return wrong


def prove_all(pool, combinations: Sequence[Combination]) -> None:
    wrong = [each for share in pool.run(PROVERS, prove_share, combinations, timeout=600.0) for each in share]
    assert not wrong, f"{len(wrong)} of {len(combinations)} programs\n" + "\n".join(wrong[:20])


def in_sizes_of_its_own(combination: Combination, index: int) -> Combination:
    """One of the combinations that run the same program; all sizes have their turn."""
    dtypes = ["float16"] if combination["dtype"] == "float16" else ["float64", "float32", "bfloat16"]
    return {**combination, "dtype": dtypes[index % len(dtypes)], "wire": tuple(AXES["wire"])[index // 3 % 2]}


@pytest.mark.ranks
@pytest.mark.parametrize("topology", DEGREES)
def test_every_program_is_proven(pool, request, topology):
    if topology in ALL_PROGRAMS or request.config.getoption("matrix"):
        chosen = [program.example for program in distinct_programs([topology]).values()]
    else:
        options = {axis: (topology,) if axis == "topology" else tuple(choices) for axis, choices in AXES.items()}
        rows = pairwise(options, works)
        chosen = filled_up(rows, options, max(len(rows), PROGRAMS_OF_OTHERS), SEED, works)
    prove_all(pool, [in_sizes_of_its_own(combination, index) for index, combination in enumerate(chosen)])


@pytest.mark.ranks
def test_programs_of_side_axes_are_proven(pool):
    options = {axis: tuple(choices) for axis, choices in {**AXES, **SIDE_AXES}.items()}
    prove_all(pool, filled_up(pairwise(options, works), options, 500, SEED, works))
