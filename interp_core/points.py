"""The general points: what each tensor *is*, as data. Where it lives is each backend's affair.

The definitions are those of the shared point table of this project; ``docs/points.md`` is made from
this module, and every backend, the command line and the conformance kit read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import field, frozen

from interp_core.converters import as_tuple

__all__ = ["GENERAL_POINTS", "PointSpec", "PointSupport", "hook", "recompute", "unsupported"]

_MODES: Final = ("hook", "recompute", "none")


@frozen
class PointSupport:
    """How far one backend serves one point.

    Attributes:
        mode: ``"hook"`` (the tensor itself is read), ``"recompute"`` (rebuilt from tensors that
            are), or ``"none"``.
        writable: whether a write at this point can be served.
        why: the reason for ``"none"``, or for not being writable; empty if there is none to give.
        sharded: whether tensor parallelism splits the tensor over ranks.
    """

    mode: str = "none"
    writable: bool = False
    why: str = ""
    sharded: bool = False

    def __attrs_post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode {self.mode!r} is not one of {', '.join(_MODES)}")

    @property
    def readable(self) -> bool:
        """Whether the point can be read at all."""
        return self.mode != "none"


def hook(*, writable: bool = True, why: str = "", sharded: bool = False) -> PointSupport:
    """Support by reading the tensor itself, writable unless said otherwise."""
    return PointSupport("hook", writable, why, sharded)


def recompute(*, writable: bool = False, why: str = "", sharded: bool = False) -> PointSupport:
    """Support by rebuilding the tensor from others that are read."""
    return PointSupport("recompute", writable, why, sharded)


def unsupported(why: str) -> PointSupport:
    """No support, with the reason."""
    return PointSupport("none", False, why)


@frozen(kw_only=True)
class PointSpec:
    """What a point is, and, on a profile, how far each registered backend serves it.

    ``spec.support["vllm"]`` is a :class:`PointSupport`; ``spec.vllm`` is short for it.

    Attributes:
        name: the name used in addresses.
        scope: ``"trunk"`` (once per model) or ``"layer"``.
        axes: the last axes, after ``[batch, pos]``, or after ``[batch]`` for ``query`` and ``key``.
        definition: the exact tensor, in one sentence.
        writable: whether writing has a meaning at all; a backend may still refuse.
        integer: whether the values are integers (indices).
        owner: the distribution that defines the point.
        support: per backend name; empty outside a profile.
        absent: on a profile, layer (or ``None`` for the whole trunk) to the reason that it is not there.
    """

    name: str
    scope: str
    axes: tuple[str, ...] = field(converter=as_tuple)
    definition: str
    writable: bool = True
    integer: bool = False
    owner: str = "interp-core"
    support: Mapping[str, PointSupport] = field(factory=dict, eq=False)
    absent: Mapping[int | None, str] = field(factory=dict, eq=False)

    def __getattr__(self, name: str) -> PointSupport:
        # Called only for names that are not fields; pickling asks for dunder names before any field exists.
        if name.startswith("_") or name in ("support", "absent"):
            raise AttributeError(name)
        try:
            return self.support[name]
        except KeyError:
            known = ", ".join(sorted(self.support)) or "none (ask a model's or a profile's points())"
            raise AttributeError(f"no backend named {name!r} is registered; registered: {known}") from None

    @property
    def positional(self) -> bool:
        """Whether the tensor has one row per position (attention matrices have a pair of axes instead)."""
        return "query" not in self.axes


def _trunk(name: str, axes: str, definition: str, *, writable: bool = True) -> PointSpec:
    return PointSpec(name=name, scope="trunk", axes=axes.split(), definition=definition, writable=writable)


def _layer(name: str, axes: str, definition: str, *, writable: bool = True, integer: bool = False) -> PointSpec:
    return PointSpec(
        name=name, scope="layer", axes=axes.split(), definition=definition, writable=writable, integer=integer
    )


_TABLE: Final = (
    _trunk(
        "embeddings",
        "d_model",
        "Output of the token embedding module: with a scale that lives inside the module, without one that is "
        "applied outside it, and without position tables.",
    ),
    _layer("resid_pre", "d_model", "Input of the block; at layer 0 position embeddings and scaling are in it."),
    _layer("attn_in", "d_model", "Input of the attention module, after the pre-attention norm with its gain."),
    _layer("q_norm_in", "heads head_dim", "Input of the query norm, before rotary embedding."),
    _layer("q_norm_out", "heads head_dim", "Output of the query norm, before rotary embedding."),
    _layer("k_norm_in", "kv_heads head_dim", "Input of the key norm, before rotary embedding."),
    _layer("k_norm_out", "kv_heads head_dim", "Output of the key norm, before rotary embedding."),
    _layer("value", "kv_heads v_head_dim", "Value projection (or the value norm's output), per key/value head."),
    _layer(
        "attn_scores", "heads query key", "Scores after scaling, softcap and mask, before the softmax.", writable=False
    ),
    _layer("attn_probs", "heads query key", "Softmax of the scores, sinks in the denominator: rows may sum below 1."),
    _layer("z", "heads v_head_dim", "Input of the attention output projection, after the gate where there is one."),
    _layer("attn_gate", "heads v_head_dim", "Output of the attention gate projection, packed or separate."),
    _layer("attn_out", "d_model", "Raw output of the attention module's last projection."),
    _layer(
        "attn_out_post",
        "d_model",
        "Attention's contribution to the residual: after a post-norm and a residual multiplier; else attn_out.",
    ),
    _layer("resid_mid", "d_model", "Residual between attention and MLP."),
    _layer("mlp_in", "d_model", "Input of the MLP module, after the norm with its gain."),
    _layer("mlp_pre", "d_mlp", "Pre-activation: the gate branch of a gated MLP, else the first projection."),
    _layer("mlp_pre_linear", "d_mlp", "Linear branch of a gated MLP."),
    _layer("mlp_act", "d_mlp", "Input of the down projection: the neurons."),
    _layer("router_logits", "experts", "Router output before any softmax."),
    _layer("expert_weights", "top_k", "Weights that the chosen experts are mixed with, as the model scales them."),
    _layer(
        "expert_indices", "top_k", "The chosen experts, in the order of expert_weights.", writable=False, integer=True
    ),
    _layer("mlp_out", "d_model", "Raw output of the MLP or of the whole mixture of experts, shared experts included."),
    _layer("mlp_out_post", "d_model", "The MLP's contribution to the residual."),
    _layer("resid_post", "d_model", "Output of the block."),
    _trunk("final_norm", "d_model", "Output of the final norm, at every position."),
    _trunk("lm_head", "vocab", "Bare unembed output, before softcap and multiplier.", writable=False),
)

GENERAL_POINTS: Final[Mapping[str, PointSpec]] = MappingProxyType({spec.name: spec for spec in _TABLE})
"""The points of a conventional decoder, by name, in the order of the forward."""
