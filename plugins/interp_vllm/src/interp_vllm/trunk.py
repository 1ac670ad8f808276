"""What an architecture says of its trunk in vLLM: where the tensors are, and what an engine or a worker needs first.

Named by ``Architecture(bindings={"vllm": "package.module:object"})``. Importable without vLLM and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_core.trunk import Trunk, trunk_of

if TYPE_CHECKING:
    from interp_core.architecture import Architecture
    from interp_core.profile import ModelProfile

__all__ = ["VllmTrunk", "own_trunk"]


class VllmTrunk(Trunk):
    """A trunk that vLLM runs by a class of its own. ``layout`` and ``bind`` run in the worker, on vLLM's modules.

    Tensors there have one row per token of a step, ``[tokens, ...]``, of all requests.
    """

    def arguments(self, profile: ModelProfile) -> dict[str, Any]:
        """Engine arguments that this trunk needs, in the caller's process, before vLLM reads the checkpoint.

        Raises:
            BackendUnavailable: vLLM cannot run this checkpoint, or not with these options; the message says why.
        """
        return {}

    def prepare(self, options: Mapping[str, Any]) -> None:
        """Make the worker's process ready, before the model is built. ``options`` are the architecture's own."""


def own_trunk(architecture: Architecture | None, backend: str) -> VllmTrunk | None:
    """The bindings of an architecture in vLLM; ``None`` for a trunk that the tables of this package know.

    Raises:
        BackendUnavailable: the trunk is no conventional one, and its architecture does not bind it here.
        TypeError: what it names is no :class:`VllmTrunk`.
    """
    if architecture is None:
        return None
    found = trunk_of(architecture, backend)
    if type(found) is Trunk:
        return None
    if not isinstance(found, VllmTrunk):
        raise TypeError(f"{architecture.bindings[backend]} of {architecture.name!r} is no VllmTrunk")
    return found
