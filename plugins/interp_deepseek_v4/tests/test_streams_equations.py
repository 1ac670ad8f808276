"""The points of trunks of several streams, on eager, against the equations that define them and against bare hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from stream_tools import (
    FAR,
    SINKHORN,
    TIGHT,
    Hook,
    collapsed,
    hf_logits,
    inner,
    rms,
    stack,
    updates,
)
from trunks import PROMPT

from interp_core import (
    Cache,
)
from interp_core.checks import difference

# Identity 9: the streams.


def test_stacks_are_one_chain(trunk: Any, plain: Cache) -> None:
    layers, streams = range(trunk.model.n_layers), range(trunk.model.facts.n_streams)
    for i in layers:
        whole = plain[f"resid_streams.{i}"]
        assert whole.shape == (1, len(PROMPT), len(streams), 64)
        for k in streams:
            one = plain[f"resid_post.{i}.stream-{k}"]
            assert torch.equal(one, whole[:, :, k])
            assert difference(one, whole[:, :, k - 1]) > FAR
            if i + 1 in layers:
                assert torch.equal(one, plain[f"resid_pre.{i + 1}.stream-{k}"])
            assert difference(one, plain[f"resid_pre.{i}.stream-{k}"]) > FAR


def test_streams_begin_with_the_embeddings(trunk: Any, plain: Cache) -> None:
    start, embedded = stack(trunk, plain, "resid_pre", 0), plain["embeddings"][0]
    if trunk.name != "gemma3n_text":
        assert all(torch.equal(start[:, k], embedded) for k in range(4))
        return
    assert torch.equal(start[:, 0], embedded)
    size = embedded.square().mean(-1, keepdim=True).sqrt()
    for k, projection in enumerate(inner(trunk).altup_projections, start=1):
        projected = embedded @ projection.weight.T
        assert difference(rms(projected, 0.0) * size, start[:, k]) < TIGHT
        assert difference(projected, start[:, k]) > FAR


def test_identity_9_collapse(trunk: Any, plain: Cache) -> None:
    with torch.no_grad():
        for i in range(trunk.model.n_layers):
            for update in updates(trunk, plain, i):
                site = "attn" if update.site == "block" else update.site
                want = plain[f"{site}_stream_collapse.{i}"][0]
                right, wrong = collapsed(trunk, update, i)
                assert difference(right, want) < TIGHT, (i, site)
                other = plain[f"{site}_stream_collapse.{(i + 1) % 4}"][0]
                assert difference(right, other) > FAR, (i, site)
                if (i, site) != (0, "attn") or trunk.name == "gemma3n_text":  # The first stack's streams are copies.
                    assert difference(wrong, want) > FAR, (i, site)


def test_identity_9_collapse_is_what_the_sublayer_reads(trunk: Any, plain: Cache) -> None:
    for i, block in enumerate(inner(trunk).layers):
        sites = [("attn", "input_layernorm"), ("mlp", "post_attention_layernorm")]
        for site, norm in sites[:1] if trunk.name == "gemma3n_text" else sites:
            collapse, read = plain[f"{site}_stream_collapse.{i}"], plain[f"{site}_in.{i}"]
            if trunk.name == "qwen4_exp_text":  # Normed before it is collapsed.
                assert torch.equal(collapse, read)
                continue
            with torch.no_grad():
                assert torch.equal(getattr(block, norm)(collapse), read)
            assert difference(collapse, read) > FAR


def test_identity_9_next_stack(trunk: Any, plain: Cache) -> None:
    for i in range(trunk.model.n_layers):
        for update in updates(trunk, plain, i):
            at, after = (i, update.site), update.after
            assert difference(update.made(), after) < TIGHT, at
            assert difference(update.made(write=update.write.roll(1, -1)), after) > FAR, at
            assert difference(update.made(out=torch.zeros_like(update.out)), after) > FAR, at
            unit = torch.eye(update.mix.shape[-1])
            if trunk.name in ("hy_v4", "qwen4_exp_text"):
                assert torch.equal(update.mix, unit.expand_as(update.mix)), at
                continue
            assert difference(update.mix, unit.expand_as(update.mix)) > FAR, at
            if at != (0, "attn"):  # There the streams are copies, which a doubly stochastic matrix leaves alone.
                assert difference(update.made(mix=update.mix.transpose(-1, -2)), after) > FAR, at
                assert difference(update.made(mix=unit.expand_as(update.mix)), after) > FAR, at
            if trunk.name == "gemma3n_text":
                assert difference(update.made(extra=torch.zeros_like(update.extra)), after) > FAR, at
                assert difference(update.made(extra=update.extra.roll(1, -2)), after) > FAR, at


def test_per_layer_embeddings_come_before_attention(trunk: Any, plain: Cache) -> None:
    if trunk.name != "qwen4_exp_text":
        assert not any("ple" in str(address).split(".") for address in plain)
        return
    update = updates(trunk, plain, 2)[0]
    without = update.made(before=stack(trunk, plain, "resid_pre", 2))
    assert difference(update.made(), update.after) < TIGHT
    assert difference(without, update.after) > FAR


def test_rows_of_a_sinkhorn_mix_sum_to_one(trunk: Any, plain: Cache) -> None:
    loosest = 0.0
    for i in range(trunk.model.n_layers):
        for update in updates(trunk, plain, i):
            rows, columns = ((update.mix.sum(axis) - 1).abs().max() for axis in (-1, -2))
            if trunk.name == "gemma3n_text":
                assert float(rows) > FAR  # Free coefficients.
                continue
            assert float(rows) < TIGHT
            loosest = max(loosest, float(columns))
            if trunk.name in SINKHORN:
                assert float((update.mix - update.mix.transpose(-1, -2)).abs().max()) > FAR
    if trunk.name in SINKHORN:
        assert 10 * TIGHT < loosest < 0.05  # The axis that was normalised last is the tight one.


# Identity 10: bare hooks on transformers' own model.


def first(out: Any) -> Any:
    return out if torch.is_tensor(out) else out[0]


def slot(index: int) -> Callable[[Any], Any]:
    return lambda out: out[index]


def bare_hooks(name: str) -> dict[str, Hook]:
    """Point to module within a block, side, and how to get from what the module gives to the point."""
    table: dict[str, Hook] = {
        "resid_streams": ("", "out", first),
        "resid_pre": ("", "in", first),
        "attn_in": ("attn", "in", first),
        "attn_out": ("attn", "out", first),
        "mlp_in": ("mlp", "in", first),
        "mlp_out": ("mlp", "out", first),
    }
    if name == "gemma3n_text":

        def stacked(x: Any) -> Any:
            return first(x).movedim(0, -2)

        eye = torch.eye(3)
        return table | {
            "resid_streams": ("", "out", stacked),
            "resid_pre": ("", "in", stacked),
            "attn_stream_collapse": ("input_layernorm", "in", first),
            "attn_stream_mix": ("altup.prediction_coefs", "out", lambda out: out.unflatten(-1, (3, 3)) + eye),
            "mlp_stream_write": ("altup.correction_coefs", "out", lambda out: out + 1.0),
        }
    sites = {"attn": "attn_hc", "mlp": "ffn_hc"}
    collapse, write = slot(1 if name == "hy_v4" else 2), slot(0)
    if name == "qwen4_exp_text":
        sites = {"attn": "attn_hyper_connection", "mlp": "mlp_hyper_connection"}
        collapse, write = slot(0), slot(2)
    for site, module in sites.items():
        table[f"{site}_stream_collapse"] = (module, "out", collapse)
        table[f"{site}_stream_write"] = (module, "out", write)
        if name in SINKHORN:
            table[f"{site}_stream_mix"] = (module, "out", lambda out: out[1].transpose(-1, -2))
    return table | {"resid_mid": (sites["mlp"], "in", first)}


def test_identity_10_bare_hooks(trunk: Any, plain: Cache, transformers_model: Any) -> None:
    whole, table, seen = transformers_model(trunk), bare_hooks(trunk.name), {}

    def keep(key: str, side: str, pick: Callable[[Any], Any]) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, out: Any = None) -> None:
            value = out if side == "out" else args[0] if args else kwargs["hidden_states"]
            seen[key] = pick(value).detach().clone()

        return hook

    def watch(part: Any, key: str, side: str, pick: Callable[[Any], Any]) -> Any:
        register = part.register_forward_pre_hook if side == "in" else part.register_forward_hook
        return register(keep(key, side, pick), with_kwargs=True)

    middle = inner(trunk, whole)
    handles = [watch(middle.embed_tokens, "embeddings", "out", first), watch(whole.lm_head, "lm_head", "out", first)]
    if trunk.name != "qwen4_exp_text":
        handles.append(watch(middle.norm, "final_norm", "out", first))
    for i, block in enumerate(middle.layers):
        for point, (path, side, pick) in table.items():
            names = {"attn": "linear_attn" if hasattr(block, "linear_attn") else "self_attn"}
            handles.append(watch(block.get_submodule(names.get(path, path)), f"{point}.{i}", side, pick))
    try:
        logits = hf_logits(whole, PROMPT)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == 4 * len(table) + (2 if trunk.name == "qwen4_exp_text" else 3)
    for key, want in seen.items():
        by_stream = key.startswith(("resid_pre", "resid_mid"))
        point, _, layer = key.partition(".")
        got = stack(trunk, plain, point, int(layer)) if by_stream else plain[key][0]
        assert torch.equal(got.flatten(), want[0].flatten()), key
        if not by_stream and "mix" not in key:
            assert not torch.equal(got.roll(1, 0).flatten(), want[0].flatten()), key
    checked = {key.split(".")[0] for key in seen} | {"resid_post"}
    own = {a.name for a in plain if a.module_path is None and a.name.startswith(("attn_stream", "mlp_stream", "resid"))}
    rebuilt = {"attn_stream_mix", "mlp_stream_mix"} if trunk.name not in SINKHORN else set()
    assert own - rebuilt <= checked
    capped = 3.0 * torch.tanh(plain["lm_head"][0] / 3.0)
    assert torch.equal(capped if trunk.name == "gemma3n_text" else plain["lm_head"][0], logits)


def test_verify_holds_on_every_trunk(trunk: Any) -> None:
    """At the first layer too, whose streams are copies of one."""
    found = trunk.model.verify(PROMPT)
    assert found.ok, found.failed()
    assert any(check.layer == 0 for check in found.checks)
