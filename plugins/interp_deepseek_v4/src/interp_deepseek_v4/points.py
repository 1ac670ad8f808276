"""The points of a trunk with several residual streams, and what each description of such a trunk serves of them.

One shape fits every trunk here: ``X' = Mix X + write (x) sublayer(norm(collapse(X)))``, where ``X`` is a token's stack
of streams ``[streams, d_model]``. Nothing in this module imports torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from interp_core.points import GENERAL_POINTS, PointSpec, PointSupport, hook, recompute, unsupported

__all__ = ["COEFFICIENTS", "REFUSED", "STREAM_POINTS", "eager_support", "nowhere", "vllm_support"]

COEFFICIENTS: Final = "coefficients are computed from the streams for this one use; write resid_streams or a collapse"
_MIDDLE: Final = (
    "the stack between the sublayers flows past the module that reads it, so nothing could be replaced there; write "
    "resid_pre or resid_post of a stream, or a collapse"
)

_SITES: Final = {"attn": "attention", "mlp": "the MLP"}


def _point(name: str, axes: str, definition: str, *, writable: bool = False) -> PointSpec:
    return PointSpec(name=name, scope="layer", axes=axes.split(), definition=definition, writable=writable)


def _of_site(site: str, what: str) -> tuple[PointSpec, ...]:
    collapse = f"What {what} reads of the streams, before its norm: a learned weighted sum over them."
    return (
        _point(f"{site}_stream_collapse", "d_model", collapse, writable=True),
        _point(
            f"{site}_stream_write", "streams", f"Weights with which the output of {what} is written to each stream."
        ),
        _point(
            f"{site}_stream_mix",
            "streams streams",
            f"The matrix that remixes the streams around {what}: new = mix @ streams + write (x) output.",
        ),
    )


STREAM_POINTS: Final = (
    _point("resid_streams", "streams d_model", "The block's whole output stack.", writable=True),
    *_of_site("attn", _SITES["attn"]),
    *_of_site("mlp", _SITES["mlp"]),
)

REFUSED: Final[Mapping[str, str]] = {
    f"{site}_out_post": f"{site}_out and {site}_stream_write: the contribution to stream k is write[k] * {site}_out"
    for site in _SITES
}
"""General points that have no meaning where a contribution goes to several streams."""

_OWN: Final[Mapping[str, PointSupport]] = {
    p.name: hook() if p.writable else hook(writable=False, why=COEFFICIENTS) for p in STREAM_POINTS
}


def eager_support(
    hooked: Collection[str],
    *,
    read_only: Mapping[str, str] | None = None,
    rebuilt: Mapping[str, str] | None = None,
    lacking: Mapping[str, str] | None = None,
) -> dict[str, PointSupport]:
    """Support of every point on the eager backend.

    Args:
        hooked: general points that are read and written where they are.
        read_only: those that are only read, each with the reason.
        rebuilt: those that are rebuilt from others, each with the reason that they are not written.
        lacking: stream points that this trunk has not, each with the reason.
    """
    why = "the description of this trunk does not place this point; path.<module> reaches any module on eager"
    found = dict.fromkeys(GENERAL_POINTS, unsupported(why))
    found |= dict.fromkeys(hooked, hook())
    found |= {name: hook(writable=False, why=reason) for name, reason in (read_only or {}).items()}
    found |= {name: recompute(why=reason) for name, reason in (rebuilt or {}).items()}
    found |= {"resid_pre": hook(), "resid_post": hook(), "resid_mid": hook(writable=False, why=_MIDDLE)}
    found["lm_head"] = hook(writable=False, why="nothing of the model reads the logits")
    return {**found, **_OWN, **{name: unsupported(reason) for name, reason in (lacking or {}).items()}}


def vllm_support(
    hooked: Collection[str], *, read_only: Mapping[str, str], rebuilt: Mapping[str, str], lacking: Mapping[str, str]
) -> dict[str, PointSupport]:
    """Support of every point on vLLM with Python forwards; the arguments are those of :func:`eager_support`."""
    return {
        **eager_support(hooked, read_only=read_only, rebuilt=rebuilt),
        "lm_head": recompute(why="vLLM computes logits of sampled rows only; others are rebuilt from the final norm"),
        **{name: unsupported(reason) for name, reason in lacking.items()},
    }


def nowhere(why: str) -> dict[str, PointSupport]:
    """Support of every point where a backend cannot run the trunk, or not with hooks."""
    return dict.fromkeys((*GENERAL_POINTS, *(p.name for p in STREAM_POINTS)), unsupported(why))
