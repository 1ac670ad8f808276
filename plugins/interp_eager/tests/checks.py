"""The checks behind the tests of numbers: each takes a model, whatever its family or size.

Numbers in docstrings are those of the list of identities in the project's table of points.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from tiny_families import PROMPT

from interp_core import Add, InterpModel, decode_residuals, run_with_cache
from interp_core.checks import difference
from interp_core.identities import activations
from interp_core.verify import verify

TIGHT = 2e-5
Table = dict[str, tuple[str, str]]
"""Point to path of a module within its block, and side of it."""


def served(model: InterpModel, *, write: bool = False) -> list[Any]:
    found = []
    for spec in model.points():
        for layer in range(model.n_layers) if spec.scope == "layer" else [None]:
            address = spec.name if layer is None else f"{spec.name}.{layer}"
            if model.refusal(address, write=write) is None:
                found.append(model.address(address))
    return found


def captured(model: InterpModel) -> Any:
    return run_with_cache(model, PROMPT, served(model))


def module(model: InterpModel, role: str, layer: int | None) -> Any:
    backend: Any = model.session.backend()
    return backend.layout.module(role, layer)


def hf_logits(model: InterpModel, ids: list[int]) -> torch.Tensor:
    backend: Any = model.session.backend()
    with torch.no_grad():
        logits: torch.Tensor = backend.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def check_identities_1_to_5(model: InterpModel, name: str) -> None:
    """1, 2, the activation of 3, 4 and 5: each at each layer, each with a control that fails."""
    found = verify(model, PROMPT)
    assert found.complete, (found.failed(), found.places("unchecked"))
    per_layer = {"act(mlp_pre)", "attn_probs @ value", "the softmax of attn_scores", "exactly the keys"}
    if model.facts.activation not in activations():
        assert name == "apertus"  # its activation has weights of its own
        per_layer.discard("act(mlp_pre)")
    if model.facts.latent_attention:
        per_layer.discard("attn_probs @ value")
    if model.facts.attn_difference:
        per_layer = per_layer - {"attn_probs @ value"} | {"the difference of two halves of attn_probs @ value"}
    if model.facts.layers[0].key_budget is not None:
        per_layer = per_layer - {"exactly the keys"} | {"as many keys"}
    for layer in model.facts.layers:
        how = ", normalised, is" if model.facts.norm_on_sum else " is"
        sums = {f"resid_pre + attn_out_post{' + mlp_out_post' if layer.parallel else ''}{how}"}
        one = layer.parallel or "mlp_out_post" in model.facts.absent
        sums |= set() if one else {f"resid_mid + mlp_out_post{how}"}
        chain = {"resid_post is the next"} if layer.index + 1 < model.n_layers else set()
        here = [check for check in found.checks if check.layer == layer.index]
        for start in per_layer | sums | chain:
            assert sum(check.identity.startswith(start) for check in here) == 1, (layer.index, start)
    assert all(check.control is not None for check in found.checks)


def check_modules(model: InterpModel) -> None:
    """3: the projections; and the norms, which pin down the inputs and outputs that sums do not."""
    cache = captured(model)
    backend: Any = model.session.backend()
    with torch.no_grad():
        for i in range(model.n_layers):
            flat = cache[f"z.{i}"].flatten(2)
            assert difference(module(model, "attn.o_proj", i)(flat), cache[f"attn_out.{i}"]) < TIGHT
            assert difference(module(model, "attn.o_proj", i)(flat.roll(1, -1)), cache[f"attn_out.{i}"]) > 10 * TIGHT
            down = module(model, "mlp.down_proj", i)
            assert difference(down(cache[f"mlp_act.{i}"]), cache[f"mlp_out.{i}"]) < TIGHT
            assert difference(down(cache[f"mlp_act.{i}"].roll(1, -1)), cache[f"mlp_out.{i}"]) > 10 * TIGHT
            if "mlp" in model.facts.adds_residual and backend.layout.has("mlp", i):
                whole = module(model, "mlp", i)(cache[f"mlp_in.{i}"], cache[f"resid_mid.{i}"])
                assert difference(whole, cache[f"resid_post.{i}"]) < TIGHT
                assert difference(cache[f"mlp_out.{i}"], cache[f"resid_post.{i}"]) > 10 * TIGHT
            elif backend.layout.has("mlp", i):
                assert difference(module(model, "mlp", i)(cache[f"mlp_in.{i}"]), cache[f"mlp_out.{i}"]) < TIGHT
            if model.facts.norm_on_sum:
                check_sum_norms(model, cache, i)
        last = cache[f"resid_post.{model.n_layers - 1}"]
        if model.facts.final_norm:
            assert difference(module(model, "final_norm", None)(last), cache["final_norm"]) < TIGHT
            assert difference(last, cache["final_norm"]) > 10 * TIGHT
            last = cache["final_norm"] * model.facts.head_scale
        if not model.facts.head_transform:
            assert difference(module(model, "lm_head", None)(last), cache["lm_head"]) < TIGHT


def check_sum_norms(model: InterpModel, cache: Any, layer: int) -> None:
    """2, where the norm stands on the sum: it is the norm with its own gain and bias, of that very sum."""
    for site, before, after in (("attn", "resid_pre", "resid_mid"), ("mlp", "resid_mid", "resid_post")):
        if f"{site}_out_post" in model.facts.absent:
            continue
        norm = module(model, f"{site}_sum_norm", layer)
        total = cache[f"{before}.{layer}"] + cache[f"{site}_out_post.{layer}"]
        assert difference(norm(total), cache[f"{after}.{layer}"]) < TIGHT
        assert difference(norm(cache[f"{before}.{layer}"]), cache[f"{after}.{layer}"]) > 10 * TIGHT
        assert difference(total, cache[f"{after}.{layer}"]) > 10 * TIGHT


def check_logits(model: InterpModel) -> None:
    """6: the lens of the last layer is the model's own output, softcap and multiplier once; the raw one is not."""
    rows = run_with_cache(model, PROMPT, [f"resid_post.{model.n_layers - 1}"])[f"resid_post.{model.n_layers - 1}"][0]
    logits = hf_logits(model, PROMPT)
    assert difference(model.decode_residuals(rows), logits) < TIGHT
    before = run_with_cache(model, PROMPT, [f"resid_post.{model.n_layers - 2}"])[f"resid_post.{model.n_layers - 2}"][0]
    assert difference(model.decode_residuals(before), logits) > 10 * TIGHT
    changed = model.facts.logit_multiplier != 1.0 or model.facts.final_softcap is not None
    assert (difference(decode_residuals(model, rows), logits) > 10 * TIGHT) is changed


