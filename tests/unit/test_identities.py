"""The identities themselves: right tensors pass, and each kind of wrong one fails, also beside a huge residual."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

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
