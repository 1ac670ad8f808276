"""Training mode: dropout would change every result, and each time in another way."""

from __future__ import annotations

from torch import nn

from interp_core.errors import RequestError

__all__ = ["refuse_dropout"]


def refuse_dropout(model: nn.Module) -> None:
    """Refuse a model whose dropout is at work.

    Raises:
        RequestError: it is in training mode with dropout in it.
    """
    if any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in model.modules()):
        raise RequestError("the model is in training mode, and its dropout would change every result: model.eval()")
