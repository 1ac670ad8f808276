"""Parts of a model that torch.compile made: hooks in them never fire, or are frozen into what it traced."""

from __future__ import annotations

from torch import nn

from interp_core.errors import RequestError

__all__ = ["refuse_compiled"]


def refuse_compiled(model: nn.Module) -> None:
    """Refuse a model that is compiled, or has a part that is, in whichever of the ways that there are.

    Raises:
        RequestError: with the path of a compiled part.
    """
    # Parts may be compiled at any time, so each request looks: a walk of its own is much faster than ``named_modules``.
    waiting = [model]
    while waiting:
        part = waiting.pop()
        children = part._modules
        # Wrapped in another module; in place; or only its forward.
        if "_orig_mod" in children or part._compiled_call_impl is not None or _replaced(vars(part).get("forward")):
            name = next(name for name, other in model.named_modules() if other is part)
            where = f" (compiled here: {name})" if name else ""
            raise RequestError(f"hooks on what torch.compile made never fire: give the model that was compiled{where}")
        waiting += [child for child in children.values() if child is not None]


def _replaced(forward: object) -> bool:
    """Whether a module's own forward is compiled; what is kept out of compilation carries its original as well."""
    if forward is None:
        return False
    return hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
