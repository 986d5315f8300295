"""Messages of any shape between stages arrive as they were sent, and a message that does not come is named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from syncline.program.actions import (
    Action,
    Forward,
    ReceiveActivation,
    ReceiveGradient,
    SendActivation,
    SendGradient,
    StartReceivingActivation,
)
from syncline.program.build import build_forward_program
from syncline.runtime.communication.collectives import Traffic
from syncline.runtime.communication.errors import CommunicationError
from syncline.runtime.communication.point_to_point import Transport
from syncline.strategy import ShapeExchange, Strategy
from syncline.strategy.topology import Topology
from tests.program.examples import small_program
from tests.stand_ins import CPU, Token, Weights, exact, micro_batch_of, start_worker

pytestmark = pytest.mark.ranks

TIMEOUT = timedelta(seconds=60)
TWO_STAGES = small_program(Strategy(topology=Topology(pp=2)))
STEPS = (
    ((2, 5), (2, 9), (1, 5)),
    ((2, 9), (2, 9), (3, 1)),
    ((1, 5), (2, 5), (2, 7)),
)
"""The shapes of the micro-batches of each step: new ones and old ones, in changing order."""

HEADERS = {
    ShapeExchange.ONCE: 5,  # as many as there are different shapes
    ShapeExchange.EACH_STEP: 3 + 2 + 3,
    ShapeExchange.EVERY_MESSAGE: 9,
}


@contextlib.contextmanager
def counted_headers() -> Iterator[list[int]]:
    """The sizes of all integer messages that this rank sends."""
    sizes: list[int] = []
    honest = dist.isend

    def isend(tensor: Tensor, *arguments, **keywords):
        if not tensor.is_floating_point():
            sizes.append(tensor.numel())
        return honest(tensor, *arguments, **keywords)

    with mock.patch.object(dist, "isend", isend):
        yield sizes


def hidden_states(shape: tuple[int, ...], step: int, micro_batch: int, dtype: torch.dtype) -> Tensor:
    """(batch, sequence, 4), not contiguous."""
    batch, sequence = shape
    values = torch.arange(batch * sequence * 4, dtype=torch.float64).reshape(batch, 4, sequence).transpose(1, 2)
    return (values + 100 * step + 10 * micro_batch).to(dtype)


def exchange(rank: int, world_size: int, mode: ShapeExchange, dtype: torch.dtype) -> tuple[int, int]:
    """Activations go down and gradients back up; (headers sent, bytes counted)."""
    traffic = Traffic()
    transport = Transport([TWO_STAGES], mode, CPU, traffic, TIMEOUT)
    with counted_headers() as headers:
        for step, shapes in enumerate(STEPS):
            for index, shape in enumerate(shapes):
                if rank == 0:
                    transport.send(SendActivation(0, index, 1), hidden_states(shape, step, index, dtype), shape)
                else:
                    found = transport.receive(ReceiveActivation(1, index, 0), shape)
                    assert torch.equal(found, hidden_states(shape, step, index, dtype))
                    assert found.dtype == dtype
                    transport.send(SendGradient(1, index, 0), -found, shape)
            for index, shape in enumerate(shapes):
                if rank == 0:
                    found = transport.receive(ReceiveGradient(0, index, 1), shape)
                    assert torch.equal(found, -hidden_states(shape, step, index, dtype))
            transport.end_step()
    return len(headers), traffic.sent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", list(ShapeExchange))
def test_shapes_that_change_between_micro_batches_and_steps(pool, mode, dtype):
    elements = 4 * sum(batch * sequence for shapes in STEPS for batch, sequence in shapes)
    assert pool.run(2, exchange, mode, dtype) == [(HEADERS[mode], elements * dtype.itemsize)] * 2


def train_with_changing_lengths(
    rank: int, world_size: int, modes: Sequence[ShapeExchange]
) -> dict[ShapeExchange, dict[str, list[float]]]:
    """What three stages of two replicas end with; lengths differ between micro-batches, steps and replicas."""
    found = {}
    for mode in modes:
        strategy = exact(Strategy(topology=Topology(pp=3, dp=2), micro_batches=4))
        worker = start_worker(
            rank, replace(strategy, shape_exchange=mode), Weights(stages=(("first",), ("second",), ("third",)))
        )
        replica = strategy.topology.replica(rank)
        for step in range(3):
            lengths = [1 + (3 * step + 2 * index + replica) % 5 for index in range(4)]
            given = [[Token(2.0, (step + at) % 3) for at in range(length)] for length in lengths]
            worker.step([micro_batch_of(tokens) for tokens in given], 0.25)
        (stage,) = worker.stages.values()
        found[mode] = {name: weight.tolist() for name, weight in stage.parameters_by_name().items()}
    return found


def right_weights() -> dict[str, Any]:
    weights = dict.fromkeys(range(3), 1.0)
    for step in range(3):
        lengths = [1 + (3 * step + 2 * index + replica) % 5 for index in range(4) for replica in range(2)]
        used = [(step + at) % 3 for length in lengths for at in range(length)]
        for index in weights:
            weights[index] -= 0.25 * 2.0 * used.count(index) / len(used)
    return {name: [pytest.approx(weights[index], rel=1e-12)] for index, name in enumerate(("first", "second", "third"))}


def test_a_pipeline_trains_on_sequences_of_changing_length(pool):
    expected = right_weights()
    for found in pool.run(6, train_with_changing_lengths, list(ShapeExchange), timeout=240.0):
        assert set(found) == set(ShapeExchange)
        for mode, weights in found.items():
            assert weights == {name: expected[name] for name in weights}, mode


def ask_ahead(rank: int, world_size: int) -> None:
    """Rank 1 asks for three messages of two shapes before it takes the first; only what it knows can come ahead."""
    transport = Transport([TWO_STAGES], ShapeExchange.ONCE, CPU, Traffic(), TIMEOUT)
    shapes = ((2, 5), (2, 5), (1, 3), (2, 5))
    for step in range(2):
        if rank == 1:
            for index, shape in enumerate(shapes):
                transport.start_receiving(StartReceivingActivation(1, index, 0), shape)
        for index, shape in enumerate(shapes):
            expected = hidden_states(shape, step, index, torch.float32)
            if rank == 0:
                transport.send(SendActivation(0, index, 1), expected, shape)
            else:
                assert torch.equal(transport.receive(ReceiveActivation(1, index, 0), shape), expected)
        transport.end_step()


def test_messages_may_be_asked_for_ahead_before_their_shape_is_known(pool):
    pool.run(2, ask_ahead)


def send_back(rank: int, world_size: int) -> None:
    """An activation from the last rank to the first, as only the second of two programs does it."""
    interleaved = small_program(Strategy(topology=Topology(pp=2), schedule="VPP", virtual_stages=2))
    transport = Transport([TWO_STAGES, interleaved], ShapeExchange.ONCE, CPU, Traffic(), TIMEOUT)
    expected = hidden_states((2, 5), 0, 0, torch.float32)
    if rank == 1:
        transport.send(SendActivation(1, 0, 0), expected, (2, 5))
    else:
        assert torch.equal(transport.receive(ReceiveActivation(2, 0, 1), (2, 5)), expected)
    transport.end_step()


def test_a_transport_has_the_ways_of_all_its_programs(pool):
    pool.run(2, send_back)


def wait_in_vain(rank: int, world_size: int) -> str:
    """Rank 1 waits for what rank 0 never sends, although rank 0 is alive."""
    transport = Transport([TWO_STAGES], ShapeExchange.ONCE, CPU, Traffic(), timedelta(seconds=1))
    message = ""
    if rank == 1:
        with pytest.raises(CommunicationError) as error:
            transport.receive(ReceiveActivation(1, 3, 0), (2, 5))
        message = str(error.value)
    dist.barrier()
    return message


def test_a_message_that_does_not_come_is_named(pool):
    _, message = pool.run(2, wait_in_vain)
    assert "rank 1 waited for the activation of micro-batch 3 at stage 1 from rank 0, which did not come" in message


def evaluated_while_messages_travel(rank: int, world_size: int, strategy: Strategy) -> list[Any]:
    """The weights after two steps, and the losses of an evaluation in the midst of each, if there is one."""
    model = Weights(stages=(("first",), ("second",)))
    program = build_forward_program(strategy, model.layout(strategy), 3, activation_bytes=0)
    # Rank 0 has sent two activations, of which rank 1 has taken one, and is receiving the other if it does so ahead.
    moment = SendActivation(0, 1, 1) if rank == 0 else Forward(1, 0)
    given = [Token(1.0, 0), Token(2.0, 1)]
    found: list[Any] = []
    for evaluates in (False, True):
        losses: list[float] = []
        worker = start_worker(rank, strategy, model, evaluation=program)

        def observe(action: Action, worker=worker, evaluates=evaluates, losses=losses) -> None:
            if evaluates and action == moment:
                losses.append(float(worker.evaluate(program, [micro_batch_of(given)] * 3).loss))

        for step in range(2):
            worker.step([micro_batch_of([Token(4.0, index % 2)]) for index in range(3)], 0.25 * step, observe)
        (stage,) = worker.stages.values()
        found.append(({name: weight.tolist() for name, weight in stage.parameters_by_name().items()}, losses))
    return found


@pytest.mark.parametrize("ahead", [False, True], ids=["when needed", "ahead"])
def test_an_evaluation_does_not_take_the_messages_of_the_step_around_it(pool, ahead):
    strategy = exact(Strategy(topology=Topology(pp=2), micro_batches=3, receive_ahead=ahead))
    for undisturbed, evaluated in pool.run(2, evaluated_while_messages_travel, strategy):
        assert evaluated[0] == undisturbed[0]
        assert undisturbed[1] == []
        # Weights are 1 in both: the first step has moved nothing.
        assert evaluated[1] == [3 * (1.0 + 2.0)] * 2


def reduce_alone(rank: int, world_size: int) -> str:
    """Rank 0 steps, rank 1 does not."""
    message = ""
    worker = start_worker(rank, exact(Strategy(topology=Topology(dp=2))), Weights(), timeout=timedelta(seconds=1))
    if rank == 0:
        with pytest.raises(CommunicationError) as error:
            worker.step([micro_batch_of([Token(1.0)])], 0.1)
        message = str(error.value)
    dist.barrier()
    return message


def test_a_collective_that_others_do_not_join_is_named(pool):
    message, _ = pool.run(2, reduce_alone)
    assert "rank 0 waited for the number of valid tokens on every replica, which did not come" in message
