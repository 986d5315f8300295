"""The link between two ranks on this machine: its loopback, or a wire of a chosen rate between two network namespaces.

with open_link("1gbit") as link:
    subprocess.Popen([*link.within(rank), ...], env={"GLOO_SOCKET_IFNAME": link.interface, ...})

A wire is a pair of virtual Ethernet interfaces, one in each namespace, whose sending side is held to the rate by a
token bucket (`tc ... tbf`). It can be reached from nowhere else, and it ends with the `with` statement.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

LOOPBACK = "loopback"
RATES = {"1gbit": "1gbit", "300mbit": "300mbit"}
"""In the words of tc: bits per second, each way."""
LINKS = (LOOPBACK, *RATES)

WIRE = "wire"
"""The interface of a wire, in either namespace."""
ADDRESSES = ("192.0.2.1", "192.0.2.2")
"""Of the two ends of a wire. Source: RFC 5737, addresses that no real host has."""
BURST = "256k"
"""Bytes that may pass at once: some of the largest segments that TCP hands down, some milliseconds of the rate."""
QUEUE = "50ms"
"""How long a byte may wait for its turn, by which tc sizes the queue: nothing is ever dropped."""


class LinkUnavailable(Exception):
    """This link cannot be had here; the message says why."""


@dataclass(frozen=True)
class Link:
    """Where the two ranks run, and how they reach each other."""

    name: str
    namespaces: tuple[str | None, str | None]
    """Of each rank; None is the machine itself."""
    interface: str
    address: str
    """Of rank 0."""

    def within(self, rank: int) -> list[str]:
        """The words before a command that runs it where `rank` belongs; the process itself becomes the command."""
        namespace = self.namespaces[rank]
        return ["ip", "netns", "exec", namespace] if namespace else []

    @property
    def is_shared(self) -> bool:
        """Whether both ranks send through one and the same interface."""
        return self.namespaces[0] == self.namespaces[1]


@contextmanager
def open_link(name: str) -> Iterator[Link]:
    """Make the link, and remove whatever was made for it in the end. Raises `LinkUnavailable`."""
    with ExitStack() as stack:
        yield _loopback(stack) if name == LOOPBACK else _wire(stack, name)


def _loopback(stack: ExitStack) -> Link:
    """In a namespace of its own where that can be had, so that the bytes of no other process are counted."""
    try:
        namespace: str | None = stack.enter_context(_namespace("loopback"))
    except LinkUnavailable:
        namespace = None
    return Link(LOOPBACK, (namespace, namespace), "lo", "127.0.0.1")


def _wire(stack: ExitStack, name: str) -> Link:
    first, second = (stack.enter_context(_namespace(f"{name}-{rank}")) for rank in range(len(ADDRESSES)))
    _run("ip", "link", "add", WIRE, "netns", first, "type", "veth", "peer", "name", WIRE, "netns", second)
    for namespace, address in zip((first, second), ADDRESSES, strict=True):
        inside = ("ip", "netns", "exec", namespace)
        _run(*inside, "ip", "address", "add", f"{address}/30", "dev", WIRE)
        _run(*inside, "ip", "link", "set", WIRE, "up")
        limit = ("rate", RATES[name], "burst", BURST, "latency", QUEUE)
        _run(*inside, "tc", "qdisc", "add", "dev", WIRE, "root", "tbf", *limit)
    return Link(name, (first, second), WIRE, ADDRESSES[0])


@contextmanager
def _namespace(purpose: str) -> Iterator[str]:
    """A network namespace that holds nothing but a loopback; what was put into it goes with it."""
    if os.geteuid() != 0:
        raise LinkUnavailable("only root may make network namespaces")
    if shutil.which("ip") is None:
        raise LinkUnavailable("network namespaces need `ip` and `tc` of iproute2")
    name = f"syncline-{os.getpid()}-{purpose}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        yield name
    finally:
        # Even where Ctrl-C came while it was made.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, start_new_session=True)


def _run(*command: str) -> None:
    # In a session of its own, which Ctrl-C does not reach: it is done or not, never half.
    done = subprocess.run(command, capture_output=True, text=True, start_new_session=True)
    if done.returncode:
        raise LinkUnavailable(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
