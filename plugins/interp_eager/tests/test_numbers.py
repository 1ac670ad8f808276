"""Every point that eager serves, on every layer of every family and on the real model, by identities with controls.

Numbers in names of tests are those of the list of identities in the project's table of points.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_families import PROMPT

from interp_core import Add, CapabilityUnsupported, InterpModel, decode_residuals, run_with_cache, steer
from interp_core.identities import difference
from interp_core.verify import verify

TIGHT = 2e-5
UNCHECKED = set("attn_in attn_out mlp_in mlp_out final_norm q_norm_in q_norm_out k_norm_in k_norm_out".split())


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


def check_identities_1_to_5(model: InterpModel) -> None:
    found = verify(model, PROMPT)
    assert found.ok, found.failed()
    n = model.n_layers
    parallel = any(layer.parallel for layer in model.facts.layers)
    names = [check.identity for check in found.checks]
    expected = {
        "resid_post is the next": n - 1,
        "resid_pre + attn_out_post": n,
        "resid_mid + mlp_out_post": 0 if parallel else n,
        "act(mlp_pre)": n,
        "attn_probs @ value": n,
        "the softmax of attn_scores": n,
        "exactly the keys": n,
        "unembed(final_norm": 1,
        "embeddings, scaled": 0 if model.facts.positions == "learned" else 1,
    }
    for start, count in expected.items():
        assert sum(name.startswith(start) for name in names) == count, start
    assert all(check.control is not None for check in found.checks)
    unproven = {name for name, state in found.points.items() if state == "unchecked"}
    assert unproven <= UNCHECKED | ({"embeddings"} if model.facts.positions == "learned" else set())


def check_modules(model: InterpModel) -> None:
    """3: the projections; and the norms, which pin down the inputs and outputs that sums do not."""
    cache = captured(model)
    with torch.no_grad():
        for i in range(model.n_layers):
            flat = cache[f"z.{i}"].flatten(2)
            assert difference(module(model, "attn.o_proj", i)(flat), cache[f"attn_out.{i}"]) < TIGHT
            assert difference(module(model, "attn.o_proj", i)(flat.roll(1, -1)), cache[f"attn_out.{i}"]) > 10 * TIGHT
            down = module(model, "mlp.down_proj", i)
            assert difference(down(cache[f"mlp_act.{i}"]), cache[f"mlp_out.{i}"]) < TIGHT
            assert difference(down(cache[f"mlp_act.{i}"].roll(1, -1)), cache[f"mlp_out.{i}"]) > 10 * TIGHT
            assert difference(module(model, "mlp", i)(cache[f"mlp_in.{i}"]), cache[f"mlp_out.{i}"]) < TIGHT
        last = cache[f"resid_post.{model.n_layers - 1}"]
        assert difference(module(model, "final_norm", None)(last), cache["final_norm"]) < TIGHT
        assert difference(last, cache["final_norm"]) > 10 * TIGHT
        assert difference(module(model, "lm_head", None)(cache["final_norm"]), cache["lm_head"]) < TIGHT


def check_logits(model: InterpModel) -> None:
    """6: the lens of the last layer is the model's own output, softcap and multiplier once; the raw one is not."""
    rows = run_with_cache(model, PROMPT, [f"resid_post.{model.n_layers - 1}"])[f"resid_post.{model.n_layers - 1}"][0]
    logits = hf_logits(model, PROMPT)
    assert difference(model.decode_residuals(rows), logits) < TIGHT
    before = run_with_cache(model, PROMPT, [f"resid_post.{model.n_layers - 2}"])[f"resid_post.{model.n_layers - 2}"][0]
    assert difference(model.decode_residuals(before), logits) > 10 * TIGHT
    changed = model.facts.logit_multiplier != 1.0 or model.facts.final_softcap is not None
    assert (difference(decode_residuals(model, rows), logits) > 10 * TIGHT) is changed


