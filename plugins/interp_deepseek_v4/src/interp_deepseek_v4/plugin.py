"""The entry point: DeepSeek-V4 and the other trunks of several residual streams, described without importing torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from interp_core.architecture import Architecture, Claim
from interp_core.hookspecs import hookimpl
from interp_core.keywords import OptionSpec
from interp_deepseek_v4 import facts
from interp_deepseek_v4.points import REFUSED, STREAM_POINTS, eager_support, nowhere, vllm_support

__all__ = ["interp_architectures"]

_RESIDUALS: Final = frozenset({"resid_pre", "resid_mid", "resid_post"})
_SUBLAYERS: Final = ("embeddings", "attn_in", "attn_out", "mlp_in", "mlp_out", "final_norm")

_ROUTER: Final = (
    "the router returns logits, weights and indices together, so changed logits would not change the choice; write "
    "expert_weights"
)
_ROUTING: Final = {"router_logits": _ROUTER, "expert_indices": "indices are chosen by the router, and only read"}
_SHARED: Final = "the key and the value are one tensor here, and a write would change both; write k_norm_out"
_QK_NORMS: Final = ("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out")
_NEURONS: Final = ("mlp_pre", "mlp_pre_linear", "mlp_act")
_MATRICES: Final = {
    "attn_scores": "the scores are the softmax's input",
    "attn_probs": "attention matrices of trunks of several streams are read, and not written yet; write z",
}
_ONE_CONNECTION: Final = (
    "this trunk updates its streams once per block: mixed before attention (attn_stream_mix), written after the MLP "
    "(mlp_stream_write)"
)
_BY_TOKEN: Final = "hash-routed layers choose experts by token, so changed logits would not change the choice there"
_SPARSE: Final = (
    "vLLM's sparse attention kernel reads keys from an 8-bit cache, the chosen compressed entries among them, and "
    "keeps neither scores nor keys per query; use backend='eager'"
)
_KERNELS: Final = OptionSpec(
    name="reference_kernels",
    help="Run vLLM's own model through plain-torch kernels where this build lacks the compiled ones: exact, and slow.",
    types=(bool,),
    default=False,
)
_ELSEWHERE: Final = dict.fromkeys(
    ("vllm", "vllm-static"), nowhere("this trunk is described for the eager backend only; use backend='eager'")
)


@hookimpl
def interp_architectures() -> Sequence[Architecture]:
    """The trunks of this plugin."""
    return [DEEPSEEK_V4, *OTHERS]


DEEPSEEK_V4: Final = Architecture(
    name="deepseek-v4",
    summary="DeepSeek-V4: four residual streams, hyper-connections, sparse attention, hash-routed experts.",
    claim=Claim(model_types={"deepseek_v4"}),
    facts=facts.deepseek_v4,
    points=STREAM_POINTS,
    support={
        "eager": eager_support(
            (*_SUBLAYERS, *_QK_NORMS, "z", "expert_weights"),
            read_only=_ROUTING,
            rebuilt={"value": _SHARED, **_MATRICES},
        ),
        "vllm": vllm_support(
            (*_SUBLAYERS, "q_norm_in", "k_norm_in", "k_norm_out"),
            read_only={"router_logits": _BY_TOKEN},
            rebuilt={
                "value": _SHARED,
                "z": "vLLM undoes the rotation of heads inside the projection, so z is rebuilt; write attn_out",
                "q_norm_out": "vLLM norms and rotates queries in one kernel, so they are rebuilt; write q_norm_in",
                "expert_weights": "vLLM routes inside a fused kernel, so the weights are rebuilt and cannot be written",
                "expert_indices": "indices are rebuilt from the router's logits, or the table of token ids",
            },
            lacking=dict.fromkeys(("attn_scores", "attn_probs"), _SPARSE),
        ),
        "vllm-static": nowhere(
            "a compiled forward of this trunk is not described: its tensors are inside fused and opaque kernels; use "
            "backend='vllm'"
        ),
    },
    options=dict.fromkeys(("vllm", "vllm-generate"), (_KERNELS,)),
    refused=REFUSED,
    stream_points=_RESIDUALS,
    residual_basis=facts.basis,
    bindings={
        "eager": "interp_deepseek_v4.eager:deepseek_v4",
        **dict.fromkeys(("vllm", "vllm-generate"), "interp_deepseek_v4.vllm_trunk:deepseek_v4"),
    },
)


def _other(name: str, summary: str, model_types: set[str], **changed: object) -> Architecture:
    """A trunk that is described for transformers' modules."""
    values: dict[str, object] = {
        "facts": facts.several_streams,
        "support": {"eager": eager_support(_SUBLAYERS), **_ELSEWHERE},
        "bindings": {"eager": f"interp_deepseek_v4.eager:{name.replace('-', '_')}"},
        **changed,
    }
    return Architecture(
        name=name,
        summary=summary,
        claim=Claim(model_types=model_types),
        points=STREAM_POINTS,
        refused=REFUSED,
        stream_points=_RESIDUALS,
        residual_basis=facts.basis,
        **values,  # type: ignore[arg-type]
    )


OTHERS: Final = (
    _other(
        "glm5-next",
        "GLM-5 Next: hyper-connections, contracted by their mean.",
        {"glm5_next_text"},
        facts=facts.pooled_choice,
        support={
            "eager": eager_support(
                (*_SUBLAYERS, "z", *_NEURONS, "expert_weights"), read_only=_ROUTING, rebuilt=_MATRICES
            ),
            **_ELSEWHERE,
        },
    ),
    _other(
        "hy-v4",
        "HY-V4: independent hyper-connections, which do not remix the streams.",
        {"hy_v4"},
        facts=facts.gated_latent,
        support={
            "eager": eager_support(
                (*_SUBLAYERS, "z", "attn_gate", *_NEURONS, "expert_weights"), read_only=_ROUTING, rebuilt=_MATRICES
            ),
            **_ELSEWHERE,
        },
    ),
    _other(
        "qwen4-exp",
        "Qwen 4 Exp: gated residuals with a weight per channel, and no norm behind the contraction.",
        {"qwen4_exp_text"},
        facts=facts.without_final_norm,
        support={
            "eager": eager_support(
                (*_SUBLAYERS, *_QK_NORMS, "value", "z", "attn_gate", *_NEURONS, "expert_weights"),
                read_only=_ROUTING,
                rebuilt=_MATRICES,
            ),
            **_ELSEWHERE,
        },
    ),
    _other(
        "gemma3n",
        "Gemma 3n: alternating updates (AltUp), one per block.",
        {"gemma3n_text"},
        facts=facts.alternating,
        support={
            "eager": eager_support(
                (*_SUBLAYERS, *_QK_NORMS, "value", "z", *_NEURONS),
                rebuilt=_MATRICES,
                lacking=dict.fromkeys(("attn_stream_write", "mlp_stream_collapse", "mlp_stream_mix"), _ONE_CONNECTION)
                | {"resid_mid": "inside a block of this trunk there is one stream, the active one"},
            ),
            **_ELSEWHERE,
        },
    ),
)
