"""Layer norms and plain MLPs, norms on the sums, decoders of encoder-decoders, BERT and its kin, latent attention."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from interp_core.contributions import Contributions, Weights
from interp_core.families.bases import (
    ADAPTER,
    BART,
    BERT,
    BERT_PRE_NORMS,
    BERT_ROLES,
    GPT2,
    INSIDE,
    LATENT,
    LAYER_NORM,
    LLAMA,
    MBART,
    MUSICGEN,
    NORMS_AFTER_ROTARY,
    POSITION_FACTOR,
    POST_LN,
    ROBERTA,
    TWO_HALVES,
)
from interp_core.family import FamilyFacts

__all__ = ["ROWS"]

ROWS: Final[dict[str, FamilyFacts]] = {
    # Layer norms and plain MLPs
    "gpt2": evolve(GPT2, requires={"scale_attn_by_inverse_layer_idx": False}),
    "gpt_bigcode": GPT2,
    "gpt_neo": evolve(GPT2, windows="typed", attn_scale=1.0),
    "gpt_neox": evolve(LAYER_NORM, parallel_keys=("use_parallel_residual",)),
    "gptj": evolve(LAYER_NORM, parallel=True),
    "codegen": evolve(LAYER_NORM, parallel=True),
    "falcon": evolve(LAYER_NORM, parallel_keys=("parallel_attn", "new_decoder_architecture")),
    # The last block adds a bias to what attention gives.
    "gpt_neox_japanese": evolve(
        LAYER_NORM, contributions=Contributions(weights={"attn": Weights("attn", "", "dense_bias")})
    ),
    "jais2": LAYER_NORM,
    "nemotron": LAYER_NORM,
    "persimmon": evolve(LAYER_NORM, qk_norm="head", qk_norm_key="qk_layernorm"),
    "phi": evolve(LAYER_NORM, parallel=True, qk_norm="head", qk_norm_axes="heads", qk_norm_key="qk_layernorm"),
    "starcoder2": evolve(LAYER_NORM, windows="all"),
    "stablelm": FamilyFacts(
        norm="layer",
        parallel_keys=("use_parallel_residual",),
        qk_norm="head",
        qk_norm_axes="heads",
        qk_norm_key="qk_layernorm",
    ),
    "modernbert-decoder": FamilyFacts(
        norm="layer",
        windows="typed",
        embedding_norm=True,
        first_norms=("mlp_pre_norm",),
        head_transform=True,
        roles={"attn.o_proj": "attn.Wo", "mlp_pre_norm": "mlp_norm", "mlp.down_proj": "mlp.Wo"},
    ),
    # Two layer norms that the code builds without the configuration's epsilon
    "biogpt": evolve(GPT2, norm_eps=1e-5, embedding_root=True, embedding_root_key="scale_embedding"),
    "kosmos_2_5_text_model": evolve(
        LAYER_NORM,
        positions="other",
        embedding_root=True,
        embedding_root_key="scale_embedding",
        embedding_scale_inside=False,
        mlp_sub_norm=True,
    ),
    "xglm": evolve(
        LAYER_NORM, positions="other", norm_eps=1e-5, embedding_root=True, embedding_root_key="scale_embedding"
    ),
    "opt": evolve(
        GPT2,
        norm_eps=1e-5,
        requires={"do_layer_norm_before": True, "_remove_final_layer_norm": False},
        equal_keys=(("word_embed_proj_dim", "hidden_size"),),
    ),
    # Queries and keys are normalised after the rotary embedding; one more norm, or a residual factor by depth
    "hunyuan_v1_dense": evolve(LLAMA, absent=NORMS_AFTER_ROTARY),
    "hunyuan_vl_text": evolve(LLAMA, absent=NORMS_AFTER_ROTARY),
    "nanochat": FamilyFacts(
        gated_mlp=False,
        gainless=("attn_in", "mlp_in", "final_norm"),
        embedding_norm=True,
        final_norm_call=1,
        final_softcap=True,
        absent=NORMS_AFTER_ROTARY,
    ),
    "bitnet": evolve(LLAMA, attn_sub_norm=True, mlp_sub_norm=True),
    # Two maps of attention, one less a learned share of the other
    "diffllama": evolve(LLAMA, attn_difference=True),
    # Latent attention: keys and values of each head are expanded from one vector per token
    "youtu": LATENT,
    "minicpm3": evolve(LATENT, residual_depth_key="scale_depth", head_divisor_key="logits_scaling"),
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "axk1": LATENT,
    "longcat_flash": evolve(LATENT, n_layers_key="num_layers", absent=dict.fromkeys(INSIDE, TWO_HALVES)),
    "mistral4": evolve(LATENT, score_terms=POSITION_FACTOR),
    # Of the keys that a query may see, it attends to those that an indexer chooses
    "deepseek_v32": evolve(LATENT, key_budget_key="index_topk"),
    "glm_moe_dsa": evolve(LATENT, key_budget_key="index_topk"),
    "axk2": evolve(
        LATENT,
        key_budget_key="index_topk",
        gated_behind=("attn_in", "mlp_in"),
        attn_gate="packed",
        roles={"attn.q_proj": "self_attn.q_gate_proj"},
    ),
    # Position biases, and modules that return their output plus the residual
    "bloom": evolve(
        LAYER_NORM,
        activation="gelu_new",
        positions="alibi",
        adds_residual=("attn", "mlp"),
        embedding_norm=True,
        requires={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
    ),
    "mpt": evolve(
        LAYER_NORM,
        activation="gelu",
        positions="alibi",
        adds_residual=("mlp",),
        requires={"attn_config.clip_qkv": None},
    ),
    "ctrl": evolve(
        LAYER_NORM,
        norm_eps=1e-6,
        activation="relu",
        positions="other",
        embedding_root=True,
        embedding_scale_inside=False,
        roles={
            "attn": "multi_head_attention",
            "attn.v_proj": "multi_head_attention.Wv",
            "attn_in": "layernorm1",
            "mlp_pre_norm": "layernorm2",
            "mlp.up_proj": "ffn.0",
            "mlp.down_proj": "ffn.2",
        },
    ),
    # Norms on the sums. The first understands "gelu" as its approximation.
    "openai-gpt": evolve(POST_LN, norm_eps=None, activation_names={"gelu": "gelu_new"}),
    "bart": BART,
    "plbart": BART,
    "mvp": evolve(BART, embedding_scale_inside=False),
    "marian": evolve(BART, positions="other", embedding_scale_inside=False, embedding_norm=False),
    "blenderbot-small": evolve(BART, embedding_root=False),
    "trocr": evolve(BART, embedding_norm_key="layernorm_embedding"),
    # BERT and its kin, which are decoders where their configuration says so
    "bert": BERT,
    "ernie": BERT,
    "roc_bert": BERT,
    "bert-generation": evolve(BERT, embedding_types=False, head_transform=False),
    "git": evolve(BERT, embedding_types=False, head_transform=False, causal_keys={}),
    "big_bird": evolve(
        BERT,
        embedding_root=True,
        embedding_root_key="rescale_embeddings",
        embedding_scale_inside=False,
        causal_keys={"is_decoder": True, "attention_type": "original_full"},
    ),
    "electra": evolve(BERT, embedding_width_key="embedding_size"),
    "rembert": evolve(BERT, embedding_width_key="input_embedding_size", ties=False),
    "roformer": evolve(
        BERT,
        positions="rotary",
        embedding_width_key="embedding_size",
        requires={"chunk_size_feed_forward": 0, "rotary_value": False},
    ),
    "roberta": ROBERTA,
    "camembert": ROBERTA,
    "xlm-roberta": ROBERTA,
    "data2vec-text": ROBERTA,
    "xmod": evolve(
        ROBERTA,
        needs={"default_language": "through which of its adapters tokens go"},
        absent={"mlp_out_post": ADAPTER},
        requires={"chunk_size_feed_forward": 0, "pre_norm": False},
    ),
    "megatron-bert": evolve(BERT_PRE_NORMS, embedding_norm=False, roles={**BERT_ROLES, "mlp_pre_norm": "ln"}),
    "roberta-prelayernorm": evolve(
        BERT_PRE_NORMS, positions_behind_pad=True, roles={**BERT_ROLES, "mlp_pre_norm": "intermediate.LayerNorm"}
    ),
    "xlm-roberta-xl": evolve(
        BERT_PRE_NORMS,
        positions_behind_pad=True,
        embedding_norm=False,
        roles={**BERT_ROLES, "mlp_pre_norm": "LayerNorm"},
    ),
    # Decoders of encoder-decoders with norms before the sublayers. Whisper states a scale that its decoder never uses.
    "mbart": evolve(MBART, embedding_norm=True),
    "blenderbot": MBART,
    "bigbird_pegasus": evolve(MBART, ties=False),
    # Audio codes in place of text; of one codebook they are one sequence of tokens.
    "musicgen_decoder": MUSICGEN,
    "musicgen_melody_decoder": MUSICGEN,
    # Trained to see both ways. The other form, which no published checkpoint has, is not described.
    "xlnet": evolve(POST_LN, causal_keys={"attn_type": "uni"}, requires={"attn_type": "bi"}),
    "prophetnet": evolve(
        POST_LN,
        refused="its blocks carry several rows for each token, one for the token and one for each that it predicts "
        "ahead, so that there is no one row per position",
    ),
    "pegasus": evolve(MBART, positions="other", embedding_scale_inside=False),
    "whisper": evolve(MBART, embedding_root=False, embedding_root_key=""),
}
