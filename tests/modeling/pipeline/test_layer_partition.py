"""Layers are divided so that no stage costs more than it must."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from torch import nn

from syncline.arguments import arguments_from_mapping
from syncline.arguments.segmentation import parse_segmentation
from syncline.errors import UserError
from syncline.modeling.load import build_meta_model
from syncline.modeling.pipeline.layer_partition import assign_layers, balanced, products_per_token
from syncline.modeling.pipeline.split import plan_split
from tests.modeling.families import tiny_config

UNIFORM = ("uniform",)


def every_division(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(stop - start for start, stop in pairwise((0, *cuts, layers)))
        for cuts in combinations(range(1, layers), stages - 1)
    ]


def costs_of(counts, costs, first, last) -> list[int]:
    of_stages, start = [], 0
    for count in counts:
        of_stages.append(sum(costs[start : start + count]))
        start += count
    of_stages[0] += first
    of_stages[-1] += last
    return of_stages


def test_the_largest_cost_is_the_least_and_then_stages_are_as_equal_as_they_can_be():
    generator = random.Random(7)
    for _ in range(300):
        layers, stages = generator.randint(1, 9), generator.randint(1, 5)
        if stages > layers:
            continue
        costs = [generator.randint(0, 9) for _ in range(layers)]
        first, last = generator.randint(0, 3), generator.randint(0, 20)

        def figure(counts, costs=costs, first=first, last=last):
            found = costs_of(counts, costs, first, last)
            return max(found), sum(cost**2 for cost in found)

        counts = balanced(costs, first, last, stages)
        assert sum(counts) == layers
        assert min(counts) >= 1
        assert figure(counts) == min(map(figure, every_division(layers, stages)))


def test_what_is_left_over_goes_to_the_middle_then_to_the_first_stage():
    expected = {
        (4, 2): (2, 2),
        (5, 2): (3, 2),
        (5, 3): (2, 2, 1),
        (4, 3): (1, 2, 1),
        (6, 4): (1, 2, 2, 1),
        (7, 4): (2, 2, 2, 1),
    }
    assert {shape: balanced([1] * shape[0], 0, 0, shape[1]) for shape in expected} == expected


def test_a_head_that_costs_two_layers_leaves_its_stage_two_layers_less():
    assert balanced([10] * 16, 0, 20, 3) == (6, 6, 4)
    # One layer must stay, however dear the head.
    assert balanced([10] * 6, 0, 500, 3) == (2, 3, 1)


def test_a_large_model_is_divided_at_once():
    counts = balanced([7] * 126, 1, 30, 64)
    assert sum(counts) == 126
    assert counts[-1] == 1
    assert max(counts) == 2


def test_costs_are_the_matrices_and_one_row_of_an_embedding():
    model = nn.ModuleDict(
        {"lookup": nn.Embedding(100, 8), "linear": nn.Linear(8, 6), "norm": nn.LayerNorm(6)},
    )
    assert products_per_token(model) == 8 + 8 * 6


def test_the_head_of_a_model_counts():
    config = tiny_config("llama", layers=8)
    config.vocab_size = 2048
    plan = plan_split(build_meta_model(config), 2)
    model = build_meta_model(config)
    layer, head = products_per_token(model.model.layers[0]), products_per_token(model.lm_head)
    assert head > 3 * layer
    assert len(plan.layer_ranges[1]) < len(plan.layer_ranges[0])


class Attention(nn.Module):
    pass


class Convolution(nn.Module):
    pass


MIXED = [Attention(), Convolution(), Convolution(), Attention(), Convolution(), Attention(), Convolution(), Attention()]


def divided(layers, stages: int, segmentation) -> list[list[int]]:
    return [list(each) for each in assign_layers(layers, [], [], stages, segmentation)]


class TestPattern:
    def test_only_layers_whose_class_is_found_count(self):
        assert divided(MIXED, 2, ("layer:Attention",)) == [[0, 1, 2, 3, 4], [5, 6, 7]]
        assert divided(MIXED, 2, ("layer:Att|Conv",)) == [[0, 1, 2, 3], [4, 5, 6, 7]]

    def test_a_pattern_that_finds_too_little_is_refused(self):
        with pytest.raises(UserError, match=r"the model has 0 layers that 'Mamba' finds.*Attention and Convolution"):
            divided(MIXED, 2, ("layer:Mamba",))
        with pytest.raises(UserError, match=r"4 layers that 'Att' finds"):
            divided(MIXED, 5, ("layer:Att",))


class TestList:
    def test_stages_have_as_many_layers_as_listed(self):
        assert divided(MIXED, 3, ("1", "5", "2")) == [[0], [1, 2, 3, 4, 5], [6, 7]]

    def test_other_numbers_than_the_models_are_refused(self):
        with pytest.raises(UserError, match=r"pp_seg_method=4,5.*these are 9 layers, and the model has 8"):
            divided(MIXED, 2, ("4", "5"))
        with pytest.raises(UserError, match=r"pp_seg_method=4,4 with 3 pipeline stages.*lists the layers of 2 stages"):
            divided(MIXED, 3, ("4", "4"))


class TestParsing:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("uniform", UNIFORM),
            ("layer:Llama.*Layer", ("layer:Llama.*Layer",)),
            ("layer:A{1,2}", ("layer:A{1,2}",)),
            ("8, 8,6", ("8", "8", "6")),
            ([8, 8, 6], ("8", "8", "6")),
            (8, ("8",)),
        ],
    )
    def test_every_spelling(self, value, expected):
        assert arguments_from_mapping(
            {"model_config": {"model_type": "llama"}, "pp_seg_method": value}
        ).pp_seg_method == (expected)

    @pytest.mark.parametrize("value", ["even", "8,0", "8,-1", "8,x", "layer:(", "layer:"])
    def test_anything_else_is_refused_with_what_to_write(self, value):
        with pytest.raises(UserError, match="Write ") as error:
            parse_segmentation("pp_seg_method", value)
        assert error.value.given.startswith("pp_seg_method=")
