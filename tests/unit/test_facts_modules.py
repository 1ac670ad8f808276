"""Facts against real modules: every row of the table of families, on a tiny random model that is traced.

The truth here is what the modules compute, not what the tests' author remembers: widths are taken from
the tensors, norms from which output is whose input, factors from the sums that the block makes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from attrs import frozen

from interp_core.contributions import Contributions
from interp_core.facts import LayerFacts, ModelFacts
from interp_core.facts_reader import read_facts
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


@pytest.fixture(scope="module")
def tokens() -> Any:
    return torch.randint(5, 120, (2, TOKENS), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("model_type", "form"), CASES, ids=case_id)
def test_a_row_is_what_the_modules_compute(model_type: str, form: dict[str, Any], tokens: Any) -> None:
    config = tiny_config(model_type, **form)
    facts = read_facts(config)
    assert facts.structure_known, model_type
    assert (facts.model_type, facts.n_layers, len(facts.layers)) == (model_type, LAYERS, LAYERS)
    json.dumps(facts.describe())
    model = tiny_model(config)
    calls, result = trace(model, tokens)
    path = block_path(model, calls, LAYERS)
    for layer in facts.layers:
        block = Block.read(calls, f"{path}.{layer.index}")
        _check_residual(facts, layer, block)
        if layer.softmax:
            _check_attention(facts, layer, block)
        _check_mlp(facts, layer, block)
    _check_ends(facts, model, calls, Block.read(calls, f"{path}.0"), calls[f"{path}.{LAYERS - 1}"].made, result)


def _check_residual(facts: ModelFacts, layer: LayerFacts, block: Block) -> None:
    assert block.mixer is not None
    assert block.normed_before(block.mixer) == facts.attn_pre_norm
    if facts.norm_on_sum:
        _check_sums_that_are_normed(block)
        return
    added, post = block.contribution(block.mixer)
    assert post == facts.attn_post_norm
    total, raw = added, block.mixer.made.view_as(block.before)
    if layer.mlp == "none":
        assert block.mlp is None
    else:
        assert block.mlp is not None
        assert block.normed_before(block.mlp) == facts.mlp_pre_norm
        second, post = block.contribution(block.mlp)
        assert post == facts.mlp_post_norm
        total, raw = total + second, raw + block.mlp.made.view_as(block.before)
        normed = [call.given for call in block.norms.values() if same(call.made, block.mlp.given)]
        assert same((normed or [block.mlp.given])[0], block.before) == layer.parallel
    assert same(block.before + facts.residual_multiplier * total, block.after)
    if facts.attn_post_norm or facts.residual_multiplier != 1.0:
        assert not same(block.before + raw, block.after), "the raw outputs must not add up"


def _check_sums_that_are_normed(block: Block) -> None:
    assert block.mixer is not None
    assert block.mlp is not None
    first = block.before + block.mixer.made.view_as(block.before)
    middle = next(call.made for call in block.norms.values() if same(call.given, first))
    assert same(block.mlp.given, middle)
    second = middle + block.mlp.made.view_as(middle)
    assert same(next(call.made for call in block.norms.values() if same(call.given, second)), block.after)
    assert not same(second, block.after), "the sum itself must not be the output"


def _check_attention(facts: ModelFacts, layer: LayerFacts, block: Block) -> None:
    assert block.mixer is not None
    widths = {name.rsplit(".", 1)[-1]: call.made.shape[-1] for name, call in block.inside_mixer.items()}
    queries, keys = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    values = layer.n_kv_heads * layer.v_head_dim
    if facts.latent_attention:
        widths = _latent_widths(layer, widths)
    fused = [widths[name] for name in ("query_key_value", "qkv_proj", "c_attn") if name in widths]
    if fused:
        assert (fused, facts.attn_gate) == ([queries + keys + values], "")
    else:
        packed = 2 if facts.attn_gate == "packed" else 1
        assert (widths["q_proj"], widths["k_proj"], widths["v_proj"]) == (packed * queries, keys, values)
    assert ("gate_proj" in widths) == (facts.attn_gate == "separate")
    outputs = [call for call in linears(block.inside_mixer) if same(call.made, block.mixer.made)]
    assert [call.given.shape[-1] for call in outputs] == [layer.n_heads * layer.v_head_dim]
    own = {n: c for n, c in block.inside_mixer.items() if c.given.dim() > 2 and ".indexer." not in n}
    norms = {n.rsplit(".", 1)[-1]: c for n, c in own.items()}
    norms = {n: c for n, c in norms.items() if "norm" in n and "_a_" not in n and n != "groupnorm"}
    assert (norms.pop("attn_sub_norm", None) is not None) == facts.attn_sub_norm
    full = {queries, keys}
    kinds = {"full" if c.given.shape[-1] in full and c.given.dim() == 3 else "head" for c in norms.values()}
    assert kinds == ({facts.qk_norm} if facts.qk_norm else {"head"} if "q_norm_in" in facts.absent else set())
    assert hasattr(block.mixer.module, "sinks") == facts.sinks
    scaling = getattr(block.mixer.module, "scaling", None)
    if scaling is not None:
        assert scaling == pytest.approx(layer.head_dim**-0.5 if facts.attn_scale is None else facts.attn_scale)


def _latent_widths(layer: LayerFacts, widths: dict[str, int]) -> dict[str, int]:
    """Widths of what is projected from the latent vectors, under the names of what would be projected else."""
    queries = widths["q_b_proj"] if "q_b_proj" in widths else widths["q_proj"]
    nope, values = widths["kv_b_proj"] - layer.n_heads * layer.v_head_dim, layer.n_heads * layer.v_head_dim
    assert nope == layer.n_heads * 16
    assert widths["kv_a_proj_with_mqa"] == 20 + layer.head_dim - 16
    return {"q_proj": queries, "k_proj": nope + layer.n_heads * (layer.head_dim - 16), "v_proj": values}


def _check_mlp(facts: ModelFacts, layer: LayerFacts, block: Block) -> None:
    if block.mlp is None:
        assert layer.mlp == "none"
        return
    parameters = dict(block.mlp.module.named_parameters()) if block.mlp.module is not None else {}
    experts = [p for name, p in parameters.items() if p.dim() == 3 and "conv" not in name]
    assert bool(experts) == (layer.mlp == "sparse")
    if experts:
        assert {p.shape[0] for p in experts} == {layer.n_experts}
        assert any("shared" in name for name in parameters) == (layer.n_shared_experts > 0)
        assert (layer.top_k, layer.d_mlp) == (2, 0)
        return
    projections = list(linears(block.inside_mlp))
    down = [call for call in projections if same(call.made, block.mlp.made)]
    assert [call.given.shape[-1] for call in down] == [layer.d_mlp]
    ups = [call.made.shape[-1] for call in projections if call not in down]
    assert sum(ups) == layer.d_mlp * (2 if facts.gated_mlp else 1)


def _check_ends(facts: ModelFacts, model: Any, calls: dict[str, Call], first: Block, last: Any, result: Any) -> None:
    table = model.get_input_embeddings()
    assert tuple(table.weight.shape) == (facts.vocab_size, facts.d_model)
    embedded = next(call for call in calls.values() if call.module is table)
    plain = torch.nn.functional.embedding(embedded.given, table.weight)
    inside = facts.embedding_scale if facts.embedding_scale_inside else 1.0
    outside = facts.embedding_scale / inside
    assert same(inside * plain, embedded.made)
    if facts.embedding_norm:
        assert not same(outside * embedded.made, first.before), "a norm stands between"
    elif facts.positions in ("rotary", "none", "alibi"):
        assert same(outside * embedded.made, first.before)
    else:
        assert not same(outside * embedded.made, first.before), "a table of positions is added"
    normed = [call for call in calls.values() if same(call.given, last) and "Norm" in type(call.module).__name__]
    assert bool(normed) == facts.final_norm
    head = model.get_output_embeddings()
    if head is None:
        return
    assert (head.weight is table.weight) == facts.tied_embeddings
    unembedded = next(call for call in calls.values() if call.module is head)
    assert same(unembedded.given, normed[0].made * facts.head_scale if facts.final_norm else last)
    logits = unembedded.made * facts.logit_multiplier
    if facts.final_softcap is not None:
        logits = torch.tanh(logits / facts.final_softcap) * facts.final_softcap
    assert same(logits, result.logits)


WINDOWED = (
    *("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2"),
    *("gemma3_text", "vaultgemma", "cohere2", "olmo3", "ministral", "exaone4", "smollm3", "gpt_oss", "gpt_neo", "cwm"),
    *("dots1", "mellum", "exaone_moe", "afmoe", "qwen2_vl_text", "qwen2_5_vl_text"),
)
# No window is read by these, whatever their configuration says.
UNWINDOWED = ("llama", "gemma", "olmo2", "granite", "phi", "qwen3_vl_moe_text")


@pytest.mark.parametrize("model_type", WINDOWED + UNWINDOWED)
def test_a_window_leaves_exactly_as_many_keys(model_type: str, tokens: Any) -> None:
    form: dict[str, Any] = {"sliding_window": WINDOW} if model_type in UNWINDOWED else {}
    if model_type.endswith("vl_text"):
        form = {"use_sliding_window": True, "max_window_layers": 2}
    config = tiny_config(model_type, **form)
    facts = read_facts(config)
    windows = [layer.window for layer in facts.layers]
    assert (WINDOW in windows) == (model_type in WINDOWED)
    assert [layer.mixer == "sliding_attention" for layer in facts.layers] == [w is not None for w in windows]
    _, result = trace(tiny_model(config), tokens, output_attentions=True)
    seen = [int((probabilities[0, 0, -1] > 0).sum()) for probabilities in result.attentions]
    assert seen == [window or TOKENS for window in windows]


@pytest.mark.parametrize("model_type", ["gpt_neo", "opt", "biogpt"])
def test_the_factor_on_scores_where_no_module_names_it(model_type: str, tokens: Any) -> None:
    config = tiny_config(model_type)
    facts = read_facts(config)
    model = tiny_model(config)
    calls, result = trace(model, tokens, output_attentions=True)
    block = Block.read(calls, f"{block_path(model, calls, LAYERS)}.0")
    heads = facts.layers[0].n_heads
    made = {name.rsplit(".", 1)[-1]: call.made[0] for name, call in block.inside_mixer.items()}
    query, key = (made[name].view(TOKENS, heads, -1).transpose(0, 1) for name in ("q_proj", "k_proj"))
    scale = facts.head_dim**-0.5 if facts.attn_scale is None else facts.attn_scale
    scores = (query[:, -1:] @ key.transpose(1, 2)).squeeze(1)
    assert same(torch.softmax(scores * scale, dim=-1), result.attentions[0][0, :, -1])
    assert not same(torch.softmax(scores * scale * 2, dim=-1), result.attentions[0][0, :, -1])


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "vaultgemma"])
def test_an_attention_softcap_is_a_fact_only_where_it_acts(model_type: str, tokens: Any) -> None:
    logits = []
    for cap in (0.01, 50.0):
        config = tiny_config(model_type, attn_logit_softcapping=cap)
        assert read_facts(config).attn_softcap == (None if model_type == "gemma3_text" else cap)
        model = tiny_model(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    parameter.mul_(20)
        logits.append(trace(model, tokens)[1].logits)
    assert same(*logits) == (model_type == "gemma3_text")


def test_keys_and_values_that_later_layers_share() -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.CONFIG_MAPPING["gemma4_text"](
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        vocab_size=128,
        sliding_window=4,
        layer_types=layers,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
    )
    facts = read_facts(config)
    assert [layer.kv_shared_from for layer in facts.layers] == [None, None, None, 2, 1]
    assert [layer.head_dim for layer in facts.layers] == [16, 32, 16, 16, 32]
    assert [layer.window for layer in facts.layers] == [4, None, 4, 4, None]
    for layer, block in zip(facts.layers, tiny_model(config).model.layers, strict=True):
        assert (not hasattr(block.self_attn, "k_proj")) == (layer.kv_shared_from is not None)
        assert block.self_attn.q_proj.out_features == layer.n_heads * layer.head_dim
        assert block.mlp.down_proj.in_features == layer.d_mlp


@pytest.mark.parametrize("text", ["cohere", "granite", "gemma2"])
def test_a_wrapper_has_an_unembedding_of_its_own(text: str, tokens: Any) -> None:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    trunk = tiny_config(text)
    config = transformers.LlavaConfig(text_config=trunk, vision_config=vision)
    facts = read_facts(config)
    assert (facts.structure_known, facts.text_path, facts.outer_model_type) == (True, "text_config", "llava")
    assert (facts.logit_multiplier, facts.final_softcap) == (1.0, None)
    alone = read_facts(trunk)
    assert (alone.logit_multiplier, alone.final_softcap) != (1.0, None), "the text model alone scales or caps"
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    calls, result = trace(model, tokens)
    unembedded = next(call for call in calls.values() if call.module is model.get_output_embeddings())
    assert same(unembedded.made, result.logits)
