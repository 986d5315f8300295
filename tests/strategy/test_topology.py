"""Ranks, coordinates and groups."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.strategy.topology import AXES, AXIS_ORDERS, REPLICA_AXES, Topology

degrees = st.integers(1, 3)
topologies = st.builds(
    Topology,
    pp=degrees,
    dp=degrees,
    sharding=degrees,
    sep=degrees,
    tp=degrees,
    order=st.sampled_from(sorted(AXIS_ORDERS)),
)


@given(topologies)
def test_every_rank_has_a_coordinate_of_its_own_and_back(topology):
    coordinates = [topology.coordinate(rank) for rank in range(topology.world_size)]
    assert [topology.rank(**coordinate) for coordinate in coordinates] == list(range(topology.world_size))
    assert all(0 <= each[axis] < topology.degrees[axis] for each in coordinates for axis in AXES)


@given(topologies, st.sets(st.sampled_from(AXES)).map(tuple))
def test_groups_partition_the_world(topology, axes):
    groups = topology.groups(axes)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert list(group) == sorted(group)
        assert all(topology.group(rank, axes) == group for rank in group)
        others = [{axis: topology.coordinate(rank)[axis] for axis in AXES if axis not in axes} for rank in group]
        assert all(other == others[0] for other in others)


@given(topologies)
def test_replicas_are_numbered_within_their_group(topology):
    for group in topology.groups(REPLICA_AXES):
        assert sorted(topology.replica(rank) for rank in group) == list(range(topology.replicas))


@given(topologies)
def test_a_neighbour_differs_in_the_named_axis_only(topology):
    for rank in range(topology.world_size):
        neighbour = topology.neighbour(rank, pp=topology.pp - 1)
        assert topology.coordinate(neighbour) == {**topology.coordinate(rank), "pp": topology.pp - 1}


@pytest.mark.parametrize(
    ("order", "stages", "replica_groups", "pipeline_groups"),
    [
        ("pp_first", [0, 0, 1, 1], ((0, 1), (2, 3)), ((0, 2), (1, 3))),
        ("sharding_first", [0, 1, 0, 1], ((0, 2), (1, 3)), ((0, 1), (2, 3))),
    ],
)
def test_the_two_orders_of_two_stages_and_two_replicas(order, stages, replica_groups, pipeline_groups):
    topology = Topology(pp=2, dp=2, order=order)
    assert [topology.position(rank) for rank in range(4)] == stages
    assert topology.groups(REPLICA_AXES) == replica_groups
    assert topology.groups(("pp",)) == pipeline_groups


def test_replicas_count_sharding_too():
    assert Topology(pp=2, dp=3, sharding=4, tp=5).replicas == 12
    assert Topology(pp=2, dp=3, sharding=4, tp=5).world_size == 120


@pytest.mark.parametrize(
    ("order", "sharding_groups", "replica_groups", "norm_groups"),
    [
        ("pp_first", ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 1, 4, 5), (2, 3, 6, 7))),
        (
            "sharding_first",
            ((0, 2), (1, 3), (4, 6), (5, 7)),
            ((0, 2, 4, 6), (1, 3, 5, 7)),
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
    ],
)
def test_the_groups_of_sharding_lie_within_those_of_replicas(order, sharding_groups, replica_groups, norm_groups):
    """The parts of one replica, over which a norm is summed, are all stages of one sharding group."""
    topology = Topology(pp=2, dp=2, sharding=2, order=order)
    assert topology.groups(("sharding",)) == sharding_groups
    assert topology.groups(REPLICA_AXES) == replica_groups
    assert topology.groups(("pp", "sharding")) == norm_groups
    for rank in range(8):
        assert topology.replica(rank) == 2 * topology.coordinate(rank)["dp"] + topology.coordinate(rank)["sharding"]
