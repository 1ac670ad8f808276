"""The entry point: DeepSeek-V4's trunk, described without importing torch.

Four residual streams run through every block. Each sublayer reads a learned weighted sum of them (its
*collapse*), and its output is written back to all of them while they are remixed. This version answers
what configuration answers; where the tensors are in each engine comes with a later one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import attrs

from interp_core.architecture import Architecture, Claim
from interp_core.facts import ModelFacts
from interp_core.hookspecs import hookimpl
from interp_core.points import PointSpec, PointSupport, hook, unsupported
from interp_core.residual import ResidualBasis

__all__ = ["interp_architectures"]

_COEFFICIENT: Final = "coefficients are computed from the streams for this one use; write resid_streams or a collapse"
_READ_ONLY = hook(writable=False, why=_COEFFICIENT)
_WRITABLE = hook()
_NO_GRAPH_TAP = unsupported("a compiled forward taps whole stacks of streams only")


def _point(name: str, axes: str, definition: str, *, writable: bool = False) -> PointSpec:
    return PointSpec(name=name, scope="layer", axes=axes.split(), definition=definition, writable=writable)


POINTS: Final = (
    _point("resid_streams", "streams d_model", "The block's whole output stack.", writable=True),
    *(
        point
        for site, what in (("attn", "attention"), ("mlp", "the MLP"))
        for point in (
            _point(
                f"{site}_stream_collapse",
                "d_model",
                f"The learned weighted sum over streams that {what} reads, before its norm.",
                writable=True,
            ),
            _point(
                f"{site}_stream_write", "streams", f"Weights with which the output of {what} is written to each stream."
            ),
            _point(f"{site}_stream_mix", "streams streams", f"The matrix that remixes the streams around {what}."),
        )
    ),
)

HOOKED: Final[Mapping[str, PointSupport]] = {p.name: _WRITABLE if p.writable else _READ_ONLY for p in POINTS}
STATIC: Final[Mapping[str, PointSupport]] = {
    p.name: _WRITABLE if p.name == "resid_streams" else _NO_GRAPH_TAP for p in POINTS
}


@hookimpl
def interp_architectures() -> Sequence[Architecture]:
    """The one trunk of this plugin."""
    return [
        Architecture(
            name="deepseek-v4",
            summary="DeepSeek-V4: four residual streams, hyper-connections, sparse attention, hash-routed experts.",
            claim=Claim(model_types={"deepseek_v4"}),
            facts=complete,
            points=POINTS,
            support={"eager": HOOKED, "vllm": HOOKED, "vllm-static": STATIC},
            stream_points=frozenset({"resid_pre", "resid_mid", "resid_post"}),
            residual_basis=basis,
        )
    ]


def complete(config: Any, facts: ModelFacts) -> ModelFacts:
    """Streams and block structure, which the configuration names in words of its own."""
    return attrs.evolve(facts, n_streams=int(config.hc_mult), structure_known=True, qk_norm="head", sinks=True)


def basis(facts: ModelFacts) -> ResidualBasis:
    """Several streams that every block mixes: no row of one of them is what the unembedding reads."""
    return ResidualBasis(
        n_streams=facts.n_streams,
        additive=False,
        sequential=True,
        lens_valid=False,
        blockers=(
            f"the trunk carries {facts.n_streams} residual streams",
            "every block remixes them, so contributions do not add up",
            "the unembedding reads a learned contraction of the streams, not any one of them",
        ),
        instead="name a reduction of the streams (mean, sum, one stream, or the model's own contraction head)",
    )
