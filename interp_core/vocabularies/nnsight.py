"""nnterp's accessors, and nnsight's module paths.

nnterp: read off ndif-team/nnterp, ``nnterp/standardized_transformer.py`` and ``nnterp/rename_utils.py``: accessors
read the first element of a module's input or output, under names that are the same for every family.

nnsight has no names of its own: a name is a path through the module tree of transformers, then ``.input`` or
``.output``. Three trees are tables here; a test compares them with the modules of transformers.
"""

from __future__ import annotations

from typing import Final

from interp_core.vocabularies.records import Name, NoName, NotAPoint, Vocabulary

__all__ = ["NNSIGHT_TREES", "NNTERP"]

_INSIDE: Final = "it is formed inside attention, and no module gives it"
_CAPTURE: Final = "capture_attention, or nnterp's attention_probabilities"
_FUSED: Final = "one projection gives queries, keys and values together"
_ROUTER: Final = "a router returns logits, weights and indices together, in an order that differs by family"
_ROUTER_NEAR: Final = "the output of path.<module path of the router>"
_NO_NAME: Final = "nnterp has no accessor for it"
_NO_GATE: Final = "no family of this tree gates its attention"
_NO_QK_NORM: Final = "no family of this tree norms queries and keys"
_MULTIPLIER: Final = "the multiplier is applied outside any module"
_RAW: Final = "nnsight's own path, such as model.layers[3].self_attn.o_proj.input on Llama"


def _unnamed(points: str, why: str, near: str) -> tuple[NoName, ...]:
    return tuple(NoName(point=point, why=why, near=near) for point in points.split())


_SCALED: Final = (
    NoName(point="attn_out_post", when=("scaled",), why=_MULTIPLIER, near="attn_out times the multiplier"),
    NoName(point="mlp_out_post", when=("scaled",), why=_MULTIPLIER, near="mlp_out times the multiplier"),
)

NNTERP: Final = Vocabulary(
    library="nnterp",
    title="nnterp",
    names=(
        Name(name="token_embeddings", point="embeddings"),
        Name(name="embed_tokens.output", point="embeddings"),
        Name(name="layers_input[{layer}]", point="resid_pre"),
        Name(name="layers[{layer}].input", point="resid_pre"),
        Name(name="attentions_input[{layer}]", point="attn_in"),
        Name(name="layers[{layer}].self_attn.input", point="attn_in"),
        Name(name="attention_probabilities[{layer}]", point="attn_probs", note="with enable_attention_probs=True"),
        Name(name="attentions_output[{layer}]", point="attn_out"),
        Name(name="layers[{layer}].self_attn.output", point="attn_out"),
        Name(name="attentions_output[{layer}]", point="attn_out_post", when=("no_attn_post_norm", "unscaled")),
        Name(name="mlps_input[{layer}]", point="mlp_in", when=("mlp_module",), near="path.<module path of fc1>"),
        Name(name="layers[{layer}].mlp.input", point="mlp_in", when=("mlp_module",)),
        Name(name="mlps_output[{layer}]", point="mlp_out", when=("mlp_module",), near="path.<module path of fc2>"),
        Name(name="layers[{layer}].mlp.output", point="mlp_out", when=("mlp_module",)),
        Name(name="mlps_output[{layer}]", point="mlp_out_post", when=("mlp_module", "no_mlp_post_norm", "unscaled")),
        Name(name="layers_output[{layer}]", point="resid_post"),
        Name(name="layers[{layer}].output", point="resid_post"),
        Name(name="ln_final.output", point="final_norm"),
        Name(name="lm_head.output", point="lm_head"),
        Name(name="logits", point="lm_head", when=("bare_logits",), near="lm_head, which is before them"),
    ),
    others=(
        NotAPoint(name="ln_final", why="it is a module", near="ln_final.output, which is final_norm"),
        NotAPoint(name="lm_head", why="it is a module", near="lm_head.output"),
        NotAPoint(name="embed_tokens", why="it is a module", near="token_embeddings, which is embeddings"),
        NotAPoint(name="layers[{layer}]", why="it is a module", near="layers_output[N], which is resid_post"),
        NotAPoint(name="attentions[{layer}]", why="it is a module", near="attentions_output[N], which is attn_out"),
        NotAPoint(name="mlps[{layer}]", why="it is a module", near="mlps_output[N], which is mlp_out"),
        NotAPoint(name="next_token_probs", why="it is computed from logits", near="lm_head, at the last position"),
        NotAPoint(name="input_ids", why="token ids are the request's own input", near="model.to_tokens"),
        NotAPoint(
            name="attention_mask", why="it is the request's own input", near="attention_mask=... of run_with_cache"
        ),
    ),
    unnamed=(
        *_unnamed("q_norm_in q_norm_out k_norm_in k_norm_out value z attn_gate resid_mid", _NO_NAME, _RAW),
        *_unnamed("mlp_pre mlp_pre_linear mlp_act router_logits expert_weights expert_indices", _NO_NAME, _RAW),
        *_unnamed("attn_scores", _INSIDE, "attention_probabilities[N], their softmax"),
        *_unnamed(
            "attn_out_post mlp_out_post", _NO_NAME, "the output of the norm behind the sublayer, by nnsight's path"
        ),
    ),
    flexible=True,
)
"""Accessors of ``StandardizedTransformer``, and module paths under its names."""


