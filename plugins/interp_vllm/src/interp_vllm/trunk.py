"""What an architecture says of its trunk in vLLM: where the tensors are, and what an engine or a worker needs first.

Named by ``Architecture(bindings={"vllm": "package.module:object"})``. Importable without vLLM and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from interp_core.trunk import TableTrunk, Trunk, trunk_of

if TYPE_CHECKING:
    from interp_core.architecture import Architecture
    from interp_core.profile import ModelProfile

__all__ = ["VllmTableTrunk", "VllmTrunk", "own_trunk"]


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


class VllmTableTrunk(TableTrunk, VllmTrunk):
    """A decoder that vLLM runs by a class of its own, whose modules are called as transformers' are: by tables alone.

    Blocks take and give the stream itself, ``[tokens, d_model]``, and attention and MLP are modules that take and give
    the same. vLLM's ``Attention`` layer is found inside the module of the role ``attn``.
    """


def own_trunk(architecture: Architecture | None, backend: str, *, hooks: bool = True) -> VllmTrunk | None:
    """The bindings of an architecture in vLLM; ``None`` for a trunk that the tables of this package know.

    Without ``hooks`` nothing is read or written, and a trunk that is not bound is one that vLLM knows.

    Raises:
        BackendUnavailable: the trunk is no conventional one, and its architecture does not bind it here.
        TypeError: what it names is no :class:`VllmTrunk`.
    """
    if architecture is None or not (hooks or backend in architecture.bindings):
        return None
    found = trunk_of(architecture, backend)
    if type(found) is Trunk:
        return None
    if not isinstance(found, VllmTrunk):
        raise TypeError(f"{architecture.bindings[backend]} of {architecture.name!r} is no VllmTrunk")
    return found
