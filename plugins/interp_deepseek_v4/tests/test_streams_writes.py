"""Writes to streams and collapses: what moves, what does not, and that nothing is nothing."""

from __future__ import annotations

from typing import Any

import torch
from stream_tools import (
    AT,
    FAR,
    TIGHT,
    TWO_SITES,
    captured,
    served,
    stack,
    updates,
)
from trunks import PROMPT

from interp_core import (
    Add,
    Cache,
    parse_address,
    run_with_cache,
)
from interp_core.checks import difference

# Identity 8: writes.


def test_identity_8_writes_at_every_point_and_layer(trunk: Any, plain: Cache) -> None:
    model, last = trunk.model, f"resid_streams.{trunk.model.n_layers - 1}"
    written = [a for a in served(model, write=True) if _one_stream_per_layer(a, model.facts.n_streams)]
    assert {a.split(".")[0] for a in written} >= {"embeddings", "resid_streams", "resid_pre", "resid_post", "attn_out"}
    ends = [last, "lm_head"]
    for address in written:
        shape = model.profile.shape(model.address(address))
        same = run_with_cache(model, PROMPT, ends, steering=[Add(address, torch.zeros(shape))])
        assert all(torch.equal(same[key], plain[key]) for key in ends), address
        vector = torch.linspace(-3, 5, torch.Size(shape).numel()).reshape(shape)
        with model.steer(Add(address, vector, scale=2.0), positions=[AT]):
            changed = run_with_cache(model, PROMPT, [address, *ends])
        before, after = plain[address][0], changed[address][0]
        assert difference(after[AT], before[AT] + 2.0 * vector) < 1e-5, address
        assert torch.equal(after[:AT], before[:AT]), address
        for key in ends if address not in ("final_norm", last) else ends[1:]:
            # Experts compute their tokens together, so the rest of a matrix product may round a row differently.
            assert difference(changed[key][0, :AT], plain[key][0, :AT]) < 2e-6, (address, key)
            assert difference(changed[key][0, AT], plain[key][0, AT]) > FAR, (address, key)


def _one_stream_per_layer(address: str, streams: int) -> bool:
    """Of residuals, each stream somewhere and one at every layer: all of them everywhere would be slow."""
    parts = address.split(".")
    return len(parts) < 3 or parts[2] == f"stream-{int(parts[1]) % streams}"


def steered(trunk: Any, address: str, scale: float = 2.0) -> tuple[Cache, torch.Tensor]:
    """Everything, with a vector added to one address at one position."""
    shape = trunk.model.profile.shape(trunk.model.address(address))
    vector = scale * torch.linspace(-1, 2, torch.Size(shape).numel()).reshape(shape)
    with trunk.model.steer(Add(address, vector), positions=[AT]):
        return captured(trunk), vector


def check_equations(trunk: Any, cache: Cache) -> None:
    """Every block still is what it says, with whatever was written."""
    for i in range(trunk.model.n_layers):
        for update in updates(trunk, cache, i):
            assert difference(update.made(), update.after) < TIGHT, (i, update.site)


def test_identity_8_one_stream_moves_alone(trunk: Any, plain: Cache) -> None:
    for address, whole in (("resid_post.1.stream-2", "resid_post"), ("resid_streams.1.stream-2", "resid_streams")):
        changed, vector = steered(trunk, address)
        moved = changed["resid_streams.1"][0] - plain["resid_streams.1"][0]
        assert difference(moved[AT, 2], vector) < TIGHT, whole
        moved[AT, 2] = 0
        assert not bool(moved.any()), whole
        assert torch.equal(stack(trunk, changed, "resid_pre", 2), changed["resid_streams.1"][0])
        assert torch.equal(changed["resid_streams.0"], plain["resid_streams.0"])
        assert difference(changed["resid_streams.2"][0, AT], plain["resid_streams.2"][0, AT]) > FAR
        for i in (0, 2, 3):
            for update in updates(trunk, changed, i):
                assert difference(update.made(), update.after) < TIGHT, (i, update.site)
        # In the written layer alone the output is the equation's and the vector.
        update = updates(trunk, changed, 1)[-1]
        made = update.made()
        assert difference(made, update.after) > FAR
        made[AT, 2] += vector
        assert difference(made, update.after) < TIGHT


def test_identity_8_the_whole_stack_moves(trunk: Any, plain: Cache) -> None:
    changed, vector = steered(trunk, "resid_streams.1")
    moved = changed["resid_streams.1"][0] - plain["resid_streams.1"][0]
    assert vector.shape == moved.shape[1:]
    assert difference(moved[AT], vector) < TIGHT
    moved[AT] = 0
    assert not bool(moved.any())
    assert difference(changed["resid_streams.2"][0, AT], plain["resid_streams.2"][0, AT]) > FAR


def test_identity_8_input_of_a_block_moves_that_block_only(trunk: Any, plain: Cache) -> None:
    changed, vector = steered(trunk, "resid_pre.2.stream-1")
    assert torch.equal(changed["resid_streams.1"], plain["resid_streams.1"])  # What the block before gave.
    moved = stack(trunk, changed, "resid_pre", 2) - stack(trunk, plain, "resid_pre", 2)
    assert difference(moved[AT, 1], vector) < TIGHT
    moved[AT, 1] = 0
    assert not bool(moved.any())
    check_equations(trunk, changed)
    assert difference(changed["attn_stream_collapse.2"][0, AT], plain["attn_stream_collapse.2"][0, AT]) > FAR
    assert torch.equal(changed["resid_streams.2"][0, :AT], plain["resid_streams.2"][0, :AT])


def test_identity_8_collapse_moves_the_sublayer_and_not_the_stack(trunk: Any, plain: Cache) -> None:
    sites = ("attn", "mlp") if trunk.name in TWO_SITES else ("attn",)
    for i in (0, 2):
        for site in sites:
            changed, vector = steered(trunk, f"{site}_stream_collapse.{i}")
            moved = changed[f"{site}_stream_collapse.{i}"][0] - plain[f"{site}_stream_collapse.{i}"][0]
            assert difference(moved[AT], vector) < TIGHT
            for point in (f"{site}_in.{i}", f"{site}_out.{i}"):
                assert difference(changed[point][0, AT], plain[point][0, AT]) > FAR
                assert torch.equal(changed[point][0, :AT], plain[point][0, :AT])
            # Neither the stack that flows past, nor the weights of its mixing, nor what was before.
            point = "resid_mid" if site == "mlp" else "resid_pre"
            assert torch.equal(stack(trunk, changed, point, i), stack(trunk, plain, point, i))
            if parse_address(f"{site}_stream_mix.{i}") in plain:
                assert torch.equal(changed[f"{site}_stream_mix.{i}"], plain[f"{site}_stream_mix.{i}"])
            if trunk.name in TWO_SITES:
                assert torch.equal(changed[f"{site}_stream_write.{i}"], plain[f"{site}_stream_write.{i}"])
            if site == "mlp":
                assert torch.equal(changed[f"attn_out.{i}"], plain[f"attn_out.{i}"])
            check_equations(trunk, changed)


def test_writes_of_each_prompt_stay_in_it(trunk: Any) -> None:
    rows = [PROMPT, PROMPT[:7]]
    points = ["resid_streams.1", "resid_streams.3"]
    before = run_with_cache(trunk.model, rows, points)
    with trunk.model.steer(Add("resid_post.1.stream-0", torch.ones(64)), positions=[AT]):
        after = run_with_cache(trunk.model, rows, points)
    for key in points:
        assert torch.equal(after[key][1], before[key][1])
        assert not torch.equal(after[key][0], before[key][0])
