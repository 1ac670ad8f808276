"""Worker extensions that put taps in the wrong place, as a fault of the plugin or of vLLM would."""

from __future__ import annotations

from typing import Any

from interp_vllm.worker import static
from interp_vllm.worker.ext import WorkerExtension

__all__ = ["SwappedTaps", "SwappedWrites"]


class SwappedTaps(WorkerExtension):
    """Two buffers are exchanged after the taps were made."""

    def interp_attach(self) -> list[Any]:
        answer = super().interp_attach()
        worker: Any = self
        buffers = worker._interp_tracker.static.buffers
        first, second = (address for address in buffers if address.layer in (1, 2))
        buffers[first], buffers[second] = buffers[second], buffers[first]
        return answer


class SwappedWrites(WorkerExtension):
    """Two tables are exchanged after the write sites were made."""

    def interp_attach(self) -> list[Any]:
        answer = super().interp_attach()
        worker: Any = self
        tables: dict[Any, static.ProgramTable] = worker._interp_tracker.static.tables
        first, second = (address for address in tables if address.layer in (1, 2))
        tables[first], tables[second] = tables[second], tables[first]
        return answer
