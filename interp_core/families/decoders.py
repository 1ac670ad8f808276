"""Llama and what is built like it: gated MLPs, RMS norms, rotary positions, and the variants of these."""

from __future__ import annotations

from typing import Final

from attrs import evolve

from interp_core.families.bases import (
    CHAMELEON,
    COHERE,
    GATED_HYBRID,
    GEMMA,
    GRANITE,
    HYPERCLOVAX,
    LLAMA,
    POSITION_FACTOR,
    POST_NORM,
    QK_NORMS,
    SANDWICH,
    SLIDING,
    TYPED,
)
from interp_core.family import FamilyFacts

__all__ = ["ROWS"]

ROWS: Final[dict[str, FamilyFacts]] = {
    # Llama and its kin
    "llama": LLAMA,
    "arcee": evolve(LLAMA, gated_mlp=False),
    "apertus": evolve(LLAMA, gated_mlp=False, qk_norm="head", qk_norm_axes="heads"),
    "cwm": TYPED,
    "ernie4_5": LLAMA,
    "helium": LLAMA,
    "ministral": TYPED,
    "ministral3": evolve(SLIDING, score_terms=POSITION_FACTOR),
    "mistral": SLIDING,
    "seed_oss": LLAMA,
    "smollm3": TYPED,
    "phi3": SLIDING,
    "phi4_multimodal": SLIDING,
    "emu3_text_model": LLAMA,
    "evolla": LLAMA,  # its adapters do nothing without a protein
    "mllama_text_model": LLAMA,
    "moshi": evolve(LLAMA, mlp_width_of_both=True, roles={"mlp.gate_up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}),
    "chameleon": evolve(
        CHAMELEON,
        requires={"swin_norm": False},
        otherwise=evolve(
            CHAMELEON,
            attn_pre_norm=False,
            attn_post_norm=True,
            mlp_pre_norm=False,
            mlp_post_norm=True,
            roles={"attn_post_norm": "input_layernorm", "mlp_post_norm": "post_attention_layernorm"},
        ),
    ),
    "cosmos3_edge_text": evolve(LLAMA, gated_mlp=False),
    "paddleocr_vl_text": LLAMA,
    # Qwen
    "qwen2": TYPED,
    "qwen2_vl_text": TYPED,
    "qwen2_5_vl_text": TYPED,
    "qwen2_5_omni_text": TYPED,
    "qwen3": evolve(TYPED, qk_norm="head"),
    "qwen3_vl_text": evolve(LLAMA, qk_norm="head"),
    "qwen3_5_text": GATED_HYBRID,
    # Gemma. Version 3 stores an attention softcap and never passes it on; its activations pass 65504 (issue 36822 of
    # transformers).
    "gemma": GEMMA,
    "gemma2": evolve(
        GEMMA, attn_post_norm=True, mlp_post_norm=True, windows="typed", attn_softcap=True, final_softcap=True
    ),
    "gemma3_text": evolve(
        GEMMA,
        attn_post_norm=True,
        mlp_post_norm=True,
        windows="typed",
        qk_norm="head",
        qk_norm_axes="heads",
        final_softcap=True,
        float16_overflows=True,
    ),
    "vaultgemma": evolve(GEMMA, windows="typed", attn_softcap=True, final_softcap=True),
    # OLMo. The first has norms without parameters, whose epsilon the code fixes.
    "olmo": evolve(LLAMA, norm="layer", norm_eps=1e-5, gainless=("attn_in", "mlp_in", "final_norm")),
    "olmo2": evolve(POST_NORM, qk_norm="full"),
    "olmo3": evolve(POST_NORM, qk_norm="full", windows="typed"),
    # Norms after the sublayer
    "exaone4": evolve(POST_NORM, qk_norm="head", qk_norm_axes="heads", windows="typed"),
    "glm": LLAMA,
    "glm4": SANDWICH,
    "glm4v_text": SANDWICH,
    "glm_ocr_text": SANDWICH,
    "muse_glimmer_text": evolve(
        SANDWICH,
        windows="typed",
        qk_norm="head",
        qk_norm_axes="heads",
        qk_norm_shared=True,
        gainless=QK_NORMS,
        eps_behind=dict.fromkeys(("attn_out_post", "mlp_out_post"), "post_norm_eps"),
        attn_gate="separate",
        roles=dict.fromkeys(("attn.q_norm", "attn.k_norm"), "self_attn.qk_norm"),
        logit_multiplier_keys=("output_multiplier",),
        final_softcap=True,
    ),
    # Parallel blocks with one norm, and logits with a factor
    "cohere": evolve(COHERE, qk_norm="head", qk_norm_key="use_qk_norm"),
    "cohere2": evolve(COHERE, windows="typed"),
    "cohere_compass_text": evolve(COHERE, windows="typed"),
    # Factors on the residual, embeddings and logits. One family divides the logits, the other multiplies.
    "granite": GRANITE,
    "granite4_vision_text": GRANITE,
    "hyperclovax": evolve(
        HYPERCLOVAX, attn_post_norm=True, mlp_post_norm=True, requires={"use_post_norm": True}, otherwise=HYPERCLOVAX
    ),
}
