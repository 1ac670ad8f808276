"""What trunks of several streams refuse, and what they send to instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stream_tools import (
    TWO_SITES,
)
from trunks import PROMPT

from interp_core import (
    Add,
    CapabilityUnsupported,
    InterpModel,
    RequestError,
    run_with_cache,
)

_HEAD_NORMS = {"q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out"}
_HEADS = {"attn_scores", "attn_probs", "z"}
_NEURONS = {"mlp_pre", "mlp_pre_linear", "mlp_act"}
_ROUTING = {"router_logits", "expert_weights", "expert_indices"}
_NOWHERE = {
    "deepseek_v4": {"attn_gate", *_NEURONS},
    "glm5_next": {"attn_gate", "value", *_HEAD_NORMS},
    "hy_v4": {"value", *_HEAD_NORMS},
    "qwen4_exp_text": {"final_norm", *_NEURONS},
    "gemma3n_text": {
        "attn_gate",
        "attn_stream_write",
        "mlp_stream_collapse",
        "mlp_stream_mix",
        "resid_mid",
        *_ROUTING,
    },
}
"""Points that a trunk has not: the code lacks the tensor, or, of latent attention, has values and keys in one."""
_HERE_AND_THERE = {
    "deepseek_v4": set(),
    "glm5_next": {*_HEADS, *_NEURONS, *_ROUTING},  # Linear attention, and dense layers among mixtures.
    "hy_v4": {*_NEURONS, *_ROUTING},
    # Linear attention; and one layer adds to its streams before its attention.
    "qwen4_exp_text": {"value", "attn_gate", "attn_stream_mix", *_HEADS, *_HEAD_NORMS},
    "gemma3n_text": {"value", "k_norm_in", "k_norm_out"},  # Later layers use the keys and values of earlier ones.
}

# What is refused.


def refused_read(model: InterpModel, address: str) -> CapabilityUnsupported:
    with pytest.raises(CapabilityUnsupported) as refused:
        run_with_cache(model, PROMPT[:4], [address])
    assert refused.value.instead.strip()
    assert refused.value.why.strip()
    return refused.value


def refused_write(model: InterpModel, address: str) -> CapabilityUnsupported:
    shape = model.profile.shape(model.address(address))
    with pytest.raises(CapabilityUnsupported) as refused:
        run_with_cache(model, PROMPT[:4], ["resid_streams.3"], steering=[Add(address, torch.ones(shape))])
    assert refused.value.instead.strip()
    assert refused.value.why.strip()
    return refused.value


def test_residuals_without_a_stream_are_refused(trunk: Any) -> None:
    for point in ("resid_pre", "resid_mid", "resid_post"):
        for i in range(trunk.model.n_layers):
            error = refused_read(trunk.model, f"{point}.{i}")
            assert error.capability == "residual_stream"
            assert "stream" in error.instead
            assert str(trunk.model.facts.n_streams) in error.why
            with pytest.raises(CapabilityUnsupported):
                run_with_cache(trunk.model, PROMPT[:4], ["lm_head"], steering=[Add(f"{point}.{i}", torch.ones(64))])


def test_contributions_are_refused(trunk: Any) -> None:
    for site in ("attn", "mlp"):
        for i in range(trunk.model.n_layers):
            error = refused_read(trunk.model, f"{site}_out_post.{i}")
            assert f"{site}_out" in error.instead.replace(f"{site}_out_post", "")
            assert f"{site}_stream_write" in error.instead


def test_coefficients_are_read_only(trunk: Any) -> None:
    for site in ("attn", "mlp"):
        for part in ("write", "mix"):
            address = f"{site}_stream_{part}.1"
            assert refused_write(trunk.model, address).point == f"{site}_stream_{part}"
    if trunk.name in TWO_SITES:
        error = refused_write(trunk.model, "resid_mid.1.stream-1")
        assert "resid_post" in f"{error.why} {error.instead}"
    else:
        refused_write(trunk.model, "resid_mid.1.stream-1")
    refused_write(trunk.model, "lm_head")


def test_points_that_one_connection_has_not(trunk: Any) -> None:
    absent = ("attn_stream_write.1", "mlp_stream_collapse.1", "mlp_stream_mix.1", "resid_mid.1.stream-0")
    for address in absent:
        if trunk.name == "gemma3n_text":
            assert "one" in refused_read(trunk.model, address).why or "once" in refused_read(trunk.model, address).why
        else:
            assert trunk.model.refusal(address) is None


def test_points_that_are_nowhere_or_not_at_every_layer(trunk: Any) -> None:
    model, refused, read = trunk.model, set(), set()
    for spec in model.points():
        for i in range(model.n_layers) if spec.scope == "layer" else [None]:
            address = spec.name if i is None else f"{spec.name}.{i}"
            if spec.name in ("resid_pre", "resid_mid", "resid_post"):
                address += ".stream-0"
            if model.refusal(address) is None:
                read.add(spec.name)
                continue
            refused.add(spec.name)
            refused_read(model, address)
            if spec.name not in _HERE_AND_THERE[trunk.name]:  # Where it is not, a point may have no shape.
                refused_write(model, address)
    assert refused - read == _NOWHERE[trunk.name] | {"attn_out_post", "mlp_out_post"}
    assert refused & read == _HERE_AND_THERE[trunk.name]


def test_a_path_into_a_stack_is_refused_where_its_axes_are_not_known(trunk: Any) -> None:
    """Streams or heads in front of prompts must not be taken for prompts or positions."""
    model, n = trunk.model, trunk.model.facts.n_streams
    path = {
        "deepseek_v4": "path.model.layers.1.self_attn.q_b_norm",
        "gemma3n_text": "path.model.layers.1",
    }.get(trunk.name)
    if path is None:
        path = "path.model.language_model.layers.1" if trunk.name == "glm5_next" else "path.model.layers.1"
        stack = run_with_cache(model, PROMPT, [path])[path]
        whole = run_with_cache(model, PROMPT, ["resid_streams.1"])["resid_streams.1"]
        assert torch.equal(stack.flatten(2), whole.flatten(2))
        return
    for prompts in ([PROMPT], [PROMPT[:n]] * n):
        with pytest.raises(RequestError, match="its rows cannot be told apart"):
            run_with_cache(model, prompts, [path])


def test_attention_is_promised_and_had(trunk: Any) -> None:
    """The attention matrices of every layer that has softmax attention, as rows that sum to what the sinks leave."""
    model = trunk.model
    assert model.refusal("attention") is None
    for layer in model.facts.layers:
        if not layer.softmax:
            assert "attn_probs" in refused_read(model, f"attn_probs.{layer.index}").point
            continue
        probs = run_with_cache(model, PROMPT, [f"attn_probs.{layer.index}"])[f"attn_probs.{layer.index}"]
        sums = probs.sum(-1)
        assert (sums <= 1 + 1e-5).all()
        assert model.facts.sinks or torch.allclose(sums, torch.ones_like(sums), atol=1e-5)