def check_writes(model: InterpModel, layers: set[int | None]) -> None:
    """8: a zero write is nothing, a large one changes the output from exactly the position asked for."""
    last = f"resid_post.{model.n_layers - 1}"
    plain = run_with_cache(model, PROMPT, [last, "final_norm"])
    for address in served(model, write=True):
        if address.layer not in layers:
            continue
        shape = model.profile.shape(address)
        seen = [address] if str(address) != "final_norm" else ["final_norm"]
        with steer(model, [Add(address, torch.zeros(shape))]):
            same = run_with_cache(model, PROMPT, [last, "final_norm"])
        assert torch.equal(same["final_norm"], plain["final_norm"]), address
        vector = torch.linspace(-3, 5, torch.Size(shape).numel())
        before = run_with_cache(model, PROMPT, seen)[address][0]
        with steer(model, [Add(address, vector, scale=4.0)], positions=[3]):
            changed = run_with_cache(model, PROMPT, [*seen, "final_norm"])
        moved = (changed[address][0] - before).flatten(1)
        assert difference(moved[3], 4.0 * vector) < 1e-4, address
        assert torch.equal(moved[:3], torch.zeros_like(moved[:3])), address
        out = (changed["final_norm"] - plain["final_norm"])[0]
        assert torch.equal(out[:3], torch.zeros_like(out[:3])), address
        # A value or key at the written position is read by later ones; a write must reach the output somewhere.
        assert float(out[3:].abs().max()) > 1e-4, address


# Point to attribute path of the module in its block, and side, written down here per family, not taken from the layout.
BARE = {
    "llama": {"attn_in": ("self_attn", "in"), "z": ("self_attn.o_proj", "in"), "attn_out": ("self_attn.o_proj", "out"),
              "value": ("self_attn.v_proj", "out"), "mlp_in": ("mlp", "in"), "mlp_pre": ("mlp.gate_proj", "out"),
              "mlp_pre_linear": ("mlp.up_proj", "out"), "mlp_act": ("mlp.down_proj", "in"), "mlp_out": ("mlp", "out"),
              "resid_mid": ("post_attention_layernorm", "in")},
    "gpt2": {"attn_in": ("attn", "in"), "z": ("attn.c_proj", "in"), "attn_out": ("attn.c_proj", "out"),
             "resid_mid": ("ln_2", "in"), "mlp_in": ("mlp", "in"), "mlp_pre": ("mlp.c_fc", "out"),
             "mlp_act": ("mlp.c_proj", "in"), "mlp_out": ("mlp", "out")},
    "gpt_neox": {"attn_in": ("attention", "in"), "z": ("attention.dense", "in"), "attn_out": ("attention.dense", "out"),
                 "mlp_in": ("mlp", "in"), "mlp_pre": ("mlp.dense_h_to_4h", "out"), "mlp_out": ("mlp", "out"),
                 "mlp_act": ("mlp.dense_4h_to_h", "in")},
}  # fmt: skip
SANDWICH = {"attn_out_post": ("post_attention_layernorm", "out"), "mlp_out_post": ("post_feedforward_layernorm", "out")}
NORMED = {f"{x}_norm_{side}": (f"self_attn.{x}_norm", side) for x in ("q", "k") for side in ("in", "out")}
BARE |= dict.fromkeys(("qwen2", "mistral"), BARE["llama"])
BARE["qwen3"] = BARE["llama"] | NORMED
BARE["gemma2"] = BARE["llama"] | SANDWICH | {"resid_mid": ("pre_feedforward_layernorm", "in")}
BARE["gemma3_text"] = BARE["gemma2"] | NORMED
BARE["olmo2"] = BARE["llama"] | SANDWICH | NORMED | {"resid_mid": ("mlp", "in")}


