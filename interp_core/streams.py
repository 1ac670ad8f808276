"""Reductions of a stack of residual streams to one row, as a lens needs them: named by the caller, never assumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from interp_core.errors import RequestError
from interp_core.scalars import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.profile import ModelProfile

__all__ = ["HEAD", "read_reduction", "reduced"]

HEAD: Final = "head"
"""The model's own contraction, with its learned weights."""

_NAMED: Final = ("mean", "sum", HEAD)


def read_reduction(reduction: Any, profile: ModelProfile) -> str | int | None:
    """A caller's reduction: ``"mean"``, ``"sum"``, ``"head"``, or the number of a stream (``2`` or ``"stream-2"``).

    Returns:
        The name or number; ``None`` on a trunk whose lens needs none.

    Raises:
        CapabilityUnsupported: the trunk has several streams and none was named, or the backend serves no lens.
        RequestError: it is no reduction, or this trunk has one stream.
    """
    streams = profile.facts.n_streams
    profile.require_lens(reduced=reduction is not None and streams > 1)
    if reduction is None:
        return None
    if streams == 1:
        raise RequestError(f"reduction={reduction!r}: this trunk has one residual stream, so nothing is reduced")
    if reduction in _NAMED:
        return str(reduction)
    number = reduction.removeprefix("stream-") if isinstance(reduction, str) else reduction
    stream = int(number) if isinstance(number, str) and number.isdecimal() else whole_number(number)
    if stream is None or not 0 <= stream < streams:
        raise RequestError(
            f"reduction={reduction!r} is none of {', '.join(map(repr, _NAMED))}, or a stream from 0 to {streams - 1}"
        )
    return stream


def reduced(stack: Tensor, reduction: str | int) -> Tensor:
    """``[rows, streams, d_model]`` as ``[rows, d_model]``; for ``"head"`` the stack, which the backend contracts."""
    if reduction == "mean":
        return stack.mean(dim=-2)
    if reduction == "sum":
        return stack.sum(dim=-2)
    if isinstance(reduction, int):
        return stack[..., reduction, :]
    return stack
