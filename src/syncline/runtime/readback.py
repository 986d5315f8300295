"""Numbers on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Starts copying scalars when it is made; `values` waits for these copies and for nothing that was queued after."""

    def __init__(self, *scalars: Tensor) -> None:
        together = torch.stack(scalars)
        self._arrived: torch.cuda.Event | None = None
        self._host = together.to("cpu", non_blocking=True)
        if together.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def values(self) -> list[float]:
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers
