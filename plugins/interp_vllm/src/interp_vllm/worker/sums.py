"""Writing a residual stream that vLLM carries in two halves, of which only the sum is ever used."""

from __future__ import annotations

import torch
from torch import Tensor

from interp_core.expressions import Expression, Read, Sum, leaves

__all__ = ["halves_of", "lives_here", "rewritten"]


def lives_here(expression: Expression) -> bool:
    """Whether a write's own tensor is at its last site, rather than a sum that the site only carries."""
    return not isinstance(expression, Sum) or len({(leaf.role, leaf.side) for leaf in leaves(expression)}) == 1


def halves_of(expression: Expression) -> tuple[Read, Read] | None:
    """The two halves, where both are tensors of one module call."""
    if isinstance(expression, Sum) and lives_here(expression):
        first, second = leaves(expression)
        return first, second
    return None


def rewritten(first: Tensor, second: Tensor, old: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Halves whose sum is ``new`` exactly, in the rows where that is not ``old``; the other rows as they are.

    Carrying the difference into one half would leave rounding where the sum should be zero, and the norm that
    follows makes numbers of ordinary size out of it.
    """
    changed = (new != old).any(-1, keepdim=True)
    return torch.where(changed, torch.zeros_like(first), first), torch.where(changed, new, second)
