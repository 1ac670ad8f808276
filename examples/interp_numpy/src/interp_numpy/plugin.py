"""The entry point: what this backend is. It imports neither NumPy nor torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from interp_core import Availability, BackendSpec, GradSupport, ModelFacts, PointSupport, hookimpl
from interp_core.points import hook, unsupported
from interp_numpy.shape import why_not

__all__ = ["interp_backends"]

_READS_ONLY = "this backend only reads: its forward takes no operations"
_READ = (
    "embeddings resid_pre attn_in value attn_scores attn_probs z attn_out attn_out_post resid_mid mlp_in mlp_pre "
    "mlp_pre_linear mlp_act mlp_out mlp_out_post resid_post final_norm lm_head"
).split()
_NOT_OF_A_LLAMA = "q_norm_in q_norm_out k_norm_in k_norm_out attn_gate router_logits expert_weights expert_indices"

POINTS: Mapping[str, PointSupport] = {
    **dict.fromkeys(_READ, hook(writable=False, why=_READS_ONLY)),
    **dict.fromkeys(_NOT_OF_A_LLAMA.split(), unsupported("this backend runs Llama's blocks, which have no such part")),
}


@hookimpl
def interp_backends() -> Sequence[BackendSpec]:
    """The one backend of this plugin."""
    return [
        BackendSpec(
            name="numpy",
            summary="Llama-shaped models in plain NumPy on a CPU, float32, read-only.",
            factory="interp_numpy.backend:NumpyBackend",
            probe=probe,
            points=POINTS,
            capabilities={"capture", "logit_lens", "raw_logits", "step_logits", "attention"},
            lacks={
                "steer": _READS_ONLY,
                "apply": _READS_ONLY,
                "module_path": "this backend has no tree of modules",
            },
            rank=None,
            grad=grad_support,
            limits=limits,
        )
    ]


def probe() -> Availability:
    """Whether what it needs is installed; nothing of it is imported."""
    missing = [name for name in ("numpy", "safetensors", "torch", "transformers") if find_spec(name) is None]
    return Availability(not missing, f"not installed: pip install {' '.join(missing)}" if missing else "")


def limits(facts: ModelFacts, options: Mapping[str, Any]) -> Mapping[str, PointSupport]:
    """No point at all, on a model that is not of Llama's shape."""
    reason = why_not(facts)
    return dict.fromkeys(POINTS, unsupported(reason)) if reason else {}


def grad_support(facts: ModelFacts, options: Mapping[str, Any]) -> GradSupport:
    """None."""
    return GradSupport(
        through_forward=False,
        blockers=("NumPy records no graph of what it computes",),
        remedy="load_model(..., backend='eager', requires_grad=True)",
    )
