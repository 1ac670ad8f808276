"""How a block puts its output together, where it is not the residual plus one module's output per sublayer."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from interp_core.converters import as_tuple

__all__ = ["Contributions", "Weights"]


@frozen
class Weights:
    """Parameters that a block applies itself, outside the forward of any module: ``(x + bias) * weight``.

    Attributes:
        role: the module that holds them.
        weight, bias: their names there; an empty name is none, and some blocks may lack them.
    """

    role: str
    weight: str
    bias: str = ""


@frozen(kw_only=True)
class Contributions:
    """What a block adds up. The defaults are the conventional block.

    Attributes:
        attn_terms, mlp_terms: roles whose outputs a sublayer adds to the residual, in the order of the forward; empty
            for the one that it usually is. A block without the module lacks the term.
        mlp_reads: the point that the MLP's norm reads, where it is not the residual.
        attn_skip, mlp_skip: what a sublayer's contribution is added to: empty for the residual itself, ``learned`` for
            the residual with parameters of the checkpoint applied, ``normed`` for the sublayer's own normed input,
            times ``LayerFacts.factors``.
        weights: parameters on a contribution (``attn``, ``mlp``) and on what it is added to (``attn_skip``,
            ``mlp_skip``).
    """

    attn_terms: tuple[str, ...] = field(default=(), converter=as_tuple)
    mlp_terms: tuple[str, ...] = field(default=(), converter=as_tuple)
    mlp_reads: str = ""
    attn_skip: str = ""
    mlp_skip: str = ""
    weights: Mapping[str, Weights] = field(factory=dict, hash=False)
