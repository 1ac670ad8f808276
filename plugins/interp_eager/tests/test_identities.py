"""The identities on every family of ``families``, the served points against bare hooks at paths written down here.

Numbers in names of tests are those of the list of identities in the project's table of points. What
``test_numbers`` already asks of the common families is asked here of the others too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from test_numbers import TIGHT, check_logits, check_modules, served
from tiny_families import PROMPT

from interp_core import Add, InterpModel, load_model, run_with_cache
from interp_core.identities import activations, difference
from interp_core.verify import verify

Table = dict[str, tuple[str, str]]


def parts(
    attn: str = "self_attn",
    o: str = "o_proj",
    v: str = "v_proj",
    mlp: str = "mlp",
    mlp_parts: str = "gate_proj up_proj down_proj",
    mid: str = "post_attention_layernorm",
    post: str = "",
    qk: str = "",
) -> Table:
    """Point to path within a block and side; an empty name is a point that is no module's end there."""
    *branches, down = mlp_parts.split()
    inside = f"{mlp}." if mlp else ""
    table = {
        "attn_in": (attn, "in"),
        "z": (f"{attn}.{o}", "in"),
        "attn_out": (f"{attn}.{o}", "out"),
        "mlp_in": (mlp or branches[0], "in"),
        "mlp_act": (inside + down, "in"),
        "mlp_out": (inside + down, "out"),
        "resid_pre": ("", "in"),
        "resid_post": ("", "out"),
    }
    table |= {p: (inside + b, "out") for p, b in zip(("mlp_pre", "mlp_pre_linear"), branches, strict=False) if b != "-"}
    table |= {"value": (f"{attn}.{v}", "out")} if v else {}
    table |= {"resid_mid": (mid, "in")} if mid else {}
    for site, norm in zip(("attn", "mlp"), post.split(), strict=False):
        table[f"{site}_out_post"] = (norm, "out")
    for letter in "qk" if qk else "":
        table |= {f"{letter}_norm_{side}": (f"{attn}.{letter}{qk}", side) for side in ("in", "out")}
    return table


PLAIN = parts()
PRE_POST = "post_attention_layernorm post_feedforward_layernorm"
GEMMA2 = parts(mid="pre_feedforward_layernorm", post=PRE_POST)
UP_DOWN = "up_proj down_proj"
FUSED = "- down_proj"  # gate and up in one projection: the branches are no module's end
FC = "fc1 fc2"
FOUR = "dense_h_to_4h dense_4h_to_h"
GPT2 = parts("attn", "c_proj", "", "mlp", "c_fc c_proj", "ln_2")
FALCON = parts("self_attention", "dense", "", "mlp", FOUR, "")
NEOX = parts("attention", "dense", "", "mlp", FOUR, "")
OPT = parts("self_attn", "out_proj", "v_proj", "", FC, "final_layer_norm")

PATHS: dict[str, Table] = {
    **dict.fromkeys("llama llama-one_key qwen2 qwen2-windows mistral granite gemma olmo helium".split(), PLAIN),
    "qwen3": parts(qk="_norm"),
    "gemma2": GEMMA2,
    "gemma3": parts(mid="pre_feedforward_layernorm", post=PRE_POST, qk="_norm"),
    "gemma3-wrapper": parts(mid="pre_feedforward_layernorm", post=PRE_POST, qk="_norm"),
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neo": parts("attn", "attention.out_proj", "attention.v_proj", "mlp", "c_fc c_proj", "ln_2"),
    "gpt_neox": NEOX,
    "gpt_neox-sequential": NEOX | {"resid_mid": ("post_attention_layernorm", "in")},
    "gptj": parts("attn", "out_proj", "v_proj", "mlp", "fc_in fc_out", ""),
    "codegen": parts("attn", "out_proj", "", "mlp", "fc_in fc_out", ""),
    "olmo2": parts(mid="mlp", post=PRE_POST, qk="_norm"),
    "olmo3": parts(mid="mlp", post=PRE_POST, qk="_norm"),
    "exaone4": parts(mid="mlp", post=PRE_POST, qk="_norm"),
    "cohere": parts(mid=""),
    "cohere2": parts(mid=""),
    "cohere-qk_norm": parts(mid="", qk="_norm"),
    "phi3": parts(v="", mlp_parts=FUSED),
    "glm": parts(mlp_parts=FUSED),
    "glm4": parts(mlp_parts=FUSED, post="post_self_attn_layernorm post_mlp_layernorm"),
    "starcoder2": parts(mlp_parts="c_fc c_proj"),
    "apertus": parts(mlp_parts=UP_DOWN, mid="feedforward_layernorm", qk="_norm"),
    "arcee": parts(mlp_parts=UP_DOWN),
    "jais2": parts(mlp_parts=UP_DOWN),
    "nemotron": parts(mlp_parts=UP_DOWN),
    "biogpt": OPT,
    "opt": OPT,
    "xglm": OPT,
    "falcon-one_key": FALCON,
    "falcon-many_keys": FALCON,
    "falcon-new": FALCON,
    "falcon-sequential": FALCON | {"resid_mid": ("post_attention_layernorm", "in")},
    "hyperclovax": parts(),
    "persimmon": parts("self_attn", "dense", "", "mlp", FOUR, qk="_layernorm"),
    "phi": parts("self_attn", "dense", "v_proj", "mlp", FC, "", qk="_layernorm"),
    "stablelm": parts(qk="_layernorm"),
    "stablelm-parallel": parts(mid=""),
    "vaultgemma": parts(mid="pre_feedforward_layernorm"),
}
BLOCKS = {
    "gemma3-wrapper": "model.language_model.layers",
    **dict.fromkeys("gpt2 gpt_bigcode gpt_neo gptj codegen".split(), "transformer.h"),
    **dict.fromkeys([name for name in families.FAMILIES if name.startswith("falcon")], "transformer.h"),
    **dict.fromkeys(("gpt_neox", "gpt_neox-sequential"), "gpt_neox.layers"),
    "biogpt": "biogpt.layers",
    "opt": "model.decoder.layers",
}


