"""What a model object may be asked to do, as one table of rows: what, why not, and what instead.

The core's rows are here; plugins add theirs by a hook, and ``interp_core.CAPABILITIES`` is the merged,
read-only table. A refusal takes its words from a row unless the refuser knows better ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from attrs import frozen

__all__ = ["CORE_CAPABILITIES", "Capability"]


@frozen(kw_only=True)
class Capability:
    """One thing that a model on a backend either does or refuses.

    Attributes:
        name: the row's name, used with ``model.supports(name)``.
        what: what it is, in one sentence.
        why: why some backends or trunks cannot do it.
        instead: what to call where it is refused.
        owner: the distribution that defines the row.
    """

    name: str
    what: str
    why: str
    instead: str
    owner: str = "interp-core"


_ROWS: Final = (
    Capability(
        name="capture",
        what="Read points during a forward: run_with_cache, capture_generation.",
        why="The backend runs no Python inside its forward and declares no taps, so nothing can be read.",
        instead="load the model with a backend that has hooks, such as load_model(..., backend='eager')",
    ),
    Capability(
        name="steer",
        what="Change points during a forward: steer(...), steering=..., and every operation.",
        why="The backend runs no Python inside its forward and declares no write sites, so nothing can be changed.",
        instead="load the model with a backend that has hooks, such as load_model(..., backend='eager')",
    ),
    Capability(
        name="read_point",
        what="Read this point, at this layer, on this model.",
        why="The block or the backend does not have this tensor.",
        instead="ask model.points() for what this model serves, and inspect spec.absent and spec.support",
    ),
    Capability(
        name="write_point",
        what="Write to this point, at this layer, on this model.",
        why="The tensor is not consumed by the rest of the forward, or a fused kernel swallows the write.",
        instead="write to a point that model.points() lists as writable, such as resid_post or attn_out",
    ),
    Capability(
        name="residual_stream",
        what="Treat resid_pre, resid_mid and resid_post as the one d_model-wide residual of a trunk.",
        why="This trunk carries several residual streams, so there is no single residual vector.",
        instead="name one stream, as in resid_post.5.stream-2, or read resid_streams",
    ),
    Capability(
        name="logit_lens",
        what="Decode a layer's residual through the final norm and the unembedding.",
        why="A row of this trunk's residual is not what the unembedding reads.",
        instead="read model.residual_basis.describe() for what to reduce or name first",
    ),
    Capability(
        name="raw_logits",
        what="decode_residuals(model, rows): logits without the family's softcap and multiplier.",
        why="The backend only exposes its own complete unembedding.",
        instead="model.decode_residuals(rows), which applies the family's softcap and multiplier on every backend",
    ),
    Capability(
        name="step_logits",
        what="Full-vocabulary logits at each step of generate_stream.",
        why="The backend keeps logits in its worker; only log-probabilities of the top tokens cross over.",
        instead="n_logprobs=K for the top K log-probabilities per step, or backend='eager'",
    ),
    Capability(
        name="attention",
        what="Attention scores and probabilities: capture_attention, attn_scores, attn_probs.",
        why="The backend fuses attention and keeps no matrices, or the layer has no softmax attention.",
        instead="backend='eager' or backend='vllm', on a layer whose mixer is softmax attention",
    ),
    Capability(
        name="apply",
        what="Apply(address, fn): an arbitrary callable as an operation.",
        why="A callable cannot be sent to another process safely.",
        instead="a data operation (Add, Scale, Cap, NormScaledAdd, Ablate, Swap, Replace), or backend='eager'",
    ),
    Capability(
        name="gradients",
        what="Gradients through the forward to captured tensors (detach=False).",
        why="Weights are frozen or the forward runs in another process, so autograd records nothing.",
        instead="load_model(..., backend='eager', requires_grad=True); see model.grad_support.describe()",
    ),
    Capability(
        name="module_path",
        what="path.<dotted.module.path>: any module of the model itself.",
        why="The backend's module tree is its own, and may not be reachable from this process.",
        instead="backend='eager', or a point from model.points()",
    ),
)

CORE_CAPABILITIES: Final[Mapping[str, Capability]] = MappingProxyType({row.name: row for row in _ROWS})
"""The core's own rows, by name."""
