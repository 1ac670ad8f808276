"""Identity with transformers: what a bare hook on its own module sees of the kit's own checkpoints, and its logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from interp_core.checks import Check, difference
from interp_core.testing.served import Subject
from interp_core.testing.tiny import FAMILIES, Family

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["reference_identities"]


def reference_identities(subject: Subject, tolerance: float) -> Iterator[Check]:
    """Every served point that is one end of a module of transformers, against that module's own tensor."""
    seen, logits = _seen(subject)
    captured = subject.rows()
    for address, rows in captured.items():
        want = seen.get((address.name, address.layer))
        if want is None or address.coordinates:
            continue
        yield Check(
            identity=f"{address.name} is what a bare hook on transformers' own module sees",
            layer=address.layer,
            proves=(address.name,),
            error=_apart(rows, want),
            control=_apart(rows.roll(1, 0), want),
            tolerance=tolerance,
        )
    at, get = subject.profile.facts.n_layers - 1, subject.get()
    last, earlier = get("resid_post", at), get("resid_pre", at)
    if subject.profile.refusal("logit_lens") is None and last is not None:
        yield Check(
            identity="decode_residuals of the last resid_post are transformers' own logits",
            layer=None,
            proves=(f"resid_post.{at}",),
            error=difference(subject.model.decode_residuals(last), logits),
            control=None if earlier is None else difference(subject.model.decode_residuals(earlier), logits),
            tolerance=tolerance,
        )


def _apart(rows: Tensor, want: Tensor) -> float:
    """Heads apart or together, in front of positions or behind them: the numbers are compared."""
    if rows.dim() == 3 and want.dim() == 3 and rows.shape != want.shape:
        want = want.transpose(0, 1)
    if rows.numel() != want.numel():
        return float("inf")
    return difference(rows.flatten(), want.flatten())


def _seen(subject: Subject) -> tuple[dict[tuple[str, int | None], Tensor], Tensor]:
    """Tensors without their batch axis, by point and layer, and logits ``[pos, vocab]``."""
    import torch
    import transformers

    family: Family = FAMILIES[subject.name]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        subject.path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    seen: dict[tuple[str, int | None], Tensor] = {}
    places: list[tuple[str, int | None, Any, str]] = [
        ("embeddings", None, model.get_input_embeddings(), "out"),
        ("final_norm", None, model.get_submodule(family.final_norm), "out"),
        ("lm_head", None, model.get_output_embeddings(), "out"),
    ]
    for layer, block in enumerate(model.get_submodule(family.blocks)):
        places += [(name, layer, block.get_submodule(path), side) for name, (path, side) in family.modules.items()]
    for point, at, part, side in places:
        register = part.register_forward_pre_hook if side == "in" else part.register_forward_hook
        register(_keep(seen, (point, at), side), with_kwargs=True)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([subject.prompts[0]]), use_cache=False).logits[0]
    return seen, logits


def _keep(seen: dict[tuple[str, int | None], Tensor], key: tuple[str, int | None], side: str) -> Callable[..., None]:
    def hook(_module: Any, args: Any, kwargs: Any, out: Any = None) -> None:
        value = out if side == "out" else args[0] if args else kwargs["hidden_states"]
        tensor: Tensor = value[0] if isinstance(value, tuple) else value
        # Some modules of experts see tokens without a batch axis.
        seen[key] = (tensor[0] if tensor.shape[0] == 1 else tensor).detach().clone()

    return hook