@pytest.fixture(scope="session", params=families.FAMILIES)
def family(request: pytest.FixtureRequest, folders: Path) -> Iterator[tuple[str, InterpModel]]:
    """One tiny model of each family, float32, with the family's name."""
    with load_model(families.save(request.param, folders), backend="eager", dtype="float32") as model:
        yield request.param, model


def hf_model(model: InterpModel) -> Any:
    backend: Any = model.session.backend()
    return backend.model


def test_identities_1_to_5(family: tuple[str, InterpModel]) -> None:
    name, model = family
    found = verify(model, PROMPT)
    assert found.ok, found.failed()
    per_layer = {"act(mlp_pre)", "attn_probs @ value", "the softmax of attn_scores", "exactly the keys"}
    if model.facts.activation not in activations():
        assert name == "apertus"  # its activation has weights of its own
        per_layer.discard("act(mlp_pre)")
    for layer in model.facts.layers:
        sums = {"resid_pre + attn_out_post"} | (set() if layer.parallel else {"resid_mid + mlp_out_post"})
        chain = {"resid_post is the next"} if layer.index + 1 < model.n_layers else set()
        here = [check for check in found.checks if check.layer == layer.index]
        for start in per_layer | sums | chain:
            assert sum(check.identity.startswith(start) for check in here) == 1, (layer.index, start)
        assert len(here) == len(per_layer | sums | chain)
    one_key = name in ("llama-one_key", "falcon-one_key", "gpt_bigcode")
    for check in found.checks:
        assert check.control is not None or (one_key and check.identity.startswith("attn_probs @ value"))


def test_identity_3_modules(family: tuple[str, InterpModel]) -> None:
    name, model = family
    if "mlp_in" in PATHS[name] and PATHS[name]["mlp_in"][0] != "fc1":
        check_modules(model)


def test_identity_6_logits(family: tuple[str, InterpModel]) -> None:
    check_logits(family[1])


def test_identity_8_writes(family: tuple[str, InterpModel]) -> None:
    """A zero is bit-equal to nothing; a large vector changes exactly what it should from its position on."""
    _, model = family
    ends = [f"resid_post.{model.n_layers - 1}", "final_norm"]
    plain = run_with_cache(model, PROMPT, ends)
    for address in served(model, write=True):
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
        assert torch.equal(after[:2], before[:2]), address
        assert torch.equal(changed[end][0, :2], plain[end][0, :2]), address
        assert not torch.equal(changed[end][0, 2], plain[end][0, 2]), address


def test_identity_10_bare_hooks(family: tuple[str, InterpModel]) -> None:
    name, model = family
    table, trunk = PATHS[name], hf_model(model)
    blocks = trunk.get_submodule(BLOCKS.get(name, "model.layers"))
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


def test_attention_is_the_same_on_every_kernel(family: tuple[str, InterpModel], folders: Path) -> None:
    name, model = family
    points = ["attn_scores.*", "attn_probs.*", "z.*", "resid_post.3"]
    want = run_with_cache(model, PROMPT, points)
    with load_model(
        families.save(name, folders), backend="eager", dtype="float32", attn_implementation="eager"
    ) as other:
        got = run_with_cache(other, PROMPT, points)
    for key in want:
        assert torch.equal(torch.isinf(got[key]), torch.isinf(want[key])), key
        assert difference(got[key].nan_to_num(neginf=0), want[key].nan_to_num(neginf=0)) < TIGHT, key


def test_batches_and_generation_equal_one_forward(family: tuple[str, InterpModel]) -> None:
    _, model = family
    points = ["resid_post.*", "attn_probs.1", "attn_scores.2", "value.0", "lm_head"]
    rows = [PROMPT, PROMPT[:3], PROMPT[2:8]]
    batch = run_with_cache(model, rows, points)
    padded = torch.zeros(3, len(PROMPT) + 2, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for i, row in enumerate(rows):
        padded[i, -len(row) :], mask[i, -len(row) :] = torch.tensor(row), 1
    left = run_with_cache(model, padded, points, attention_mask=mask)
    for i, row in enumerate(rows):
        alone, n = run_with_cache(model, row, points), len(row)
        for key in alone:
            got = batch[key][i, :, :n, :n] if key.name.startswith("attn_") else batch[key][i, :n]
            assert difference(got.nan_to_num(neginf=0), alone[key][0].nan_to_num(neginf=0)) < TIGHT, key
            got = left[key][i, :, -n:, -n:] if key.name.startswith("attn_") else left[key][i, -n:]
            assert difference(got.nan_to_num(neginf=0), alone[key][0].nan_to_num(neginf=0)) < TIGHT, key
    completion, grown = model.capture_generation(PROMPT, points, max_tokens=6, ignore_eos=True)
    once = run_with_cache(model, [*PROMPT, *completion.token_ids[:-1]], points)
    for key in once:
        assert difference(grown[key].nan_to_num(neginf=0), once[key].nan_to_num(neginf=0)) < TIGHT, key
