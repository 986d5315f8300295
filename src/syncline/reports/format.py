"""Numbers as people read them."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Three significant digits or so with a binary unit: `512 MiB`, `1.50 GiB`."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < 1024:
            break
        count, unit = count / 1024, larger
    return f"{count:.2f} {unit}" if unit in ("GiB", "TiB") and count < 100 else f"{count:.0f} {unit}"
