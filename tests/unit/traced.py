"""Tiny models of every row of the table of families, and what is traced of one forward of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from attrs import frozen

from interp_core.contributions import Contributions
from interp_core.families import FAMILIES, FamilyFacts

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


LAYERS, WINDOW, TOKENS = 4, 4, 9
SLIDING_FULL = ["sliding_attention", "full_attention"] * 2
LINEAR_FULL = ["linear_attention", "full_attention"] * 2

# Any configuration's fields, made small. Heads are wider together than the residual, wherever they may be.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 40),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("sliding_window", "window_size"), WINDOW),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "mamba_n_groups", "n_groups"), 1),
    "decoder_layers": LAYERS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    # Other sizes than the decoder's, so that neither half is taken for the other.
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 80,
    "max_target_positions": 64,
    "is_encoder_decoder": False,
    "head_dim": 24,
    "vocab_size": 128,
    "rotary_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mamba_d_state": 8,
    "state_size": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_chunk_size": 8,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.1,
}


def _mrope(*sections: int) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections)}}


_TYPED = {"layer_types": SLIDING_FULL}
_LINEAR = {"layer_types": LINEAR_FULL}
_CAPS = {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0}

_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_INDEXED = {**_LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}

# What a family needs beside that: mixtures of layers, factors that are not 1, norms that are off by default.
NEEDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "hyperclovax"), _GRANITE),
    **{name: _mrope(2, 3, 3) for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")},
    **dict.fromkeys(("olmo3", "exaone4", "exaone_moe", "gpt_oss", "mellum", "cwm", "dots1", "ministral"), _TYPED),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _LINEAR),
    **{name: {"layer_types": ["conv", "full_attention"] * 2} for name in ("lfm2", "lfm2_moe")},
    **{name: {**_TYPED, **_CAPS} for name in ("gemma2", "gemma3_text", "vaultgemma")},
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "axk1", "youtu", "mistral4", "glm4_moe_lite"), _LATENT),
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), _INDEXED),
    "afmoe": {**_TYPED, "mup_enabled": True},
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.25},
    "cohere2": {**_TYPED, "logit_scale": 0.25},
    "cohere_compass_text": {
        **_TYPED,
        "logit_scale": 0.25,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _mrope(2, 3, 3)["rope_parameters"]),
        "head_dim": 16,
    },
    "glm4_moe": {"use_qk_norm": True},
    "glm4v_text": _mrope(2, 3, 3),
    "glm4v_moe_text": _mrope(2, 1, 1),
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    **{name: {**_TYPED, **_GRANITE} for name in ("granite_swa", "granitemoe_swa")},
    **dict.fromkeys(("laguna", "mimo_v2_flash"), _TYPED),
    "cohere2_moe": {**_TYPED, "logit_scale": 0.25},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1] * 4,
        "moe_layers": [1, 3],
        "attention_chunk_size": 8,
    },
    "helium": {"head_dim": 16},  # its output projection is as wide as the residual on both sides
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "minicpm3": {**_LATENT, "scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 32},
    "nanochat": {"final_logit_softcapping": 3.0},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "phi": {"qk_layernorm": True},
    "kimi_linear": {**_LATENT, **_LINEAR, "linear_head_dim": 16, "linear_num_heads": 4},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "attention_window_size": WINDOW, "lru_width": 64},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2, "mlp_only_layers": [0]},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 3},
    "qwen3_moe": {"use_sliding_window": True, "decoder_sparse_step": 2},
    "qwen3_vl_text": _mrope(4, 4, 4),
    "qwen3_vl_moe_text": _mrope(4, 4, 4),
    "smollm3": {"use_sliding_window": True, "no_rope_layer_interval": 2},
    "stablelm": {"qk_layernorm": True},
}
# Forms of a family that its configuration chooses between.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gpt_neox", {"use_parallel_residual": False}),
    ("stablelm", {"use_parallel_residual": True}),
    ("falcon", {"parallel_attn": False, "multi_query": False, "num_kv_heads": None}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"alibi": True}),
    ("gpt2", {"scale_attn_weights": False}),
    ("gpt_bigcode", {"multi_query": False}),
    ("cohere", {"use_qk_norm": False}),
    ("persimmon", {"qk_layernorm": False}),
    ("xglm", {"scale_embedding": False}),
    ("lfm2", {"block_auto_adjust_ff_dim": False}),
    ("hyperclovax", {"use_post_norm": False}),
    ("deepseek_v3", {"rope_parameters": {**_YARN, "mscale_all_dim": 0.7}}),
    ("youtu", {"rope_parameters": {**_YARN, "mscale_all_dim": 0.7}, "q_lora_rank": None}),
    ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 2}),
]
# No automatic class builds these.
ONLY_CLASS = {"emu3_text_model": "Emu3ForCausalLM", "qwen2_5_omni_text": "Qwen2_5OmniThinkerTextModel"}
# No class of transformers holds these text models outside of their wrappers: the run over all architectures has them.
HELD_BY_WRAPPERS = set(
    "chameleon cosmos3_edge_text deepseek_ocr2_text ernie4_5_vl_moe_text evolla glm_ocr_text granite4_vision_text "
    "hunyuan_vl_text kosmos_2_5_text_model mllama_text_model muse_glimmer_text paddleocr_vl_text qwen3_omni_moe_text "
    "step3p5".split()
)


def _conventional(row: FamilyFacts) -> bool:
    """Whether a block is what this trace can follow: the others are proven point by point on a backend."""
    unusual = (row.contributions != Contributions(), row.mixer_norms, "attn_post" in row.roles, row.factor_keys)
    return not any(unusual)


# Modules of these hold a sublayer together with the residual or its norms, or MLPs that are blocks of their own, or
# the trunk has no blocks that each run once: the eager backend's identities hold their rows, and its tests the paths.
HELD_BY_IDENTITIES = set(
    "bloom mpt ctrl dbrx moshi rwkv musicgen_decoder musicgen_melody_decoder prophetnet xlnet bert bert-generation "
    "big_bird git ernie roc_bert electra rembert roformer roberta camembert xlm-roberta data2vec-text xmod "
    "megatron-bert roberta-prelayernorm xlm-roberta-xl granitemoehybrid nemotron_h xlstm axk2 "
    "modernbert-decoder longcat_flash cpmant hrm_text reformer xlm".split()
)
HELD = HELD_BY_IDENTITIES | HELD_BY_WRAPPERS
TRACED = sorted(name for name, row in FAMILIES.items() if _conventional(row) and name not in HELD)
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in TRACED] + VARIANTS

MIXERS = (
    *("self_attn", "attn", "attention", "self_attention", "linear_attn", "mamba", "mixer", "conv"),
    "temporal_block",
)
MLPS = ("mlp", "feed_forward", "block_sparse_moe", "mlp_block")


@frozen(eq=False)
class Call:
    """One call of a module, copied when it returned."""

    module: Any
    given: Any
    made: Any


def tiny_config(model_type: str, **overrides: Any) -> Any:
    cls = transformers.CONFIG_MAPPING[model_type]
    fields = {field.name for field in dataclasses.fields(cls)}
    values = {name: value for name, value in SMALL.items() if name in fields}
    return cls(**{**values, **NEEDS.get(model_type, {}), **overrides})


def tiny_model(config: Any) -> Any:
    """A model in which nothing is trivially true: constants that initialisers leave are made random."""
    torch.manual_seed(0)
    if config.model_type in ONLY_CLASS:
        make = getattr(transformers, ONLY_CLASS[config.model_type])._from_config
    else:
        causal = type(config) in transformers.AutoModelForCausalLM._model_mapping
        make = (transformers.AutoModelForCausalLM if causal else transformers.AutoModel).from_config
    model = make(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def trace(model: Any, tokens: Any, **options: Any) -> tuple[dict[str, Call], Any]:
    """Every module's last call in one forward, by path, and the forward's own output."""
    calls: dict[str, Call] = {}

    def keep(path: str) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, made: Any) -> None:
            given = [kwargs.get("hidden_states"), *args]
            made = made[0] if isinstance(made, (tuple, list)) else made
            tensors = [value for value in given if isinstance(value, torch.Tensor)]
            if tensors and isinstance(made, torch.Tensor):
                calls[path] = Call(module, tensors[0].clone(), made.clone())

        return hook

    handles = [m.register_forward_hook(keep(path), with_kwargs=True) for path, m in model.named_modules()]
    try:
        with torch.no_grad():
            result = model(tokens, use_cache=False, **options)
    finally:
        for handle in handles:
            handle.remove()
    return calls, result


def block_path(model: Any, calls: dict[str, Call], n_layers: int) -> str:
    lists = [path for path, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == n_layers]
    called = [path for path in lists if f"{path}.0" in calls]
    return str(min(called, key=lambda path: path.count(".")))


def same(left: Any, right: Any) -> bool:
    if left.numel() != right.numel():
        return False
    return bool(torch.allclose(left.flatten(), right.flatten(), rtol=1e-4, atol=2e-5))


@frozen(eq=False)
class Block:
    """A block's own children, as the trace saw them."""

    before: Any
    after: Any
    mixer: Call | None
    mlp: Call | None
    norms: dict[str, Call]
    inside_mixer: dict[str, Call]
    inside_mlp: dict[str, Call]

    @classmethod
    def read(cls, calls: dict[str, Call], path: str) -> Block:
        children = {p.removeprefix(f"{path}."): call for p, call in calls.items() if p.startswith(f"{path}.")}
        own = {name: call for name, call in children.items() if "." not in name}
        mixer = next((name for name in MIXERS if name in own), "")
        mlp = next((name for name in MLPS if name in own), "")
        second = own.get(mlp)
        inside_mlp = {n: c for n, c in children.items() if n.startswith(f"{mlp}.")}
        if not mlp and "fc1" in own:
            second = Call(None, own["fc1"].given, own["fc2"].made)
            inside_mlp = {name: own[name] for name in ("fc1", "fc2")}
        return cls(
            calls[path].given,
            calls[path].made,
            own.get(mixer),
            second,
            {name: call for name, call in own.items() if "norm" in type(call.module).__name__.lower()},
            {n: c for n, c in children.items() if n.startswith(f"{mixer}.")},
            inside_mlp,
        )

    def normed_before(self, sublayer: Call) -> bool:
        return any(same(call.made, sublayer.given) for call in self.norms.values())

    def contribution(self, sublayer: Call) -> tuple[Any, bool]:
        """What the sublayer adds, before any factor, and whether a norm made it of the module's output."""
        for call in self.norms.values():
            if same(call.given, sublayer.made):
                return call.made.view_as(self.before), True
        return sublayer.made.view_as(self.before), False


def linears(calls: dict[str, Call]) -> Iterator[Call]:
    return (c for c in calls.values() if type(c.module).__name__ in ("Linear", "Conv1D", "FalconLinear"))


def case_id(case: Any) -> str:
    return case if isinstance(case, str) else "-".join(f"{k}={v}" for k, v in case.items())
