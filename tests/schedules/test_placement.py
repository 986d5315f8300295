import pytest

from syncline.schedules.placement import Placement


def at(placement: Placement) -> list[tuple[int, ...]]:
    return [placement.stages_at(position) for position in range(placement.positions)]


def test_stages_go_round():
    assert at(Placement(3)) == [(0,), (1,), (2,)]
    assert at(Placement(3, 2)) == [(0, 3), (1, 4), (2, 5)]
    assert at(Placement(2, 3)) == [(0, 2, 4), (1, 3, 5)]


def test_folded_they_go_to_and_fro():
    assert at(Placement(3, 2, folded=True)) == [(0, 5), (1, 4), (2, 3)]
    assert at(Placement(2, 3, folded=True)) == [(0, 3, 4), (1, 2, 5)]


@pytest.mark.parametrize("folded", [False, True])
def test_every_stage_is_where_it_is_held(folded):
    for positions in range(1, 6):
        for per_position in range(1, 4):
            placement = Placement(positions, per_position, folded)
            assert sorted(stage for stages in at(placement) for stage in stages) == list(range(placement.stages))
            for position, stages in enumerate(at(placement)):
                assert len(stages) == per_position
                assert {placement.position(stage) for stage in stages} == {position}
            assert placement.last_stage == placement.stages - 1