def check_bare_hooks(model: InterpModel) -> None:
    """10: rows are bit-equal to what a second hook on the same module saw."""
    table = BARE.get(model.facts.model_type)
    if table is None:
        return
    backend: Any = model.session.backend()
    blocks = next(m for m in backend.model.modules() if isinstance(m, torch.nn.ModuleList))
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, side: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any, out: Any = None) -> None:
            value = (args[0] if args else kwargs["hidden_states"]) if side == "in" else out
            seen[name] = (value if torch.is_tensor(value) else value[0]).clone()

        return hook

    handles = []
    for i, block in enumerate(blocks):
        for point, (path, side) in {**table, "resid_pre": ("", "in"), "resid_post": ("", "out")}.items():
            part = block.get_submodule(path)
            register = part.register_forward_pre_hook if side == "in" else part.register_forward_hook
            handles.append(register(keep(f"{point}.{i}", side), with_kwargs=True))
    try:
        cache = captured(model)
    finally:
        for handle in handles:
            handle.remove()
    assert len(seen) == model.n_layers * (len(table) + 2)
    for name, want in seen.items():
        got = cache[name]
        heads_first = want.dim() == 4 and want.shape[1] != len(PROMPT)
        rows = want.transpose(1, 2) if heads_first else want
        assert torch.equal(got.flatten(2), rows.flatten(2)), name


def test_identities_1_to_5(model: InterpModel) -> None:
    check_identities_1_to_5(model)


def test_identity_3_modules(model: InterpModel) -> None:
    check_modules(model)


def test_identity_6_logits(model: InterpModel) -> None:
    check_logits(model)


def test_identity_8_writes_at_every_point_and_layer(model: InterpModel) -> None:
    check_writes(model, {None, *range(model.n_layers)})


def test_identity_10_bare_hooks(model: InterpModel) -> None:
    check_bare_hooks(model)


def test_identity_1_with_learned_positions(folders: Any) -> None:
    from tiny_families import save

    from interp_core import load_model

    with load_model(save("gpt2", folders), backend="eager", dtype="float32") as gpt2:
        cache = run_with_cache(gpt2, PROMPT, ["embeddings", "resid_pre.0"])
        backend: Any = gpt2.session.backend()
        table = backend.model.transformer.wpe.weight.detach()[: len(PROMPT)]
        assert torch.equal(cache["embeddings"][0] + table, cache["resid_pre.0"][0])
        assert difference(cache["embeddings"][0], cache["resid_pre.0"][0]) > 10 * TIGHT


def test_parallel_blocks_refuse_resid_mid(model: InterpModel) -> None:
    if any(layer.parallel for layer in model.facts.layers):
        with pytest.raises(CapabilityUnsupported, match="parallel"):
            run_with_cache(model, PROMPT, ["resid_mid.0"])
    else:
        assert "resid_mid.0" in run_with_cache(model, PROMPT, ["resid_mid.0"])


