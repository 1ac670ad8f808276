"""The points of trunks with several residual streams, on the eager backend, against the equations that define them.

Numbers in names of tests are those of the list of identities in the project's table of points. ``X`` is a token's stack
``[streams, d_model]``; a block is ``X' = mix @ X + write (x) sublayer(norm(collapse(X)))``, once or twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from trunks import PROMPT, ids_of

from interp_core import (
    Add,
    Cache,
    CapabilityUnsupported,
    InterpModel,
    RequestError,
    decode_residuals,
    parse_address,
    run_with_cache,
)
from interp_core.checks import difference

TIGHT = 2e-5
FAR = 1e-2
"""What a deliberately wrong variant must miss by, at least."""

SINKHORN = ("deepseek_v4", "glm5_next")
TWO_SITES = (*SINKHORN, "hy_v4", "qwen4_exp_text")
Hook = tuple[str, str, Callable[[Any], Any]]


def inner_path(trunk: Any) -> str:
    return "model.language_model" if trunk.name == "glm5_next" else "model"


def inner(trunk: Any, whole: Any = None) -> Any:
    """The module that holds the blocks, of the loaded model or of another."""
    backend: Any = trunk.model.session.backend()
    return (backend.model if whole is None else whole).get_submodule(inner_path(trunk))


def served(model: InterpModel, *, write: bool = False) -> list[str]:
    """Every address that can be read (or written), residuals by stream."""
    found = []
    for spec in model.points():
        streams = range(model.facts.n_streams) if spec.name in ("resid_pre", "resid_mid", "resid_post") else [None]
        for layer in range(model.n_layers) if spec.scope == "layer" else [None]:
            for k in streams:
                address = spec.name if layer is None else f"{spec.name}.{layer}"
                address += "" if k is None else f".stream-{k}"
                if model.refusal(address, write=write) is None:
                    found.append(address)
    return found


def beside(trunk: Any) -> list[str]:
    """Outputs of modules that the equations of some trunks need and no point names."""
    blocks = f"path.{inner_path(trunk)}.layers"
    if trunk.name == "qwen4_exp_text":
        return [f"{blocks}.2.ple"]
    if trunk.name == "gemma3n_text":
        parts = "post_attention_layernorm laurel post_feedforward_layernorm post_per_layer_input_norm"
        return [f"{blocks}.{i}.{part}" for i in range(4) for part in parts.split()]
    return []


def captured(trunk: Any, tokens: list[int] = PROMPT, **options: Any) -> Cache:
    return run_with_cache(trunk.model, tokens, [*served(trunk.model), *beside(trunk)], **options)


@pytest.fixture(scope="module")
def plain(trunk: Any) -> Cache:
    """Everything of one run, shared by the tests that only read."""
    return captured(trunk)


def stack(trunk: Any, cache: Cache, point: str, layer: int) -> torch.Tensor:
    """``[pos, streams, d_model]`` out of the streams' own addresses."""
    streams = range(trunk.model.facts.n_streams)
    return torch.stack([cache[f"{point}.{layer}.stream-{k}"][0] for k in streams], dim=-2)


class Update(NamedTuple):
    """One update of the stack: ``after = mix @ before + write (x) out + extra``."""

    site: str
    before: torch.Tensor
    mix: torch.Tensor
    write: torch.Tensor
    out: torch.Tensor
    extra: torch.Tensor
    after: torch.Tensor

    def made(self, **changed: torch.Tensor) -> torch.Tensor:
        u = Update(**{**self._asdict(), **changed})
        return u.mix @ u.before + u.write.unsqueeze(-1) * u.out.unsqueeze(-2) + u.extra


def updates(trunk: Any, cache: Cache, i: int) -> list[Update]:
    """The updates of block ``i``: two, or one around both sublayers."""
    pre, post = stack(trunk, cache, "resid_pre", i), stack(trunk, cache, "resid_post", i)
    if trunk.name == "gemma3n_text":
        return [alternating(trunk, cache, i, pre, post)]
    mid, none = stack(trunk, cache, "resid_mid", i), torch.zeros_like(pre)
    ple = f"path.model.layers.{i}.ple"
    if parse_address(ple) in cache:
        pre = pre + cache[ple][0].unflatten(-1, pre.shape[-2:])
    found = []
    for site, before, after in (("attn", pre, mid), ("mlp", mid, post)):
        mix, write, out = (cache[f"{site}_{part}.{i}"][0] for part in ("stream_mix", "stream_write", "out"))
        found.append(Update(site, before, mix, write, out, none, after))
    return found


