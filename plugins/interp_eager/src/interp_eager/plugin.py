"""The entry point: what the eager backend is, without importing torch or transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from interp_core.backend import Availability, BackendSpec, OptionSpec
from interp_core.facts import ModelFacts
from interp_core.gradients import GradSupport
from interp_core.hookspecs import hookimpl
from interp_core.points import PointSupport, hook, recompute
from interp_eager.limits import limits

__all__ = ["interp_backends"]

POINTS: Mapping[str, PointSupport] = {
    **dict.fromkeys(
        "embeddings resid_pre attn_in q_norm_in q_norm_out k_norm_in k_norm_out value z attn_gate attn_out "
        "attn_out_post resid_mid mlp_in mlp_pre mlp_pre_linear mlp_act router_logits expert_weights mlp_out "
        "mlp_out_post resid_post final_norm".split(),
        hook(),
    ),
    "attn_scores": recompute(why="the softmax's input is not kept by the kernel"),
    "attn_probs": recompute(writable=True),
    "expert_indices": hook(writable=False, why="the router chooses the experts; write router_logits or expert_weights"),
    "lm_head": hook(writable=False, why="nothing of the model reads the logits"),
}

OPTIONS = (
    OptionSpec(
        name="requires_grad",
        help="Let weights require gradients, so that captures with detach=False stay in the graph.",
        types=(bool,),
        default=False,
    ),
    OptionSpec(
        name="attn_implementation",
        help="transformers' attention implementation; None lets transformers choose (eager where a softcap needs it).",
        types=(str,),
        choices=("eager", "sdpa"),
    ),
    OptionSpec(
        name="device_map",
        help="transformers' device_map: 'auto', 'balanced', ..., or a mapping from modules to devices (accelerate).",
        types=(str, Mapping),
    ),
    OptionSpec(name="max_memory", help="With device_map: how much memory each device may hold.", types=(Mapping,)),
    OptionSpec(
        name="quantization_config",
        help="One of transformers' quantisation configurations (bitsandbytes, GPTQ, AWQ, ...), or a dictionary of one.",
    ),
    OptionSpec(name="revision", help="Branch, tag or commit on the hub.", types=(str,)),
)

CAPABILITIES = frozenset("capture steer logit_lens raw_logits step_logits attention apply module_path".split())


@hookimpl
def interp_backends() -> Sequence[BackendSpec]:
    """The one backend of this plugin."""
    return [
        BackendSpec(
            name="eager",
            summary="Hugging Face transformers in this process, with Python hooks.",
            factory="interp_eager.backend:EagerBackend",
            probe=probe,
            points=POINTS,
            capabilities=CAPABILITIES,
            rank=10,
            options=OPTIONS,
            grad=grad_support,
            adopt="interp_eager.adoption:adopt",
            limits=limits,
            demo_model="interp_eager.demo_model:prepare",
        )
    ]


def probe() -> Availability:
    """Whether torch and transformers are installed; neither is imported."""
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        return Availability(False, f"{' and '.join(missing)} not installed: pip install interp-eager")
    return Availability(True)


def grad_support(facts: ModelFacts, options: Mapping[str, Any]) -> GradSupport:
    """Gradients flow where the weights were asked to require them and no quantised kernel stands between."""
    if facts.quantization or options.get("quantization_config") is not None:
        method = facts.quantization or "by quantization_config"
        return GradSupport(
            through_forward=False,
            blockers=(f"the weights are quantised ({method}), and quantised kernels have no backward",),
            remedy="load an unquantised checkpoint with requires_grad=True",
        )
    dtype = options.get("dtype", "auto")
    if facts.float16_overflows and (facts.dtype if dtype == "auto" else dtype) == "float16":
        return GradSupport(
            through_forward=False,
            blockers=("activations of this family pass the largest float16 number, so its gradients are no numbers",),
            remedy="load_model(..., dtype='bfloat16' or 'float32', requires_grad=True)",
        )
    if not options.get("requires_grad"):
        return GradSupport(
            through_forward=False,
            blockers=("the weights are frozen, so autograd records nothing",),
            remedy="load_model(..., backend='eager', requires_grad=True)",
        )
    caveats = ["captured tensors stay in the graph only with detach=False"]
    if options.get("dtype") == "float16":
        caveats.append("float16 gradients overflow easily; use bfloat16 or float32")
    return GradSupport(through_forward=True, caveats=caveats)
