"""Direct logit attribution: what each sublayer, or each head, adds to a token's logit by itself.

The last residual is a sum of contributions, and behind it stand a norm and the unembedding. With the norm's divisor
held at what the whole residual has, both are linear: a contribution's share is its own unembedding times its own
divisor over the whole's, and all shares and a constant add up to the logit exactly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from interp_core.address import Address
from interp_core.backend import ModuleBackend
from interp_core.converters import as_tuple
from interp_core.errors import CapabilityUnsupported, RequestError
from interp_core.functions import decode_residuals, run_with_cache
from interp_core.metrics import read_token
from interp_core.scalars import whole_number
from interp_core.tokens import read_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache
    from interp_core.facts import ModelFacts
    from interp_core.model import InterpModel

__all__ = ["DirectAttribution", "direct_attribution"]


@frozen(kw_only=True, eq=False)
class DirectAttribution:
    """What contributes to a logit, or to the difference of two.

    Attributes:
        names: the contributions, in the order of the forward: ``resid_pre.0``, ``attn_out_post.0``, ... and
            ``constant`` (biases behind the last block); with heads ``z.0.head-0``, ..., ``attn bias.0``.
        shares: float32 ``[contributions]``: they add up to ``logit``.
        logit: the bare logit, before softcap and multiplier, or the difference of two.
    """

    names: tuple[str, ...] = field(converter=as_tuple)
    shares: Tensor
    logit: float

    def top(self, count: int = 10) -> list[tuple[str, float]]:
        """The contributions with the largest shares either way."""
        order = self.shares.abs().argsort(descending=True)[:count]
        return [(self.names[i], float(self.shares[i])) for i in order.tolist()]


def direct_attribution(
    model: InterpModel,
    tokens: Any,
    token: Any,
    *,
    against: Any = None,
    position: int = -1,
    heads: bool = False,
    steering: Any = None,
) -> DirectAttribution:
    """Shares of a token's logit at one position, by sublayer or by head.

    Args:
        model: a model with one additive residual stream, on a backend that gives raw logits.
        tokens: one prompt.
        token: the token, by its id or text.
        against: another token, whose logit is taken off.
        position: of the prompt; negative ones count from its end.
        heads: split each attention into its heads (eager only: it needs the weights of the output projection).
        steering: operations for this call.

    Raises:
        CapabilityUnsupported: the residual is no sum of contributions, what unembeds it is not linear behind its norm,
            or the backend lacks what is needed.
        RequestError: the prompt, the position or a token is not valid.
    """
    _require(model, heads)
    wanted = [read_token(model, token), *([] if against is None else [read_token(model, against)])]
    batch = read_tokens(tokens, model.facts)
    number = whole_number(position)
    length = batch.lengths[0]
    if not batch.single or number is None or not -length <= number < length:
        raise RequestError(f"direct_attribution takes one prompt and one of its positions, not {position!r}")
    terms = ["resid_pre.0"]
    for layer in range(model.n_layers):
        terms += [f"{name}.{layer}" for name in ("attn_out_post", "mlp_out_post") if _has(model, name, layer)]
    last = f"resid_post.{model.n_layers - 1}"
    extra = [f"z.{i}" for i in range(model.n_layers) if heads and _has(model, "z", i)]
    cache = run_with_cache(model, tokens, [*terms, last, *extra], positions=[number % length], steering=steering)
    rows: dict[str, Tensor] = {}
    for term in terms:
        rows |= _by_head(model, cache, term) if term.startswith("attn") and heads else {term: cache[term][0]}
    return _shares(model, rows, cache[last][0], wanted)


def _has(model: InterpModel, name: str, layer: int) -> bool:
    return model.profile.read_refusal(Address(name, layer)) is None


def _require(model: InterpModel, heads: bool) -> None:
    model.profile.require("raw_logits")
    model.profile.require("logit_lens")
    basis = model.residual_basis
    if not basis.additive:
        raise CapabilityUnsupported(
            capability="residual_stream",
            why="the residual of this trunk is not a sum of contributions: " + "; ".join(basis.blockers),
            instead="attribute(...), which asks for gradients instead",
            backend=model.backend,
            architecture=model.profile.architecture_name,
        )
    if model.facts.head_transform:
        raise CapabilityUnsupported(
            capability="logit_lens",
            why="layers of this model's head, which are not linear, stand between the residual and the unembedding",
            instead="attribute(...), which asks for gradients instead",
            backend=model.backend,
            architecture=model.profile.architecture_name,
        )
    if heads and not isinstance(model.session.backend(), ModuleBackend):
        raise CapabilityUnsupported(
            capability="module_path",
            why="splitting attention into heads needs the weights of its output projection, which are in the worker",
            instead="heads=False, or backend='eager'",
            backend=model.backend,
        )


def _by_head(model: InterpModel, cache: Cache, term: str) -> dict[str, Tensor]:
    """One layer's attention as its heads' contributions, and what its projection adds whatever they say."""
    import torch

    layer = int(term.rpartition(".")[2])
    backend = model.session.backend()
    if not _has(model, "z", layer) or not isinstance(backend, ModuleBackend):
        return {term: cache[term][0]}
    z = cache[f"z.{layer}"][0]
    n_heads = z.shape[1]
    alone = torch.eye(n_heads, dtype=z.dtype)[:, :, None] * z
    raw = backend.through("attn.o_proj", layer, torch.cat([alone, torch.zeros_like(z)]).flatten(1))
    parts = torch.cat([raw[:-1] - raw[-1:], raw[-1:]])
    whole = cache[term][0]
    if model.facts.attn_post_norm:
        # A norm of its own stands behind the sum: with its divisor held, its share of each part is linear too.
        sizes = _divisors(torch.cat([parts, parts.sum(0, keepdim=True)]), model.facts)
        normed = backend.through("attn_post_norm", layer, parts)
        nothing = backend.through("attn_post_norm", layer, torch.zeros_like(parts[:1]))
        parts = (normed - nothing) * (sizes[:-1] / sizes[-1:])
    parts = parts * model.facts.residual_multiplier
    named = {f"z.{layer}.head-{h}": parts[h : h + 1] for h in range(n_heads)}
    rest = whole - sum(named.values(), torch.zeros_like(whole))
    return {**named, f"attn bias.{layer}": rest}


def _divisors(rows: Tensor, facts: ModelFacts) -> Tensor:
    """What a norm divides each row by: ``[rows, 1]``."""
    values = rows.float()
    if facts.norm == "layer":
        values = values - values.mean(-1, keepdim=True)
    return (values.square().mean(-1, keepdim=True) + facts.norm_eps).sqrt()


def _shares(model: InterpModel, rows: dict[str, Tensor], whole: Tensor, wanted: list[int]) -> DirectAttribution:
    import torch

    stacked = torch.cat([*rows.values(), whole, torch.zeros_like(whole)])
    logits = decode_residuals(model, stacked).float()
    value = logits[:, wanted[0]] - (logits[:, wanted[1]] if len(wanted) == 2 else 0.0)
    constant, whole_logit = value[-1], value[-2]
    parts = value[:-2] - constant
    if model.facts.final_norm:
        sizes = _divisors(stacked, model.facts)[:, 0]
        parts = parts * sizes[:-2] / sizes[-2]
    return DirectAttribution(
        names=(*rows, "constant"), shares=torch.cat([parts, constant[None]]), logit=float(whole_logit)
    )