def check_writes(model: InterpModel, layers: Container[int | None], *, exact: bool = True) -> None:
    """8: a zero is bit-equal to nothing; a large vector changes exactly what it should from its position on.

    Experts and scans compute several positions together, which rounds those before the written one in another way,
    and a head may give a key no weight at its own position: then not ``exact``.
    """
    ends = [f"resid_post.{model.n_layers - 1}", *(["final_norm"] if model.facts.final_norm else [])]
    plain = run_with_cache(model, PROMPT, ends)
    for address in served(model, write=True):
        if address.layer not in layers or not model.profile.specs[address.name].positional:
            continue
        shape = model.profile.shape(address)
        end = ends[1] if str(address) == "final_norm" else ends[0]
        same = run_with_cache(model, PROMPT, ends, steering=[Add(address, torch.zeros(shape))])
        assert all(torch.equal(same[key], plain[key]) for key in ends), address
        vector = torch.linspace(-3, 5, torch.Size(shape).numel())
        before = run_with_cache(model, PROMPT, [address])[address][0].flatten(1)
        with model.steer(Add(address, vector, scale=4.0), positions=[2]):
            changed = run_with_cache(model, PROMPT, list(dict.fromkeys([str(address), *ends])))
        after = changed[address][0].flatten(1)
        assert difference(after[2], before[2] + 4.0 * vector) < 1e-4, address
        if exact:
            assert torch.equal(after[:2], before[:2]), address
            assert torch.equal(changed[end][0, :2], plain[end][0, :2]), address
            assert not torch.equal(changed[end][0, 2], plain[end][0, 2]), address
        else:
            assert difference(after[:2], before[:2]) < TIGHT, address
            assert difference(changed[end][0, :2], plain[end][0, :2]) < TIGHT, address
            assert not torch.equal(changed[end][0, 2:], plain[end][0, 2:]), address


def check_bare_hooks(model: InterpModel, table: Table, blocks_path: str) -> None:
    """10: rows are bit-equal to what a second hook on the same module saw."""
    backend: Any = model.session.backend()
    blocks = backend.model.get_submodule(blocks_path)
    seen: dict[str, torch.Tensor] = {}

    def keep(key: str, side: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, out: Any = None) -> None:
            value = out if side == "out" else args[0] if args else kwargs["hidden_states"]
            seen[key] = (value if torch.is_tensor(value) else value[0]).clone()

        return hook

    handles = []
    for i, block in enumerate(blocks):
        for point, (path, side) in table.items():
            part = block.get_submodule(path)
            register = part.register_forward_pre_hook if side == "in" else part.register_forward_hook
            handles.append(register(keep(f"{point}.{i}", side), with_kwargs=True))
    try:
        cache = run_with_cache(model, PROMPT, [f"{point}.{i}" for point in table for i in range(model.n_layers)])
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == len(table) * model.n_layers
    for key, want in seen.items():
        heads_first = want.dim() == 4 and want.shape[1] != len(PROMPT)
        rows = want.transpose(1, 2) if heads_first else want
        assert torch.equal(cache[key].flatten(), rows.flatten()), key
