"""What the Linux kernel counts: the memory of this process and of the machine, the bytes that an interface has sent."""

from __future__ import annotations

from pathlib import Path


def peak_resident_bytes() -> int:
    """The most memory that this process has had at a time, since its start or `restart_peak_resident_bytes`."""
    return _field("self/status", "VmHWM")


def restart_peak_resident_bytes() -> None:
    restart_peak = "5"
    Path("/proc/self/clear_refs").write_text(restart_peak)


def anonymous_bytes() -> int:
    """The memory of this process that is no page of a file: without the code of its libraries."""
    return _field("self/status", "RssAnon")


def peak_anonymous_bytes() -> int:
    """The most of it at a time, since `restart_peak_resident_bytes`; exact unless code was loaded since."""
    return peak_resident_bytes() - _field("self/status", "RssFile") - _field("self/status", "RssShmem")


def available_bytes() -> int:
    """The memory that this machine can still give to processes."""
    return _field("meminfo", "MemAvailable")


def sent_bytes(interface: str) -> int:
    """What all processes have sent through `interface` so far, headers included."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            received_columns = 8
            return int(counters.split()[received_columns])
    raise RuntimeError(f"this machine has no network interface `{interface}`")


def _field(file: str, name: str) -> int:
    for line in Path("/proc", file).read_text().splitlines():
        field, _, value = line.partition(":")
        if field == name:
            kibibytes = int(value.split()[0])
            return kibibytes * 1024
    raise RuntimeError(f"this system does not say {name}: Linux does, in /proc/{file}")