def _llama(name: str, point: str, *when: str, note: str = "") -> Name:
    return Name(name="model.layers[{layer}]." + name, point=point, when=when, note=note)


_PER_FAMILY: Final = "some families call it with heads in front of positions"

_LLAMA: Final = Vocabulary(
    library="nnsight",
    title="nnsight on Llama's tree",
    # Their modules have exactly these names; families that fuse projections or name norms otherwise are not here.
    families=frozenset(
        "llama mistral qwen2 qwen3 gemma gemma2 gemma3_text olmo olmo2 olmo3 granite smollm3 seed_oss cwm helium "
        "ernie4_5 arcee exaone4 nemotron mixtral qwen2_moe qwen3_moe olmoe".split()
    ),
    names=(
        Name(name="model.embed_tokens.output", point="embeddings"),
        _llama("input", "resid_pre"),
        _llama("input_layernorm.input", "resid_pre", "attn_pre_norm"),
        _llama("self_attn.input", "attn_in"),
        _llama("input_layernorm.output", "attn_in", "attn_pre_norm"),
        _llama("self_attn.q_norm.input", "q_norm_in", "qk_norm", note=_PER_FAMILY),
        _llama("self_attn.q_norm.output", "q_norm_out", "qk_norm", note=_PER_FAMILY),
        _llama("self_attn.k_norm.input", "k_norm_in", "qk_norm", note=_PER_FAMILY),
        _llama("self_attn.k_norm.output", "k_norm_out", "qk_norm", note=_PER_FAMILY),
        _llama("self_attn.v_proj.output", "value", note="flat over key/value heads there"),
        _llama("self_attn.o_proj.input", "z", note="flat over heads there"),
        _llama("self_attn.output", "attn_out"),
        _llama("self_attn.o_proj.output", "attn_out"),
        _llama("post_attention_layernorm.output", "attn_out_post", "attn_post_norm"),
        _llama("self_attn.output", "attn_out_post", "no_attn_post_norm", "unscaled"),
        _llama("post_attention_layernorm.input", "resid_mid", "no_attn_post_norm", "mlp_pre_norm"),
        _llama("post_attention_layernorm.input", "attn_out", "attn_post_norm"),
        _llama("pre_feedforward_layernorm.input", "resid_mid", "attn_post_norm", "mlp_pre_norm"),
        _llama("mlp.input", "mlp_in"),
        _llama("mlp.input", "resid_mid", "no_mlp_pre_norm"),
        _llama("post_attention_layernorm.output", "mlp_in", "no_attn_post_norm", "mlp_pre_norm"),
        _llama("pre_feedforward_layernorm.output", "mlp_in", "attn_post_norm", "mlp_pre_norm"),
        _llama("mlp.gate_proj.output", "mlp_pre", "gated", "dense"),
        _llama("mlp.up_proj.output", "mlp_pre", "ungated", "dense"),
        _llama("mlp.up_proj.output", "mlp_pre_linear", "gated", "dense"),
        _llama("mlp.down_proj.input", "mlp_act", "dense"),
        _llama("mlp.output", "mlp_out"),
        _llama("mlp.down_proj.output", "mlp_out", "dense"),
        _llama("post_feedforward_layernorm.output", "mlp_out_post", "mlp_post_norm"),
        _llama("post_feedforward_layernorm.input", "mlp_out", "mlp_post_norm"),
        _llama("mlp.output", "mlp_out_post", "no_mlp_post_norm", "unscaled"),
        _llama("output", "resid_post"),
        Name(name="model.norm.output", point="final_norm"),
        Name(name="lm_head.output", point="lm_head"),
    ),
    unnamed=(
        *_unnamed("attn_scores attn_probs", _INSIDE, _CAPTURE),
        *_unnamed("attn_gate", _NO_GATE, "z"),
        *_unnamed("router_logits expert_weights expert_indices", _ROUTER, _ROUTER_NEAR),
        *_SCALED,
    ),
    module_output="{path}.output",
    flexible=True,
)