def alternating(trunk: Any, cache: Cache, i: int, pre: torch.Tensor, post: torch.Tensor) -> Update:
    """Gemma 3n: what is written is the gain of the active stream; the others get a per-layer input besides."""
    mix, write = cache[f"attn_stream_mix.{i}"][0], cache[f"mlp_stream_write.{i}"][0]
    names = "post_attention_layernorm laurel post_feedforward_layernorm post_per_layer_input_norm"
    attn, laurel, mlp, own = (cache[f"path.model.layers.{i}.{name}"][0] for name in names.split())
    active = (mix @ pre)[:, 0]
    gain = (active + attn + laurel) / 2**0.5 + mlp - active
    extra = torch.stack([torch.zeros_like(own), own, own], dim=-2)
    return Update("block", pre, mix, write, gain, extra, post)


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def reading(x: torch.Tensor, fn: Any, scale: Any, base: Any, norm_eps: float, eps: float) -> torch.Tensor:
    """Weights ``[pos, streams]`` that a hyper-connection reads streams with, from its first ``streams`` rows."""
    n = x.shape[-2]
    logits = rms(x.flatten(-2), norm_eps) @ fn[:n].T
    return torch.sigmoid(logits * scale[0] + base[:n]) + eps


def per_channel(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Qwen 4 Exp: each channel of each normed stream has a weight of its own."""
    n = x.shape[-2]
    gain = 1.0 + module.hc_norm.weight.unflatten(0, x.shape[-2:])
    normed = rms(x, module.hc_norm.eps) * gain
    low = normed.flatten(-2) @ module.input_mix_weight_down.weight.T / n
    weights = torch.sigmoid(torch.nn.functional.silu(low) @ module.input_mix_weight_up.weight.T)
    found: torch.Tensor = (weights.unflatten(-1, x.shape[-2:]) * normed).mean(-2)
    return found


def collapsed(trunk: Any, update: Update, i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a sublayer reads of the streams, from the module's parameters; and the same with its weights rolled."""
    block, x = inner(trunk).layers[i], update.before
    if trunk.name == "gemma3n_text":
        predicted = update.mix @ x
        return predicted[:, 0], predicted[:, 1]
    if trunk.name == "qwen4_exp_text":
        module = getattr(block, f"{update.site}_hyper_connection")
        return per_channel(module, x), per_channel(module, x.roll(1, -2))
    module = block.attn_hc if update.site == "attn" else block.ffn_hc
    eps = inner(trunk).config.rms_norm_eps
    weights = reading(x, module.fn, module.scale, module.base, eps, module.hc_eps)
    assert float(weights.max() - weights.min()) > 0.3  # They differ from stream to stream and token to token.
    return (weights.unsqueeze(-1) * x).sum(-2), (weights.roll(1, -1).unsqueeze(-1) * x).sum(-2)


def hf_logits(whole: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return found


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


# Identity 8: writes.

AT = 9


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


# Identity 6: the lens.


def finished(trunk: Any, rows: torch.Tensor, *, raw: bool = False) -> torch.Tensor:
    """Logits of rows of the width of one stream, with the model's own modules."""
    backend: Any = trunk.model.session.backend()
    with torch.no_grad():
        rows = rows if trunk.name == "qwen4_exp_text" else inner(trunk).norm(rows)
        logits: torch.Tensor = backend.model.lm_head(rows)
    return 3.0 * torch.tanh(logits / 3.0) if trunk.name == "gemma3n_text" and not raw else logits


def test_identity_6_the_models_own_contraction(trunk: Any, plain: Cache, transformers_model: Any) -> None:
    model, logits = trunk.model, hf_logits(transformers_model(trunk), PROMPT)
    rows = plain["resid_streams.3"][0]
    assert difference(model.decode_residuals(rows, reduction="head"), logits) < TIGHT
    assert difference(model.decode_residuals(rows[-1], reduction="head"), logits[-1]) < TIGHT
    assert difference(decode_residuals(model, rows, reduction="head"), plain["lm_head"][0]) < TIGHT
    assert difference(model.decode_residuals(plain["resid_streams.2"][0], reduction="head"), logits) > FAR
    assert difference(model.decode_residuals(rows.flip(-2), reduction="head"), logits) > FAR or (
        trunk.name == "glm5_next"  # Its contraction is the mean, which knows no order.
    )
    mean = model.decode_residuals(rows, reduction="mean")
    assert (difference(mean, logits) < TIGHT) is (trunk.name == "glm5_next")


def test_identity_6_lens(trunk: Any, plain: Cache, transformers_model: Any) -> None:
    logits = hf_logits(transformers_model(trunk), PROMPT)
    lens = trunk.model.logit_lens(PROMPT, top_k=4, reduction="head")
    best = logits.softmax(-1).topk(4)
    assert lens.layers == (0, 1, 2, 3)
    assert torch.equal(lens.top_ids[-1], best.indices)
    assert difference(lens.top_probs[-1], best.values) < TIGHT
    assert not torch.equal(lens.top_ids[0], best.indices)
    some = trunk.model.logit_lens(PROMPT, layers=[1, 3], top_k=4, positions=[3, AT], reduction="head")
    assert torch.equal(some.top_ids, lens.top_ids[[1, 3]][:, [3, AT]])


def test_reductions_decode_what_they_say(trunk: Any, plain: Cache) -> None:
    model, rows = trunk.model, plain["resid_streams.1"][0]
    wanted = {"mean": rows.mean(-2), "sum": rows.sum(-2), 0: rows[:, 0], 2: rows[:, 2], "stream-1": rows[:, 1]}
    for reduction, row in wanted.items():
        got = model.decode_residuals(rows, reduction=reduction)
        assert difference(got, finished(trunk, row)) < TIGHT, reduction
        assert difference(got, finished(trunk, row.roll(1, 0))) > FAR, reduction
        raw = decode_residuals(model, rows, reduction=reduction)
        assert difference(raw, finished(trunk, row, raw=True)) < TIGHT, reduction
        lens = model.logit_lens(PROMPT, layers=[1], top_k=3, reduction=reduction)
        assert torch.equal(lens.top_ids[0], got.topk(3).indices), reduction
    others = [model.decode_residuals(rows, reduction=r) for r in (0, 1, 2)]
    assert difference(others[0], others[1]) > FAR
    assert difference(others[1], others[2]) > FAR


def test_lens_of_a_steered_run(trunk: Any) -> None:
    vector = 4.0 * torch.linspace(-1, 1, 64)
    steering = [Add("resid_post.3.stream-1", vector)]
    rows = run_with_cache(trunk.model, PROMPT, ["resid_streams.3"], steering=steering)["resid_streams.3"][0]
    lens = trunk.model.logit_lens(PROMPT, layers=[3], top_k=3, reduction="head", steering=steering)
    assert torch.equal(lens.top_ids[0], trunk.model.decode_residuals(rows, reduction="head").topk(3).indices)
    plain = trunk.model.logit_lens(PROMPT, layers=[3], top_k=3, reduction="head")
    assert not torch.equal(lens.top_ids, plain.top_ids)


def test_lens_needs_a_reduction(trunk: Any, plain: Cache) -> None:
    model, rows = trunk.model, plain["resid_streams.3"][0]
    for call in (
        lambda: model.logit_lens(PROMPT),
        lambda: model.decode_residuals(rows),
        lambda: model.decode_residuals(rows[:, 0]),
        lambda: decode_residuals(model, rows),
    ):
        with pytest.raises(CapabilityUnsupported, match="streams") as refused:
            call()
        assert refused.value.capability == "logit_lens"
        assert "reduction" in refused.value.instead
    assert not model.supports("logit_lens")
    assert model.residual_basis.n_streams == model.facts.n_streams
    assert not model.residual_basis.lens_valid


def test_reductions_that_are_none(trunk: Any, plain: Cache) -> None:
    model, rows, n = trunk.model, plain["resid_streams.3"][0], trunk.model.facts.n_streams
    wrong: Any
    for wrong in ("median", "", "HEAD", "stream-", f"stream-{n}", "stream--1", "stream-x", n, -1, 1.5, True, [0], {}):
        with pytest.raises(RequestError, match="reduction"):
            model.decode_residuals(rows, reduction=wrong)
        with pytest.raises(RequestError, match="reduction"):
            model.logit_lens(PROMPT, layers=[0], reduction=wrong)
    for shape in ((n + 1, 64), (3, n + 1, 64), (3, n, 63), (2, 3, n, 64)):
        with pytest.raises(RequestError, match="rows"):
            model.decode_residuals(torch.zeros(shape), reduction="head")
    with pytest.raises(RequestError, match="rows"):
        model.decode_residuals(torch.zeros(3, n, 64, dtype=torch.long), reduction="head")


def test_one_stream_has_nothing_to_reduce(llama: InterpModel) -> None:
    for reduction in ("head", "mean", 0):
        with pytest.raises(RequestError, match="one residual stream"):
            llama.logit_lens(PROMPT, reduction=reduction)
        with pytest.raises(RequestError, match="one residual stream"):
            llama.decode_residuals(torch.zeros(2, 64), reduction=reduction)
    assert llama.logit_lens(PROMPT[:5]).top_ids.shape == (4, 5, 5)


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


def test_general_points_that_are_not_placed(trunk: Any) -> None:
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
            refused_write(model, address)
    always = {"attn_out_post", "mlp_out_post", "attn_gate", "mlp_pre", "mlp_pre_linear", "mlp_act"}
    inside = {"q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out", "value", "attn_scores", "attn_probs", "z"}
    routed = {"router_logits", "expert_weights", "expert_indices"}
    lacking = always if trunk.name == "deepseek_v4" else always | inside | routed
    lacking |= {"final_norm"} if trunk.name == "qwen4_exp_text" else set()
    if trunk.name == "gemma3n_text":
        lacking |= {"attn_stream_write", "mlp_stream_collapse", "mlp_stream_mix", "resid_mid"}
    assert refused == lacking
    assert read == {spec.name for spec in model.points()} - lacking


# Batches and generation.


def batch_points(trunk: Any) -> list[str]:
    chosen = [a for a in served(trunk.model) if a.split(".")[0] not in ("attn_scores", "attn_probs")]
    return [a for a in chosen if a.split(".")[-1] != "stream-3"]


def test_unequal_prompts_in_one_call_equal_one_by_one(trunk: Any) -> None:
    model, points = trunk.model, batch_points(trunk)
    rows = [PROMPT, ids_of(3, 1), ids_of(10, 2)]
    batch = run_with_cache(model, rows, points)
    width = len(PROMPT) + 2
    padded, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    for i, row in enumerate(rows):
        padded[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
    left = run_with_cache(model, padded, points, attention_mask=mask)
    assert batch.lengths == left.lengths == (21, 3, 10)
    assert left.offsets == (2, 20, 13)
    for i, row in enumerate(rows):
        alone = run_with_cache(model, row, points)
        other = run_with_cache(model, ids_of(len(row), 9), points)
        for key in points:
            assert left[key].shape[1] == width
            for got in (batch[key][i, : len(row)], left[key][i, -len(row) :]):
                assert difference(got.float(), alone[key][0].float()) < TIGHT, (key, len(row))
            if "stream_mix" not in key and "expert" not in key:
                assert difference(other[key].float(), alone[key].float()) > 10 * TIGHT, key
            assert not bool(batch[key][i, len(row) :].any()), key
            assert not bool(left[key][i, : -len(row)].any()), key


def test_capture_while_generating_equals_one_run(trunk: Any, transformers_model: Any) -> None:
    model, points = trunk.model, batch_points(trunk)
    completion, grown = model.capture_generation(PROMPT[:10], points, max_tokens=12, ignore_eos=True)
    assert len(completion.token_ids) == 12
    ids = [*PROMPT[:10], *completion.token_ids[:-1]]
    once = run_with_cache(model, ids, points)
    for key in points:
        assert difference(grown[key].float(), once[key].float()) < TIGHT, key
        assert difference(grown[key][:, :-1].float(), once[key][:, 1:].float()) > TIGHT or "stream_mix" in key, key
    whole = transformers_model(trunk)
    with torch.no_grad():
        own = whole.generate(
            torch.tensor([PROMPT[:10]]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )
    assert own[0, 10:].tolist() == list(completion.token_ids)
    assert list(model.generate(PROMPT[:10], max_tokens=12, ignore_eos=True).token_ids) == list(completion.token_ids)
    assert hf_logits(whole, ids)[9:].argmax(-1).tolist() == list(completion.token_ids)


def test_a_steered_generation_is_steered_at_each_step(trunk: Any) -> None:
    steering = [Add("resid_post.1.stream-1", 3.0 * torch.linspace(-1, 1, 64))]
    points = ["resid_streams.1", "resid_streams.3"]
    completion, grown = trunk.model.capture_generation(
        PROMPT[:10], points, max_tokens=8, ignore_eos=True, steering=steering
    )
    ids = [*PROMPT[:10], *completion.token_ids[:-1]]
    once = run_with_cache(trunk.model, ids, points, steering=steering)
    without = run_with_cache(trunk.model, ids, points)
    for key in points:
        assert difference(grown[key], once[key]) < TIGHT
        assert difference(grown[key][:, -1], without[key][:, -1]) > FAR


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


def test_verify_holds_on_every_trunk(trunk: Any) -> None:
    """At the first layer too, whose streams are copies of one."""
    found = trunk.model.verify(PROMPT)
    assert found.ok, found.failed()
    assert any(check.layer == 0 for check in found.checks)


def test_attention_is_promised_only_where_matrices_are_had(trunk: Any) -> None:
    refused = trunk.model.refusal("attention")
    assert (refused is None) == (trunk.name == "deepseek_v4")
    if refused is not None:
        assert "eager" not in refused.instead  # It is eager that has none.
