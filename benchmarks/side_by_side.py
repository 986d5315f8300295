"""The reference job on 2 local ranks: Syncline in its forms beside torch DDP, FSDP2, DeepSpeed, Accelerate and others.

python benchmarks/side_by_side.py [--only NAME,...] [--link LINK,...] [--all-links NAME,...] [--repetitions N]
    [--json] [--write docs/benchmarks.md]

Each peer has two processes of its own. In a repetition every peer takes a turn, in an order drawn anew, while all
others wait: two steps in a row, of which the second is timed. The peers' libraries are installed into
outputs/benchmark-peers on first use. Links with a rate are made of network namespaces, which needs root.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

from kernel import available_bytes
from link import LINKS, LinkUnavailable, open_link
from peers.catalogue import PEERS, REFERENCE_PEER
from peers.environment import CannotInstall, peers_python
from peers.processes import Peer, PeerFailed, PeerProcesses, PeerRefused, TurnFigures, peer_processes
from ranks import RANKS
from reporting import LEAST_REPETITIONS, missing_section, pair_ratios, write_section
from side_by_side_report import report
from syncline.arguments.nearest import nearest

SECTION = "side_by_side"
WARM_UP_TURNS = 1
"""By then every library has the buffers that it keeps."""
LOSS_TOLERANCE = 1e-4
"""By how much, relatively, a peer's loss in its first step may differ from the others'."""
LEAST_AVAILABLE = 3 * 2**29
"""Bytes of memory that must be left before a peer starts or takes its turn, which needs less."""


class Unequal(Exception):
    """A peer does not train what the others train; the message names it."""


class TooLittleMemory(Exception):
    """Not all peers fit side by side."""


def main(words: list[str]) -> int:
    _end_well_on_signals()
    options = _options(words)
    try:
        rows = measure(options.only, options.link, options.all_links, options.repetitions)
    except (CannotInstall, PeerRefused, PeerFailed, Unequal, TooLittleMemory) as failure:
        _say(str(failure))
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if not rows:
        _say("nothing could be measured")
        return 1
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        print(report(rows))
    if options.write:
        write_section(options.write, SECTION, report(rows))
    return 0


def measure(
    names: Sequence[str], links: Sequence[str], on_all_links: Sequence[str], repetitions: int
) -> list[dict[str, Any]]:
    """A row for every peer and link, as plain JSON; peers that are not `on_all_links` are on the first one alone. What
    cannot be had here is left out, and said on stderr.

    Memory depends on the link as little as what is trained, and is measured on the first one.

    Raises:
        CannotInstall: when the peers' libraries cannot be had.
        PeerFailed: when a peer breaks.
        Unequal: when a peer computes another loss than the others.
        TooLittleMemory: when the peers do not fit into this machine together.
    """
    python = peers_python()
    alone: dict[str, TurnFigures] = {}
    rows: list[dict[str, Any]] = []
    for link in links:
        with _processes(link, python) as processes:
            if processes is None:
                continue
            side_by_side = [name for name in alone if name in on_all_links]
            if not alone:
                alone = _measure_alone(processes, names)
                side_by_side = list(alone)
            rows += _rows(link, alone, _take_turns(processes, link, side_by_side, repetitions))
    return rows


@contextmanager
def _processes(link: str, python: Path) -> Iterator[PeerProcesses | None]:
    """None where the link cannot be had."""
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(open_link(link))
        except LinkUnavailable as reason:
            _say(f"{link}: skipped: {reason}")
            yield None
            return
        yield stack.enter_context(peer_processes(opened, python))


def _measure_alone(processes: PeerProcesses, names: Sequence[str]) -> dict[str, TurnFigures]:
    """What a warm peer shows that runs alone, its freed memory going back to the system at once; by peer, those that
    refuse are left out.
    """
    alone: dict[str, TurnFigures] = {}
    first_losses: dict[str, float] = {}
    for name in names:
        try:
            with processes.peer(name, returns_memory=True) as peer:
                turns = [peer.take_turn() for _ in range(WARM_UP_TURNS + 1)]
        except PeerRefused as reason:
            _say(str(reason))
            continue
        alone[name], first_losses[name] = turns[-1], turns[0].losses[0]
        _say(f"{name}: peak {turns[-1].peak_bytes / 2**20:.0f} MiB, held {turns[-1].held_bytes / 2**20:.0f} MiB")
    _refuse_unequal(first_losses)
    return alone


def _take_turns(
    processes: PeerProcesses, link: str, names: Sequence[str], repetitions: int
) -> dict[str, list[TurnFigures]]:
    """All turns by peer, those of its warm-up first.

    A repetition is a turn of every peer, so that what disturbs the machine disturbs all.
    """
    with ExitStack() as stack:
        peers: dict[str, Peer] = {}
        turns: dict[str, list[TurnFigures]] = {}
        for name in names:
            _refuse_too_little_memory(len(peers))
            peers[name] = stack.enter_context(processes.peer(name))
            turns[name] = [peers[name].take_turn() for _ in range(WARM_UP_TURNS)]
            _say(f"{link}: {name} is warm")
        _refuse_unequal({name: each[0].losses[0] for name, each in turns.items()})
        order = random.Random(0)
        for repetition in range(repetitions):
            for name in order.sample(list(peers), len(peers)):
                _refuse_too_little_memory(len(peers))
                turns[name].append(peers[name].take_turn())
            _say(f"{link}: repetition {repetition + 1} of {repetitions}")
        return turns


def _rows(
    link: str, alone: Mapping[str, TurnFigures], turns: Mapping[str, Sequence[TurnFigures]]
) -> Iterator[dict[str, Any]]:
    timed = {name: each[WARM_UP_TURNS:] for name, each in turns.items()}
    seconds = {name: [turn.seconds for turn in each] for name, each in timed.items()}
    reference = seconds.get(REFERENCE_PEER)
    for name in turns:
        yield {
            "peer": name,
            "link": link,
            "step_seconds": median(seconds[name]),
            "bytes_sent": int(median(turn.bytes_sent for turn in timed[name])),
            "peak_bytes": alone[name].peak_bytes,
            "held_bytes": alone[name].held_bytes,
            "loss": timed[name][0].losses[-1],
            "first_loss": turns[name][0].losses[0],
            "ratio_to_ddp": median(pair_ratios(seconds[name], reference)) if reference else None,
            "seconds": seconds[name],
            "ranks": RANKS,
        }


def _refuse_unequal(losses: Mapping[str, float]) -> None:
    """Raises `Unequal` when the losses of the first step differ: then the peers do not train the same."""
    middle = median(losses.values()) if losses else 0.0
    unequal = {name: loss for name, loss in losses.items() if not abs(loss - middle) <= LOSS_TOLERANCE * abs(middle)}
    if unequal:
        listed = ", ".join(f"{name} {loss:.6f}" for name, loss in unequal.items())
        raise Unequal(
            f"not the same training: the first step's losses have the median {middle:.6f}, but there is {listed}"
        )


def _refuse_too_little_memory(running: int) -> None:
    """Raises `TooLittleMemory` before the kernel would end a process of whomever it likes."""
    available = available_bytes()
    if available < LEAST_AVAILABLE:
        raise TooLittleMemory(
            f"{running} peers run side by side, and {available / 2**30:.1f} GiB of memory are left: too little. "
            "Choose fewer with --only."
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _end_well_on_signals() -> None:
    """Let what ends this process by default end it as Ctrl-C does: processes and namespaces go with it."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` sets it
            signal.signal(number, _end)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def _options(words: list[str]) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument(
        "--only", action="extend", type=_peers, metavar="NAME,...", help=f"these peers: {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--link", action="extend", type=_links, metavar="LINK,...", help=f"on these links: {', '.join(LINKS)}"
    )
    parser.add_argument(
        "--all-links",
        action="extend",
        type=_peers,
        metavar="NAME,...",
        help="these peers on all links, the others on the first one alone: those that send most take minutes for a "
        "step on a slow link (default: all of them)",
    )
    parser.add_argument(
        "--repetitions",
        type=_count,
        default=LEAST_REPETITIONS,
        metavar="N",
        help="how often each peer takes its turn on each link (default, and the least for a confidence interval: "
        f"{LEAST_REPETITIONS})",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON, and nothing else")
    parser.add_argument("--write", type=_page, metavar="PAGE", help="write the section into this page")
    options = parser.parse_args(words)
    options.only = list(dict.fromkeys(options.only or PEERS))
    options.all_links = list(dict.fromkeys(options.all_links or options.only))
    if unknown := [name for name in options.all_links if name not in options.only]:
        parser.error(f"--all-links {unknown[0]} is not among the peers of --only")
    options.link = list(dict.fromkeys(options.link or LINKS))
    return options


def _peers(text: str) -> list[str]:
    return [_known(name, "peer", list(PEERS)) for name in text.split(",")]


def _links(text: str) -> list[str]:
    return [_known(name, "link", list(LINKS)) for name in text.split(",")]


def _known(name: str, kind: str, names: list[str]) -> str:
    if name not in names:
        raise argparse.ArgumentTypeError(f"no {kind} is called {name!r}; the nearest is {nearest(name, names)}")
    return name


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _page(text: str) -> Path:
    """Refused before anything is measured."""
    page = Path(text)
    missing = missing_section(page, SECTION)
    if missing:
        raise argparse.ArgumentTypeError(missing)
    return page


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