def test_batches_equal_one_by_one(model: InterpModel) -> None:
    rows = [PROMPT, PROMPT[:3], PROMPT[2:8]]
    points = [f"resid_post.{i}" for i in range(model.n_layers)] + ["lm_head", "attn_probs.1", "z.1.head-2"]
    batch = run_with_cache(model, rows, points)
    padded = torch.zeros(3, len(PROMPT) + 2, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for i, row in enumerate(rows):
        padded[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
    left = run_with_cache(model, padded, points, attention_mask=mask)
    for i, row in enumerate(rows):
        n = len(row)
        alone = run_with_cache(model, row, points)
        for key in points:
            want = alone[key][0]
            pair = key.startswith("attn_probs")
            got = batch[key][i, :, :n, :n] if pair else batch[key][i, :n]
            assert difference(got, want) < TIGHT, key
            got = left[key][i, :, -n:, -n:] if pair else left[key][i, -n:]
            assert difference(got, want) < TIGHT, key
            rest = batch[key][i, :, n:] if pair else batch[key][i, n:]
            assert not bool(rest.any()), key


def test_capture_while_generating_equals_one_forward(model: InterpModel) -> None:
    points = ["resid_post.3", "attn_probs.0", "attn_scores.2", "lm_head"]
    completion, grown = model.capture_generation(PROMPT, points, max_tokens=6, ignore_eos=True)
    whole = [*PROMPT, *completion.token_ids[:-1]]
    once = run_with_cache(model, whole, points)
    for key in points:
        assert grown[key].shape == once[key].shape, key
        a, b = grown[key].nan_to_num(neginf=-1e4), once[key].nan_to_num(neginf=-1e4)
        assert difference(a, b) < TIGHT, key
    greedy = [int(row.argmax()) for row in hf_logits(model, whole)[len(PROMPT) - 1 :]]
    assert list(completion.token_ids) == greedy
    assert list(model.generate(PROMPT, max_tokens=6, ignore_eos=True).token_ids) == greedy


def test_steering_reaches_only_generated_or_only_prompt_positions(llama: InterpModel) -> None:
    vector = torch.linspace(-1, 1, llama.d_model)
    plain = run_with_cache(llama, PROMPT, ["resid_post.1"])["resid_post.1"]
    with steer(llama, [Add("resid_post.1", vector, scale=5.0)], prompt=False):
        completion, cache = llama.capture_generation(PROMPT, ["resid_post.1"], max_tokens=4, ignore_eos=True)
    whole = [*PROMPT, *completion.token_ids[:-1]]
    clean = run_with_cache(llama, whole, ["resid_post.1"])["resid_post.1"][0]
    moved = cache["resid_post.1"][0] - clean
    n = len(PROMPT)
    assert torch.equal(cache["resid_post.1"][0, :n], plain[0])
    assert difference(moved[n:], (5.0 * vector).expand(3, -1)) < 1e-4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_is_the_same_on_every_kernel(llama: InterpModel, folders: Any, attention: str) -> None:
    from tiny_families import save

    from interp_core import load_model

    points = ["attn_scores.2", "attn_probs.2", "resid_post.3"]
    want = run_with_cache(llama, PROMPT, points)
    folder = save("llama", folders)
    with load_model(folder, backend="eager", dtype="float32", attn_implementation=attention) as other:
        got = run_with_cache(other, PROMPT, points)
    for key in points:
        assert difference(got[key].nan_to_num(neginf=0), want[key].nan_to_num(neginf=0)) < TIGHT


def test_hooks_are_gone_after_a_failure_and_a_users_own_stay(llama: InterpModel) -> None:
    from interp_core import Apply, RequestError

    backend: Any = llama.session.backend()
    mine = backend.model.register_forward_hook(lambda *_: None)

    def count() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backend.model.modules())

    before = count()

    def broken(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(RequestError, match="on purpose"), steer(llama, Apply("resid_post.1", broken)):
        llama.generate(PROMPT, max_tokens=2)
    assert count() == before
    for _ in llama.generate_stream(PROMPT, max_tokens=5):
        assert count() == before
        break
    mine.remove()


@pytest.mark.real_model
class TestRealModel:
    """The same on SmolLM2-135M-Instruct."""

    def test_identities_1_to_5(self, smollm: InterpModel) -> None:
        check_identities_1_to_5(smollm)

    def test_identity_3_modules(self, smollm: InterpModel) -> None:
        check_modules(smollm)

    def test_identity_6_logits(self, smollm: InterpModel) -> None:
        check_logits(smollm)

    def test_identity_8_writes(self, smollm: InterpModel) -> None:
        check_writes(smollm, {None, 0, 14, 29})

    def test_identity_10_bare_hooks(self, smollm: InterpModel) -> None:
        check_bare_hooks(smollm)

    def test_it_says_paris_and_streams_bytes_whole(self, smollm: InterpModel) -> None:
        ids = smollm.to_tokens("The capital of France is")
        assert smollm.generate(ids, max_tokens=1).text == " Paris"
        steps = list(smollm.generate_stream(smollm.to_tokens("é漢字🙂 é漢字🙂 é漢字🙂"), max_tokens=12))
        text = smollm.generate(smollm.to_tokens("é漢字🙂 é漢字🙂 é漢字🙂"), max_tokens=12).text
        assert "".join(step.token_str or "" for step in steps) == text
        assert "🙂" in text