def _gpt(block: str, parts: dict[str, str]) -> tuple[Name, ...]:
    """The rows of a tree of layer norms and a plain MLP, whose modules differ in name only."""

    def row(name: str, point: str, *when: str) -> Name:
        return Name(name=f"{block}[{{layer}}].{name.format_map(parts)}", point=point, when=when)

    return (
        Name(name=parts["embed"] + ".output", point="embeddings"),
        row("input", "resid_pre"),
        row("{ln1}.input", "resid_pre"),
        row("{attn}.input", "attn_in"),
        row("{ln1}.output", "attn_in"),
        row("{attn}.{o}.input", "z"),
        row("{attn}.output", "attn_out"),
        row("{attn}.{o}.output", "attn_out"),
        row("{attn}.output", "attn_out_post"),
        row("{ln2}.input", "resid_pre", "parallel"),
        row("{ln2}.input", "resid_mid"),
        row("mlp.input", "mlp_in"),
        row("{ln2}.output", "mlp_in"),
        row("mlp.{up}.output", "mlp_pre"),
        row("mlp.{down}.input", "mlp_act"),
        row("mlp.output", "mlp_out"),
        row("mlp.{down}.output", "mlp_out"),
        row("mlp.output", "mlp_out_post"),
        row("output", "resid_post"),
        Name(name=parts["final"] + ".output", point="final_norm"),
        Name(name="lm_head.output", point="lm_head"),
    )


_GPT_UNNAMED: Final = (
    *_unnamed("q_norm_in q_norm_out k_norm_in k_norm_out", _NO_QK_NORM, "attn_scores"),
    *_unnamed("value", _FUSED, "the last third of the projection's output, or its part per head on GPT-NeoX"),
    *_unnamed("attn_scores attn_probs", _INSIDE, _CAPTURE),
    *_unnamed("attn_gate", _NO_GATE, "z"),
    *_unnamed("mlp_pre_linear", "this tree's MLP has no gate", "mlp_pre"),
    *_unnamed("router_logits expert_weights expert_indices", "no family of this tree has experts", "mlp_act"),
)

NNSIGHT_TREES: Final[tuple[Vocabulary, ...]] = (
    _LLAMA,
    Vocabulary(
        library="nnsight",
        title="nnsight on GPT-2's tree",
        families=frozenset({"gpt2"}),
        names=_gpt(
            "transformer.h",
            {
                "embed": "transformer.wte",
                "final": "transformer.ln_f",
                "ln1": "ln_1",
                "ln2": "ln_2",
                "attn": "attn",
                "o": "c_proj",
                "up": "c_fc",
                "down": "c_proj",
            },
        ),
        unnamed=_GPT_UNNAMED,
        module_output="{path}.output",
        flexible=True,
    ),
    Vocabulary(
        library="nnsight",
        title="nnsight on GPT-NeoX's tree",
        families=frozenset({"gpt_neox"}),
        names=_gpt(
            "gpt_neox.layers",
            {
                "embed": "gpt_neox.embed_in",
                "final": "gpt_neox.final_layer_norm",
                "ln1": "input_layernorm",
                "ln2": "post_attention_layernorm",
                "attn": "attention",
                "o": "dense",
                "up": "dense_h_to_4h",
                "down": "dense_4h_to_h",
            },
        ),
        unnamed=_GPT_UNNAMED,
        module_output="{path}.output",
        flexible=True,
    ),
)
"""Paths inside the wrapped model, one vocabulary per module tree."""
