"""Every combination of the options of a gradient's life: what it amounts to, and the proof of its program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
from tools.combinations import (
    AXES,
    BY_SLICES,
    DEGREES,
    FREE_SLICES,
    SIDE_AXES,
    STAGE2,
    STAGE3,
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
from tools.combinations_page import combinations_markdown

from syncline.errors import UserError
from syncline.modeling.access.order import uses_in_forward
from syncline.modeling.load import build_meta_model
from syncline.modeling.pipeline.split import plan_split, specs
from syncline.program.analysis.costs import bytes_sent, gradient_bytes_between_steps
from syncline.program.build import build_program
from syncline.program.program import Program
from syncline.program.verification.verify import verify
from syncline.strategy import Strategy
from tests.modeling.families import tiny_config
from tests.verification import program_figures as figures
from tests.verification.covering import filled_up, pairwise
from tests.verification.layouts import FROZEN, llama_layout, llama_specs

Combination = dict[str, str]

ALL_PROGRAMS = ("one rank", "dp=2", "pp=2", "dp=2 pp=2", "sharding=2", "dp=2 sharding=2", "sharding=2 pp=2")
"""Topologies of which every program is proven in every run; of the others every pair of choices is, and with `--matrix`
every program.
"""
PROGRAMS_OF_OTHERS, PROGRAMS_OF_SIDE_AXES = 64, 500
PROVERS = 2
"""Processes among which programs are divided."""
SEED = 20
ACTIVATION_BYTES = 96


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
        nothing_left = combination["gradient_sync"] == "after_accumulation" and combination["overlap"] == "overlapped"
        if not nothing_left:
            assert refusal(combination) is None
            strategy_of(combination)
            continue
        with pytest.raises(UserError, match="no backward is left to overlap with") as caught:
            strategy_of(combination)
        assert str(caught.value) == str(refusal(combination))


def test_choices_that_are_left_out_have_no_effect():
    places = [{"topology": topology, "k": k} for topology in AXES["topology"] for k in AXES["k"]]
    others = [(axis, choice) for axis in ("gathers", "schedule", "messages", "order") for choice in SIDE_AXES[axis]]
    left_out = 0
    for place, form, (axis, choice) in product(places, AXES["sharding"], others):
        combination = {**place, "sharding": form, axis: choice}
        if not has_meaning(combination):
            left_out += 1
            assert "has no effect here" in " ".join(strategy_of(combination).warnings), combination
    assert left_out > 1000


def test_the_page_has_the_words_of_every_refusal():
    page = combinations_markdown()
    for choices in ({"gradient_sync": "after_accumulation", "overlap": "overlapped"}, *slices_of_whole_tensors()):
        error = refusal({"topology": "sharding=2", **choices})
        assert error is not None
        assert all(words in page for words in (f"`{error.given}`", error.wrong, error.instead)), error


def slices_of_whole_tensors() -> list[Combination]:
    return [
        {"sharding": form, "optimizer": optimizer}
        for form in (BY_SLICES, FREE_SLICES, STAGE2, STAGE3)
        for optimizer in ("adafactor", "muon")
    ]


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
    all_settings = {parameter: 0 if parameter.dim() >= 2 else 1 for parameter in model.parameters()}
    found = specs(model, plan_split(model, stages), [FROZEN.replace(".", r"\.")], uses_in_forward(model), all_settings)
    found.sort(key=lambda spec: spec.order)
    assert [without_shape(spec) for spec in found] == [without_shape(spec) for spec in llama_specs(stages, tied)]
    for spec, expected in zip(found, llama_specs(stages, tied), strict=True):
        assert len(spec.shape) == len(expected.shape)


def without_shape(spec) -> dict:
    return {name: value for name, value in vars(spec).items() if name != "shape"}


# ---- The proof of every program --------------------------------------------------------------------------------------


def prove(combination: Combination) -> None:
    strategy = strategy_of(combination)
    layout = llama_layout(strategy, combination["tying"] == "tied")
    program = build_program(strategy, layout, activation_bytes=ACTIVATION_BYTES)
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
            prove(combination)
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
        chosen = sample({"topology": {topology: {}}}, PROGRAMS_OF_OTHERS)
    prove_all(pool, [in_sizes_of_its_own(combination, index) for index, combination in enumerate(chosen)])


@pytest.mark.ranks
def test_programs_of_side_axes_are_proven(pool):
    prove_all(pool, sample(SIDE_AXES, PROGRAMS_OF_SIDE_AXES))


def sample(axes: Mapping[str, Mapping[str, Any]], count: int) -> list[Combination]:
    """Every pair of choices, and more at random; `axes` replaces axes, or adds some."""
    options = {axis: tuple(choices) for axis, choices in {**AXES, **axes}.items()}
    fixed = {axis: choices[0] for axis, choices in options.items() if len(choices) == 1}

    def allowed(row: Mapping[str, Any]) -> bool:
        return works({**fixed, **row})

    return filled_up(pairwise(options, allowed), options, count, SEED, allowed)
