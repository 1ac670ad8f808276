"""Identities of trunks of other kinds: one update of the streams per block, and values that are rotated keys."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from attrs import evolve

from interp_core import LayerFacts, ModelFacts
from interp_core.checks import Check, Get
from interp_core.identities_attention import attention_identities
from interp_core.identities_streams import stream_identities

SEQ, D, STREAMS, HEADS, WIDTH = 7, 10, 4, 3, 8
LAYER = LayerFacts(index=0, n_heads=HEADS, n_kv_heads=1, head_dim=WIDTH, v_head_dim=WIDTH)
FACTS = ModelFacts(
    model_type="made_up",
    structure_known=True,
    n_layers=1,
    d_model=D,
    vocab_size=9,
    layers=[LAYER],
    n_streams=STREAMS,
    extra={"active_stream": 0},
)
Tensors = dict[str, torch.Tensor]


def alternating() -> Tensors:
    """A block that mixes its streams, works on the first, and writes what that gained to all."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    mix = torch.eye(STREAMS) + 0.3 * normal(SEQ, STREAMS, STREAMS)
    write = 1.0 + 0.3 * normal(SEQ, STREAMS)
    before = normal(SEQ, STREAMS, D)
    mixed = mix @ before
    after = mixed + write.unsqueeze(-1) * normal(SEQ, 1, D)
    after[:, 1:] += normal(SEQ, 1, D)
    return {
        "resid_pre": before,
        "resid_post": after,
        "attn_stream_mix": mix,
        "mlp_stream_write": write,
        "attn_stream_collapse": mixed[:, 0],
    }


def tensors_of(tensors: Tensors) -> Get:
    return lambda name, layer: tensors.get(name)


def stream_checks(tensors: Tensors, facts: ModelFacts = FACTS) -> list[Check]:
    return list(stream_identities(facts, tensors_of(tensors), 2e-5))


def test_one_update_around_a_block_is_proven() -> None:
    found = stream_checks(alternating())
    assert len(found) == 2
    assert all(check.proof for check in found), found
    assert {name for check in found for name in check.proves} >= {"attn_stream_mix", "mlp_stream_write"}


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("attn_stream_mix", lambda x: x.transpose(-1, -2)),
        ("attn_stream_mix", lambda x: x - torch.eye(STREAMS)),
        ("mlp_stream_write", lambda x: x.roll(1, -1)),
        ("mlp_stream_write", lambda x: x - 1.0),
        ("resid_post", lambda x: x.roll(1, 1)),
    ],
)
def test_a_wrong_update_around_a_block_fails(name: str, wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = alternating()
    tensors[name] = wrong(tensors[name])
    assert any(check.fails for check in stream_checks(tensors) if name in check.proves)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_streams_much_larger_than_what_they_are_given_may_be_rounded(dtype: torch.dtype, tolerance: float) -> None:
    """A block in half precision rounds every stack at the size of its streams, here a hundred times the rest."""
    right = alternating()
    before = (100.0 * right["resid_pre"]).to(dtype)
    mix, write = right["attn_stream_mix"].to(dtype), right["mlp_stream_write"].to(dtype)
    mixed = mix @ before
    after = mixed + write.unsqueeze(-1) * torch.linspace(-1.0, 1.0, D, dtype=dtype)
    after[:, 1:] += torch.linspace(2.0, -1.0, D, dtype=dtype)
    tensors = {"resid_pre": before, "resid_post": after, "attn_stream_mix": mix, "mlp_stream_write": write}
    tensors["attn_stream_collapse"] = mixed[:, 0]
    found = list(stream_identities(FACTS, tensors_of(tensors), tolerance))
    assert len(found) == 2
    assert not any(check.fails for check in found), found
    tensors["attn_stream_mix"] = mix - torch.eye(STREAMS, dtype=dtype)
    assert all(check.fails for check in stream_identities(FACTS, tensors_of(tensors), tolerance))


def test_another_active_stream_is_another_trunk() -> None:
    other = evolve(FACTS, extra={"active_stream": 1})
    assert [check.fails for check in stream_checks(alternating(), other)] == [True]


def rotated(rows: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """``[pos, heads, width]``, each pair of channels turned by the angle of its position."""
    angles = sign * torch.arange(len(rows))[:, None, None] * 3.0 ** -torch.arange(WIDTH // 2)
    pairs = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def shared() -> Tensors:
    """Attention over rotated keys, and over two more entries that later queries see."""
    random = torch.Generator().manual_seed(0)
    key, entries = torch.randn(SEQ, 1, WIDTH, generator=random), torch.randn(2, 1, WIDTH, generator=random)
    scores = torch.randn(HEADS, SEQ, SEQ + 2, generator=random)
    hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
    late = torch.arange(SEQ)[:, None] < torch.tensor([4, 6])
    probs = scores.masked_fill(torch.cat([hidden, late], dim=1), float("-inf")).softmax(-1)
    value = rotated(key)
    summed = (probs @ torch.cat([value, entries]).transpose(0, 1)).transpose(0, 1)
    return {"attn_probs": probs, "value": value, "z": rotated(summed, -1.0), "k_norm_out": key}


def attention_checks(tensors: Tensors) -> list[Check]:
    facts = evolve(FACTS, shared_key_value=True)
    return list(attention_identities(facts, LAYER, lambda name, layer: tensors.get(name), 2e-5))


def test_a_value_that_is_the_rotated_key_is_proven() -> None:
    (check,) = attention_checks(shared())
    assert check.proof
    assert check.proves == ("value",)


@pytest.mark.parametrize("wrong", [lambda x: rotated(x, -1.0), rotated, lambda x: x.roll(1, 0)])
def test_a_value_that_is_another_key_fails(wrong: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = shared()
    tensors["value"] = wrong(tensors["value"])
    (check,) = attention_checks(tensors)
    assert check.fails


def test_entries_that_every_query_sees_leave_nothing_to_look_at() -> None:
    tensors = shared()
    tensors["attn_probs"] = torch.full_like(tensors["attn_probs"], 0.1)
    assert attention_checks(tensors) == []
