"""The tensors of one module call as rows of the step, whatever shape the module uses for them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from interp_core.errors import InterpError
from interp_core.expressions import Read
from interp_vllm.worker.shards import Shard

__all__ = ["Frame", "parameter_names"]


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's positional arguments, in order."""
    try:
        return tuple(inspect.signature(module.forward).parameters)
    except (TypeError, ValueError):
        return ()


class Frame:
    """One call's arguments, or its output.

    Reading gives rows of a request as they are now; writing replaces the tensor by a changed copy, so that no
    tensor of the model is changed in place.
    """

    def __init__(
        self,
        tokens: int,
        side: str,
        shard: Shard | None,
        *,
        names: tuple[str, ...] = (),
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        output: Any = None,
    ) -> None:
        self.tokens = tokens
        self.side = side
        self.shard = shard
        self.names = names
        self.args, self.kwargs, self.output = args, kwargs or {}, output
        self.changed: dict[int, Tensor] = {}

    def rows(self, leaf: Read, start: int, stop: int) -> Tensor:
        """Rows ``[stop - start, width]`` of a leaf, of all ranks. May be a view."""
        rows = self._view(leaf, self._tensor(leaf.slot))[start:stop].reshape(stop - start, -1)
        return rows if self.shard is None else self.shard.gather(rows)

    def put(self, leaf: Read, start: int, stop: int, rows: Tensor) -> None:
        """Put rows in the place of a request's own."""
        own = rows if self.shard is None else self.shard.own(rows)
        if leaf.slot not in self.changed:
            self.changed[leaf.slot] = self._tensor(leaf.slot).clone()
        place = self._view(leaf, self.changed[leaf.slot])[start:stop]
        place.copy_(own.reshape(place.shape))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The call's arguments with what was put, or ``None`` if nothing was."""
        if not self.changed:
            return None
        args, kwargs = list(self.args), dict(self.kwargs)
        for slot, tensor in self.changed.items():
            if slot < len(args):
                args[slot] = tensor
            else:
                kwargs[self._keyword(slot)] = tensor
        return tuple(args), kwargs

    def result(self) -> Any:
        """The call's output with what was put, or ``None`` if nothing was."""
        if not self.changed:
            return None
        if isinstance(self.output, Tensor):
            return self.changed[0]
        parts = list(self.output)
        for slot, tensor in self.changed.items():
            parts[slot] = tensor
        return type(self.output)(parts)

    def _tensor(self, slot: int) -> Tensor:
        if slot in self.changed:
            return self.changed[slot]
        if self.side == "output":
            found = self.output if isinstance(self.output, Tensor) else self.output[slot]
        elif slot < len(self.args):
            found = self.args[slot]
        else:
            found = self.kwargs.get(self._keyword(slot))
        if not isinstance(found, Tensor):
            raise InterpError(f"a module was called without a tensor as {self.side} {slot}")
        return found

    def _keyword(self, slot: int) -> str:
        if slot < len(self.names) and self.names[slot] in self.kwargs:
            return self.names[slot]
        if "hidden_states" in self.kwargs:
            return "hidden_states"
        return next((name for name, value in self.kwargs.items() if torch.is_tensor(value)), "")

    def _view(self, leaf: Read, tensor: Tensor) -> Tensor:
        """``[tokens, ...]``: with or without a batch axis of one, heads before or after positions."""
        if leaf.heads_first:
            tensor = tensor.transpose(-3, -2)
        if tensor.dim() > 2 and tensor.shape[0] == 1 and tensor.shape[1] == self.tokens:
            tensor = tensor[0]
        if tensor.shape[0] != self.tokens:
            raise InterpError(f"a tensor of shape {list(tensor.shape)} has no row for each of {self.tokens} tokens")
        return tensor
