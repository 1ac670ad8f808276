"""What rows of several families share: a row is a base, or a base with what differs."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from interp_core.contributions import Contributions, Weights
from interp_core.family import Absence, FamilyFacts

__all__ = [
    "ADAPTER",
    "AFTER_ROTARY",
    "ALONE",
    "BART",
    "BERT",
    "BERT_PRE_NORMS",
    "BERT_ROLES",
    "CHAMELEON",
    "COHERE",
    "EXPERT_HEADS",
    "FEEDS",
    "GATED_HYBRID",
    "GEMMA",
    "GEMMA4",
    "GPT2",
    "GRANITE",
    "HYPERCLOVAX",
    "INSIDE",
    "LATENT",
    "LAYER_NORM",
    "LLAMA",
    "MAMBA",
    "MBART",
    "MIXED_AT_THE_INPUT",
    "MUSICGEN",
    "NORMS_AFTER_ROTARY",
    "POSITION_FACTOR",
    "POST_LN",
    "POST_NORM",
    "PROMPT_SLOTS",
    "QK_NORMS",
    "ROBERTA",
    "SANDWICH",
    "SHARED_BLOCK",
    "SLIDING",
    "TWO_HALVES",
    "TYPED",
]

LLAMA: Final = FamilyFacts()
TYPED: Final = FamilyFacts(windows="typed")
SLIDING: Final = FamilyFacts(windows="all")
GEMMA: Final = FamilyFacts(embedding_root=True)
POST_NORM: Final = FamilyFacts(attn_pre_norm=False, attn_post_norm=True, mlp_pre_norm=False, mlp_post_norm=True)
SANDWICH: Final = FamilyFacts(attn_post_norm=True, mlp_post_norm=True)
LAYER_NORM: Final = FamilyFacts(norm="layer", gated_mlp=False)
COHERE: Final = FamilyFacts(norm="layer", parallel=True, logit_multiplier_keys=("logit_scale",))
GRANITE: Final = FamilyFacts(embedding_scale_inside=False, logit_divisor_keys=("logits_scaling",))
HYPERCLOVAX: Final = evolve(GRANITE, logit_divisor_keys=(), logit_multiplier_keys=("logits_scaling",))
GPT2: Final = evolve(LAYER_NORM, positions="learned")
POST_LN: Final = evolve(
    GPT2, attn_pre_norm=False, mlp_pre_norm=False, norm_on_sum=True, final_norm=False, norm_eps=1e-5
)
BART: Final = evolve(POST_LN, embedding_root=True, embedding_root_key="scale_embedding", embedding_norm=True)
MBART: Final = evolve(GPT2, embedding_root=True, embedding_root_key="scale_embedding", norm_eps=1e-5)
MUSICGEN: Final = evolve(
    MBART,
    positions="other",
    embedding_root=False,
    ties=False,
    one_of={"num_codebooks": "rows of audio codes for each position, in place of one token"},
)
# Sublayers of these are spread over modules that also hold the residual and its norms.
BERT_ROLES: Final = {
    "attn": "attention.self",
    "attn.v_proj": "attention.self.value",
    "attn.o_proj": "attention.output.dense",
    "attn_sum_norm": "attention.output.LayerNorm",
    "mlp.up_proj": "intermediate.dense",
    "mlp.down_proj": "output.dense",
    "mlp_sum_norm": "output.LayerNorm",
}
BERT: Final = evolve(
    POST_LN,
    norm_eps=None,
    adds_residual=("attn", "mlp"),
    embedding_norm=True,
    embedding_types=True,
    head_transform=True,
    roles=BERT_ROLES,
    causal_keys={"is_decoder": True},
    requires={"chunk_size_feed_forward": 0},
)
ROBERTA: Final = evolve(BERT, positions_behind_pad=True)
BERT_PRE_NORMS: Final = evolve(BERT, attn_pre_norm=True, mlp_pre_norm=True, norm_on_sum=False, final_norm=True)
ADAPTER: Final = "an adapter of its own residual and norms stands between what the MLP adds and the block's output"
MAMBA: Final = FamilyFacts(windows="typed", mlp_pre_norm=False, positions="none")
GATED_HYBRID: Final = evolve(TYPED, qk_norm="head", attn_gate="packed")
LATENT: Final = FamilyFacts(yarn_scale=True)
INSIDE: Final = tuple(
    "attn_in value attn_scores attn_probs z attn_out attn_out_post resid_mid mlp_in mlp_pre mlp_pre_linear mlp_act "
    "router_logits expert_weights expert_indices mlp_out mlp_out_post".split()
)
TWO_HALVES: Final = (
    "each block of this family has two attentions, two MLPs, and experts that read in the first half and add to the "
    "second, so there is no one such tensor; on eager path.<module> reads any of them"
)
AFTER_ROTARY: Final = "queries and keys are normalised after the rotary embedding here, and this point is before it"
NORMS_AFTER_ROTARY: Final = dict.fromkeys(("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"), AFTER_ROTARY)
MIXED_AT_THE_INPUT: Final = {
    "expert_weights": "this family multiplies what the chosen experts read, and adds up what they give as it is: "
    "nothing is weighted behind them; router_logits, through a sigmoid, are the factors"
}
# JetMoE: mixtures of attention heads beside mixtures of MLPs, with one routing module for both.
EXPERT_HEADS: Final = {
    **dict.fromkeys(
        ("value", "attn_scores", "attn_probs", "z"),
        "queries and output projections are experts that each token chooses for itself, so that a head has no weights "
        "of its own",
    ),
    **dict.fromkeys(
        ("router_logits", "expert_weights", "expert_indices"),
        "the router of this family hands on the tokens sorted by expert, and what it gives has no row per token; on "
        "eager path.<module> reads its linear layer",
    ),
}
QK_NORMS: Final = ("q_norm_out", "k_norm_out")
CHAMELEON: Final = FamilyFacts(
    qk_norm="head",
    qk_norm_axes="merged",
    eps_behind=dict.fromkeys(QK_NORMS, 1e-5),
    centred_behind=QK_NORMS,
    masked_names=("vocabulary_map", "IMGIMG"),
)
POSITION_FACTOR: Final = "a factor on queries that grows with their position"
ALONE: Final = FamilyFacts(windows="typed", positions="none", gated_mlp=False)
# One transformer block, whose parameters several blocks share, feeds the state space of each of them.
FEEDS: Final = "attention and MLP of this block feed its state space, which alone is added to the residual"
SHARED_BLOCK: Final = FamilyFacts(
    windows="typed",
    positions="none",
    attn_scale_of=lambda width: (width / 2) ** -0.5,
    contributions=Contributions(attn_terms=("attn.fed",), mlp_reads="attn_out"),
    roles={
        "attn": "shared_transf.self_attn shared_transformer.self_attn mamba",
        "attn.fed": "mamba_decoder.mamba",
        "attn.v_adapter": "shared_transformer.self_attn.linear_v_adapter_list.{turn}",
        "mlp": "shared_transf.feed_forward shared_transformer.feed_forward",
        "mlp.gate_up_adapter": "shared_transformer.feed_forward.gate_up_proj_adapter_list.{turn}",
    },
    absent_in=(
        Absence(["mlp_out_post"], FEEDS, {"hybrid"}),
        Absence(["resid_mid"], f"{FEEDS}, so nothing lies between them", {"hybrid"}),
        Absence(
            ["attn_in"],
            "attention of this block reads the residual and the embeddings side by side, which is twice as wide",
            {"hybrid"},
        ),
    ),
)
PROMPT_SLOTS: Final = "rows stand for the slots of a learned prompt first, and only then for the tokens"
GEMMA4: Final = evolve(
    GEMMA,
    attn_post_norm=True,
    mlp_post_norm=True,
    windows="typed",
    qk_norm="head",
    final_softcap=True,
    attn_scale=1.0,
    requires={"use_bidirectional_attention": "vision"},
    # The block's output as a whole is multiplied by a weight of the checkpoint.
    contributions=Contributions(
        mlp_terms=("mlp_post_norm", "per_layer_input"),
        mlp_skip="learned",
        weights={"mlp": Weights("block", "layer_scalar"), "mlp_skip": Weights("block", "layer_scalar")},
    ),
    roles={
        "attn.v_norm": "self_attn.v_norm",
        "per_layer_input": "post_per_layer_input_norm",
        # The router and the experts stand in the block, beside the MLP.
        "mlp.router": "router",
        "mlp.router_logits": "router.proj",
        "mlp.experts": "experts",
    },
    absent_in=(
        Absence(
            ["mlp_in"],
            "the dense MLP and the experts of this block each read the residual through a norm of their own",
            mlp="sparse",
        ),
    ),
)
