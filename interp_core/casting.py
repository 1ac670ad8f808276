"""Dtypes by name, and casts that lose precision only, never a value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interp_core.errors import RequestError, unknown_name
from interp_core.options import DTYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["cast", "read_dtype"]


def read_dtype(value: Any) -> torch.dtype:
    """A floating dtype from its name (``"bfloat16"``) or from itself.

    Raises:
        RequestError: it is no floating dtype.
    """
    import torch

    name = str(value).removeprefix("torch.")
    valid = [known for known in DTYPES if known != "auto"]
    if name not in valid:
        raise RequestError(unknown_name("dtype", name, valid))
    found: torch.dtype = getattr(torch, name)
    return found


def cast(tensor: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """``tensor`` in ``dtype``; tensors of integers (indices) stay as they are.

    Raises:
        RequestError: a finite value would become infinite.
    """
    if not tensor.is_floating_point() or tensor.dtype == dtype:
        return tensor
    done = tensor.to(dtype)
    if bool((done.isinf() & ~tensor.isinf()).any()):
        largest = float(tensor[tensor.isfinite()].abs().max())
        raise RequestError(f"{what} holds values up to {largest:.3g}, which {dtype} cannot; take bfloat16 or float32")
    return done
