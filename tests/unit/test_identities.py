"""The identities themselves: right tensors pass, and each kind of wrong one fails, also beside a huge residual."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attrs import evolve

from interp_core import LayerFacts, ModelFacts
from interp_core.checks import Check
from interp_core.identities import capture_identities

D, HEADS, WIDTH, SEQ = 12, 2, 4, 6
LAYER = LayerFacts(index=0, n_heads=HEADS, n_kv_heads=HEADS, head_dim=WIDTH, v_head_dim=WIDTH, d_mlp=8, window=3)
FACTS = ModelFacts(model_type="made_up", structure_known=True, n_layers=1, d_model=D, vocab_size=9, layers=[LAYER])
Tensors = dict[str, torch.Tensor]


def right() -> Tensors:
    """Captured tensors of a layer that is right, with one channel of the residual near 20,000."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    pre, attn, mlp, gate, linear = normal(SEQ, D), normal(SEQ, D), normal(SEQ, D), normal(SEQ, 8), normal(SEQ, 8)
    pre[:, 3] = 2e4
    row, column = torch.arange(SEQ)[:, None], torch.arange(SEQ)[None]
    scores = normal(HEADS, SEQ, SEQ).masked_fill((column > row) | (column <= row - 3), float("-inf"))
    value, probs = normal(SEQ, HEADS, WIDTH), scores.softmax(-1)
    return {
        "resid_pre": pre,
        "attn_out_post": attn,
        "resid_mid": pre + attn,
        "mlp_out_post": mlp,
        "resid_post": pre + attn + mlp,
        "mlp_pre": gate,
        "mlp_pre_linear": linear,
        "mlp_act": torch.nn.functional.silu(gate) * linear,
        "attn_scores": scores,
        "attn_probs": probs,
        "value": value,
        "z": (probs @ value.transpose(0, 1)).transpose(0, 1),
    }


def checks(tensors: Tensors) -> list[Check]:
    return list(capture_identities(FACTS, lambda name, layer: tensors.get(name), 2e-5))


def test_right_tensors_pass() -> None:
    found = checks(right())
    assert len(found) == 6
    assert all(check.holds for check in found), found


@pytest.mark.parametrize(
    ("name", "wrong", "identity"),
    [
        ("attn_out_post", lambda x: 1.001 * x, "resid_pre + attn_out_post"),
        ("mlp_out_post", lambda x: 0.22 * x, "resid_mid + mlp_out_post"),
        ("mlp_out_post", lambda x: x.roll(1, 0), "resid_mid + mlp_out_post"),
        ("mlp_pre", lambda x: -x, "act(mlp_pre)"),
        ("attn_scores", lambda x: 2 * x, "the softmax"),
        ("attn_probs", lambda x: x.tril(0) * 0 + x.roll(1, -1), "exactly the keys"),
        ("value", lambda x: x.roll(1, 1), "attn_probs @ value"),
        ("z", lambda x: 1.001 * x, "attn_probs @ value"),
    ],
)
def test_a_wrong_tensor_fails(name: str, wrong: Callable[[torch.Tensor], torch.Tensor], identity: str) -> None:
    tensors = right()
    tensors[name] = wrong(tensors[name])
    failed = [check.identity for check in checks(tensors) if not check.holds]
    assert any(text.startswith(identity) for text in failed), failed


def test_embeddings_scaled_outside_their_module() -> None:
    import attrs

    embeddings = torch.randn(SEQ, D)
    scaled = attrs.evolve(FACTS, embedding_scale=3.0, embedding_scale_inside=False)
    tensors = {"embeddings": embeddings, "resid_pre": 3.0 * embeddings}
    for facts, holds in ((scaled, True), (FACTS, False)):
        (check,) = capture_identities(facts, lambda name, layer: tensors.get(name), 2e-5)
        assert check.holds is holds


NORMED = evolve(FACTS, norm="layer", norm_eps=1e-5, norm_on_sum=True, attn_pre_norm=False, mlp_pre_norm=False)


def right_normed() -> Tensors:
    """Captured tensors of a layer that normalises its sums, with gains and biases of its own."""
    tensors, random = right(), torch.Generator().manual_seed(1)
    tensors["resid_pre"] = torch.randn(SEQ, D, generator=random)
    for before, added, after in (
        ("resid_pre", "attn_out_post", "resid_mid"),
        ("resid_mid", "mlp_out_post", "resid_post"),
    ):
        total = tensors[before] + tensors[added]
        gain, bias = 1 + 0.3 * torch.randn(D, generator=random), torch.randn(D, generator=random)
        tensors[after] = torch.nn.functional.layer_norm(total, (D,), gain, bias)
    return tensors


def normed_checks(tensors: Tensors) -> list[Check]:
    found = capture_identities(NORMED, lambda name, layer: tensors.get(name), 2e-5)
    return [check for check in found if "normalised" in check.identity]


def test_sums_that_are_normed_pass() -> None:
    found = normed_checks(right_normed())
    assert [check.identity for check in found] == [
        "resid_pre + attn_out_post, normalised, is resid_mid",
        "resid_mid + mlp_out_post, normalised, is resid_post",
    ]
    assert all(check.holds for check in found), found


NORMED_PARTS = ("resid_pre", "attn_out_post", "resid_mid", "mlp_out_post", "resid_post")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *((name, lambda x: x.roll(1, 0)) for name in NORMED_PARTS),
        *((name, lambda x: x + 0.01 * x.roll(1, 1)) for name in NORMED_PARTS),
        *((name, lambda x: 1.01 * x) for name in NORMED_PARTS[:-1]),  # the last norm's gain may be of any size
    ],
)
def test_sums_that_are_normed_fail_on_wrong_tensors(name: str, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = right_normed()
    tensors[name] = wrong(tensors[name])
    assert not all(check.holds for check in normed_checks(tensors))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_the_keys_that_a_query_sees_with_and_without_a_causal_mask(window: int | None, causal: bool) -> None:
    layer = LayerFacts(index=0, n_heads=1, n_kv_heads=1, head_dim=WIDTH, v_head_dim=WIDTH, window=window, causal=causal)
    back = torch.arange(SEQ)[:, None] - torch.arange(SEQ)[None]
    reach = SEQ if window is None else window
    allowed = (back < reach) & (back >= (0 if causal else 1 - reach))
    scores = torch.zeros(1, SEQ, SEQ).masked_fill(~allowed, float("-inf"))

    def mask_check(facts: LayerFacts) -> Check:
        tensors = {"attn_scores": scores, "attn_probs": scores.softmax(-1)}
        found = capture_identities(evolve(FACTS, layers=[facts]), lambda name, at: tensors.get(name), 2e-5)
        return next(check for check in found if check.identity.startswith("exactly the keys"))

    assert mask_check(layer).proof
    assert mask_check(evolve(layer, causal=not causal)).fails
    assert mask_check(evolve(layer, window=2)).fails


def test_attention_in_both_directions_is_read_from_the_configuration() -> None:
    from transformers import Gemma3TextConfig, GemmaConfig, PaliGemmaConfig

    for config in (GemmaConfig(use_bidirectional_attention=True), PaliGemmaConfig()):
        assert not any(layer.causal for layer in ModelFacts.from_config(config).layers)
    for config in (GemmaConfig(), Gemma3TextConfig()):
        assert all(layer.causal for layer in ModelFacts.from_config(config).layers)
