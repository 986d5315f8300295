"""Whole launches: a launcher process, its ranks, real signals and real deaths."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from syncline.distributed.launch import launch

pytestmark = pytest.mark.command

SECONDS_TO_END = 15.0
"""Far above what an end takes, far below the 30 s that are promised."""

LAUNCHER = (
    "import sys; from syncline.distributed.launch import launch; sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"
)

RANK = """
import os, signal, sys, threading
from syncline.errors import UserError
from syncline.distributed.rank import join, leave, rank_environment, run_rank

environment = rank_environment()
rank = environment.rank

def ready():
    os.write(2, f"ready {{os.getpid()}}\\n".encode())

def joined():
    import torch, torch.distributed as dist
    join(environment, "cpu", timeout=60)
    dist.barrier()
    return torch, dist

def body():
{body}
    return 0

sys.exit(run_rank(environment, body))
"""

NOT_INHERITED = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "PYTHONUNBUFFERED")
"""The last one lets `print` write a line and its end apart, between which another rank's line may come."""

BLOCKED_IN_A_COLLECTIVE = """
torch, dist = joined()
ready()
if rank == 0:
    dist.all_reduce(torch.ones(1))  # rank 1 never comes
else:
    threading.Event().wait()
"""


class Launched:
    """A launcher running `body` on its ranks, in a process group of its own, as under a terminal."""

    def __init__(self, folder, body: str, ranks: int = 2, **variables: str) -> None:
        script = folder / "rank.py"
        script.write_text(RANK.format(body=textwrap.indent(body, "    ")))
        inherited = {k: v for k, v in os.environ.items() if k not in NOT_INHERITED}
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(ranks), str(script)],
            env={**inherited, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ready_ranks(self, count: int) -> list[int]:
        """File descriptors of the processes of `count` ranks, once each has written `ready` and its id to stderr."""
        assert self.process.stderr is not None
        ready: list[int] = []
        while len(ready) < count:
            line = self.process.stderr.readline()
            assert line, "the ranks ended before they were ready"
            if line.startswith("ready "):
                ready.append(os.pidfd_open(int(line.split()[1])))
        return ready

    def end(self) -> tuple[int, str, str]:
        """Exit status, stdout and stderr."""
        try:
            stdout, stderr = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, stdout, stderr


def assert_ended(ranks: list[int], within: float = 0.0) -> None:
    """A process descriptor becomes readable when its process ends."""
    deadline = time.monotonic() + within
    alive = [rank for rank in ranks if not select.select([rank], [], [], max(0.0, deadline - time.monotonic()))[0]]
    for rank in alive:
        signal.pidfd_send_signal(rank, signal.SIGKILL)
    for rank in ranks:
        os.close(rank)
    assert not alive


def test_success_streams_and_threads(tmp_path):
    body = """
print(f"stdout of {rank} of {environment.world_size} with {os.environ['OMP_NUM_THREADS']}")
print(f"stderr of {rank}", file=sys.stderr)
"""
    status, stdout, stderr = Launched(tmp_path, body).end()
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert status == 0
    assert stdout == f"stdout of 0 of 2 with {threads}\n"
    assert sorted(stderr.splitlines()) == ["stderr of 0", "stderr of 1", f"stdout of 1 of 2 with {threads}"]


def test_the_users_own_thread_count_stands(tmp_path):
    status, stdout, _ = Launched(tmp_path, "print(os.environ['OMP_NUM_THREADS'])", ranks=1, OMP_NUM_THREADS="7").end()
    assert (status, stdout) == (0, "7\n")


@pytest.mark.parametrize(
    ("death", "expected"),
    [
        ("raise LookupError('lost the thread')", ["LookupError: lost the thread", "rank 1 of 2 failed", "in body"]),
        ("os._exit(7)", ["rank 1 of 2 ended with status 7 and no message"]),
        ("os.kill(os.getpid(), signal.SIGKILL)", ["rank 1 of 2 was killed by SIGKILL"]),
    ],
)
def test_a_dead_rank_ends_the_command_and_is_named(tmp_path, death, expected):
    """Rank 0 waits in a collective for rank 1, which dies: rank 0's broken connection is not what is shown."""
    body = f"""
torch, dist = joined()
ready()
if rank == 1:
    {death}
dist.all_reduce(torch.ones(1))
"""
    launched = Launched(tmp_path, body)
    ranks = launched.ready_ranks(2)
    start = time.monotonic()
    status, stdout, stderr = launched.end()
    assert time.monotonic() - start < SECONDS_TO_END
    assert (status, stdout) == (1, "")
    assert all(text in stderr for text in expected), stderr
    assert "gloo" not in stderr
    assert "torch.distributed.elastic" not in stderr
    assert_ended(ranks)


def test_the_cause_is_shown_even_when_its_consequence_comes_first(tmp_path):
    """Rank 1 leaves the group long before it fails, so that rank 0 has ended by a broken connection by then."""
    body = """
torch, dist = joined()
if rank == 0:
    dist.all_reduce(torch.ones(1))
leave()
threading.Event().wait(0.5)
raise LookupError("the cause")
"""
    status, _, stderr = Launched(tmp_path, body).end()
    assert status == 1
    assert "rank 1 of 2 failed: LookupError: the cause" in stderr
    assert "gloo" not in stderr


def test_a_refused_request_is_one_line_and_status_2(tmp_path):
    body = "raise UserError('--steps 0', 'nothing would be trained', 'Give 1 or more.')"
    status, stdout, stderr = Launched(tmp_path, body).end()
    assert (status, stdout) == (2, "")
    assert stderr == "syncline: --steps 0: nothing would be trained. Give 1 or more.\n"


@pytest.mark.parametrize(("number", "to_group", "expected"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 143)])
def test_a_signal_ends_ranks_that_are_blocked_in_a_collective(tmp_path, number, to_group, expected):
    launched = Launched(tmp_path, BLOCKED_IN_A_COLLECTIVE)
    ranks = launched.ready_ranks(2)
    start = time.monotonic()
    if to_group:
        os.killpg(launched.process.pid, number)
    else:
        os.kill(launched.process.pid, number)
    status, _, stderr = launched.end()
    assert time.monotonic() - start < SECONDS_TO_END
    assert status == expected
    assert "Traceback" not in stderr
    assert_ended(ranks)


def test_no_orphans_when_the_launcher_is_killed(tmp_path):
    launched = Launched(tmp_path, BLOCKED_IN_A_COLLECTIVE)
    ranks = launched.ready_ranks(2)
    launched.process.kill()
    assert_ended(ranks, within=SECONDS_TO_END)
    assert launched.end()[0] == -signal.SIGKILL


def test_a_rank_that_ignores_its_end_is_killed(tmp_path):
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready()
threading.Event().wait()
"""
    launched = Launched(tmp_path, body, ranks=1)
    ranks = launched.ready_ranks(1)
    launched.process.terminate()
    assert launched.end()[0] == 143
    assert_ended(ranks)


def test_the_callers_signal_handlers_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert launch(["-c", ""], 1) == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
