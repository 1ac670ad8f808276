"""Known traps of the right shape and the wrong tensor: each beside the naive way, which must give something else.

Numbers are those of the project's list of traps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import families
import moe_families
import pytest
import torch
from checks import TIGHT, hf_logits, module
from tiny_families import PROMPT, save
from torch import Tensor

from interp_core import Ablate, CapabilityUnsupported, InterpModel, decode_residuals, load_model, run_with_cache
from interp_core.checks import difference
from interp_core.logits import finished

WRONG = 100 * TIGHT
"""What the naive way is off by at least: nowhere a matter of rounding."""


@pytest.fixture(scope="module")
def get(folders: Path) -> Iterator[Callable[[str], InterpModel]]:
    """Tiny models by family, float32, loaded once."""
    loaded: dict[str, InterpModel] = {}

    def one(name: str) -> InterpModel:
        if name not in loaded:
            own = families if name in families.FAMILIES else moe_families
            loaded[name] = load_model(own.save(name, folders), backend="eager", dtype="float32").warmup()
        return loaded[name]

    yield one
    for model in loaded.values():
        model.shutdown()


def inside(model: InterpModel) -> Any:
    """The transformers model."""
    backend: Any = model.session.backend()
    return backend.model


def read(model: InterpModel, layer: int, *names: str) -> list[Tensor]:
    """Rows of one prompt at points of a layer."""
    cache = run_with_cache(model, PROMPT, [f"{name}.{layer}" for name in names])
    return [cache[f"{name}.{layer}"][0] for name in names]


def hooked(model: InterpModel, part: Any, *, copy: bool = True) -> Any:
    """What a hook on a module is given; ``copy`` it there and then."""
    seen: list[Any] = []
    handle = part.register_forward_hook(
        lambda _module, _args, out: seen.append(out.clone() if copy and torch.is_tensor(out) else out)
    )
    try:
        hf_logits(model, PROMPT)
    finally:
        handle.remove()
    return seen[0]


def first(out: Any) -> Tensor:
    tensor: Tensor = out if torch.is_tensor(out) else out[0]
    return tensor.reshape(-1, tensor.shape[-1])


@pytest.mark.parametrize("family", ["bloom", "mpt"])
def test_modules_that_return_the_residual_too(family: str, get: Any) -> None:
    """3: BLOOM's attention and MLP, and MPT's MLP, return the residual with their output, which is no contribution."""
    model = get(family)
    for site, before, after in [("attn", "resid_pre", "resid_mid"), ("mlp", "resid_mid", "resid_post")]:
        if (family, site) == ("mpt", "attn"):
            continue
        naive = first(hooked(model, module(model, site, 1)))
        start, added, end = read(model, 1, before, f"{site}_out_post", after)
        assert torch.equal(naive, end)
        assert difference(start + added, end) < TIGHT
        assert difference(naive, added) > WRONG


def test_a_capture_is_a_copy(get: Any) -> None:
    """4: Falcon adds attention into the MLP's output in place, after the module returned it."""
    model = get("falcon-one_key")
    mlp_out, attn_out = read(model, 1, "mlp_out", "attn_out")
    naive = first(hooked(model, module(model, "mlp", 1), copy=False))
    assert torch.equal(first(hooked(model, module(model, "mlp", 1))), mlp_out)
    assert difference(naive, mlp_out + attn_out) < TIGHT
    assert difference(naive, mlp_out) > WRONG


@pytest.mark.parametrize("family", ["gpt_neox", "gpt_neox-sequential"])
def test_a_residual_between_sublayers_only_where_they_are_in_sequence(family: str, get: Any) -> None:
    """5: GPT-NeoX has one only with ``use_parallel_residual=False``; the sum of a parallel block is read by nobody."""
    model, parallel = get(family), family == "gpt_neox"
    pre, added, mlp_in = read(model, 1, "resid_pre", "attn_out_post", "mlp_in")
    norm = module(model, "block", 1).post_attention_layernorm
    with torch.no_grad():
        right, naive = (norm(pre), norm(pre + added)) if parallel else (norm(pre + added), norm(pre))
    assert difference(right, mlp_in) < TIGHT
    assert difference(naive, mlp_in) > WRONG
    if parallel:
        with pytest.raises(CapabilityUnsupported, match="parallel"):
            run_with_cache(model, PROMPT, ["resid_mid.1"])
    else:
        assert difference(read(model, 1, "resid_mid")[0], pre + added) < TIGHT


def test_heads_are_as_wide_as_they_are(get: Any) -> None:
    """6: a head is not ``hidden / heads`` wide, and layers differ."""
    llama, laguna = get("llama"), get("laguna")
    (z,) = read(llama, 1, "z")
    naive = llama.d_model // llama.n_heads
    assert z.shape == (len(PROMPT), 4, 16)
    assert naive == 12
    assert z[0].numel() == module(llama, "attn.o_proj", 1).in_features != llama.d_model
    assert [read(laguna, layer, "z")[0].shape[1:] for layer in (0, 1)] == [(4, 16), (2, 16)]


def test_neurons_and_routers_layer_by_layer(get: Any) -> None:
    """7: a dense layer of a model with experts has neurons; a sparse one refuses them, and serves its router."""
    model = get("qwen2_moe")
    assert model.facts.layers[0].mlp == "dense"
    for layer in range(model.n_layers):
        for point, there in (("mlp_pre", layer == 0), ("mlp_act", layer == 0), ("router_logits", layer > 0)):
            assert (model.refusal(f"{point}.{layer}") is None) is there  # one answer for all layers is wrong somewhere
    gate, linear, act = read(model, 0, "mlp_pre", "mlp_pre_linear", "mlp_act")
    assert difference(torch.nn.functional.silu(gate) * linear, act) < TIGHT
    with pytest.raises(CapabilityUnsupported):
        run_with_cache(model, PROMPT, ["mlp_act.1"])


def test_sinks_take_their_share_of_the_probabilities(get: Any) -> None:
    """10: rows of gpt-oss do not sum to 1: what a softmax over the keys alone gives is not what is there."""
    model = get("gpt_oss")
    for layer in range(model.n_layers):
        scores, probs, value, z = read(model, layer, "attn_scores", "attn_probs", "value", "z")
        sinks = module(model, "attn", layer).sinks.detach()[:, None, None].expand(-1, len(PROMPT), 1)
        naive, right = scores.softmax(-1), torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        assert difference(right, probs) < TIGHT
        assert float(probs.sum(-1).min()) < 0.9
        assert float(probs.sum(-1).max()) < 1 - TIGHT
        values = value.repeat_interleave(2, dim=1)
        assert difference(torch.einsum("hqk,khd->qhd", probs, values), z) < TIGHT
        assert difference(torch.einsum("hqk,khd->qhd", naive, values), z) > WRONG


def test_a_window_counts_the_current_token(get: Any) -> None:
    """11: a window of 4 leaves exactly 4 keys, the query's own among them; one less or more is another sum."""
    probs, value, z = read(get("mistral"), 1, "attn_probs", "value", "z")
    n, values = torch.arange(len(PROMPT)), value.repeat_interleave(2, dim=1)
    back = n[:, None] - n[None]
    for keys, right in ((4, True), (3, False), (5, False)):
        kept = (back >= 0) & (back < keys)
        assert torch.equal(probs > 0, kept.expand_as(probs)) is right
    fewer = probs * (back < 3)
    naive = torch.einsum("hqk,khd->qhd", fewer / fewer.sum(-1, keepdim=True), values)
    assert difference(torch.einsum("hqk,khd->qhd", probs, values), z) < TIGHT
    assert difference(naive, z) > WRONG


def test_a_softcap_comes_before_the_mask(get: Any) -> None:
    """12: capped behind the mask, keys that a query must not see would get weights."""
    model, cap = get("gemma2"), 2.0
    scores, probs = read(model, 1, "attn_scores", "attn_probs")
    future = torch.ones(len(PROMPT), len(PROMPT)).triu(1).bool()
    assert float(scores[:, ~future].max()) <= cap
    assert bool(scores[:, future].isinf().all())
    assert difference(scores.softmax(-1), probs) < TIGHT
    naive = (cap * torch.tanh(scores / cap)).softmax(-1)
    assert bool((naive[:, future] > 0).all())
    assert difference(naive, probs) > WRONG


@pytest.mark.parametrize("family", ["gemma2", "granite", "cohere"])
def test_the_logits_are_finished_once(family: str, get: Any) -> None:
    """12: a final softcap (Gemma 2) or a factor (Granite ÷4, Cohere ×0.25) is applied once: not never, nor twice."""
    model = get(family)
    (rows,) = read(model, model.n_layers - 1, "resid_post")
    raw, once, want = decode_residuals(model, rows), model.decode_residuals(rows), hf_logits(model, PROMPT)
    assert difference(once, want) < TIGHT
    assert torch.equal(once, finished(raw, model.facts))
    assert difference(raw, want) > WRONG
    assert difference(finished(once, model.facts), want) > WRONG


@pytest.mark.parametrize(("family", "factor", "within"), [("gemma", 48**0.5, True), ("granite", 3.0, False)])
def test_an_embedding_scale_inside_or_outside_its_module(family: str, factor: float, within: bool, get: Any) -> None:
    """13: Gemma's embedding module scales, Granite's trunk does; ``embeddings`` is what the module gives."""
    model = get(family)
    cache = run_with_cache(model, PROMPT, ["embeddings", "resid_pre.0"])
    rows, start = cache["embeddings"][0], cache["resid_pre.0"][0]
    table = inside(model).get_input_embeddings().weight.detach()[PROMPT]
    right, naive = (factor * table, table) if within else (table, factor * table)
    assert difference(rows, right) < TIGHT
    assert difference(rows, naive) > WRONG
    assert difference(start, factor * table) < TIGHT
    assert difference(start, factor**2 * table) > WRONG
    assert model.facts.embedding_scale_inside is within


def test_the_last_hidden_state_is_behind_the_final_norm(get: Any) -> None:
    """14: the last of transformers' ``hidden_states`` is not the last block's output."""
    model = get("llama")
    with torch.no_grad():
        states = inside(model)(input_ids=torch.tensor([PROMPT]), output_hidden_states=True).hidden_states
    cache = run_with_cache(model, PROMPT, ["resid_post.*", "final_norm"])
    assert all(torch.equal(states[layer + 1], cache[f"resid_post.{layer}"]) for layer in range(3))
    assert torch.equal(states[-1], cache["final_norm"])
    assert difference(states[-1], cache["resid_post.3"]) > WRONG


@pytest.mark.parametrize("family", ["gptj", "falcon-new", "bloom", "mpt"])
def test_blocks_that_return_tuples(family: str, get: Any) -> None:
    """15: these blocks return tuples; a hook that takes the output for a tensor reads and writes something else."""
    model = get(family)
    block = module(model, "block", 1)
    naive = hooked(model, block)
    assert isinstance(naive, tuple)
    assert torch.equal(first(naive), read(model, 1, "resid_post")[0])
    with model.steer(Ablate("resid_post.1")):
        assert isinstance(hooked(model, block), tuple)
        zeros = run_with_cache(model, PROMPT, ["resid_post.1", "resid_pre.2"])
    assert not zeros["resid_post.1"].any()
    assert not zeros["resid_pre.2"].any()


def test_attention_under_a_fused_kernel(get: Any, folders: Path) -> None:
    """16: asked for attentions, a fused kernel gives none; going over to another one changes what is computed."""
    model = get("llama")
    assert inside(model).config._attn_implementation == "sdpa"
    with torch.no_grad():
        naive = inside(model)(input_ids=torch.tensor([PROMPT]), output_attentions=True).attentions
    assert not [probs for probs in naive or () if probs is not None]
    with load_model(save("llama", folders), backend="eager", dtype="float32", attn_implementation="eager") as other:
        with torch.no_grad():
            want = inside(other)(input_ids=torch.tensor([PROMPT]), output_attentions=True).attentions
        elsewhere = run_with_cache(other, PROMPT, ["lm_head"])["lm_head"]
    alone = run_with_cache(model, PROMPT, ["lm_head"])["lm_head"]
    beside = run_with_cache(model, PROMPT, ["lm_head", "attn_scores.*", "attn_probs.*"])
    assert all(difference(beside[f"attn_probs.{layer}"], want[layer]) < TIGHT for layer in range(4))
    assert torch.equal(beside["lm_head"], alone)
    assert not torch.equal(elsewhere, alone)


def test_what_the_mlp_reads_is_behind_the_gain(get: Any) -> None:
    """17: rows that a norm has normalised, before its gain, are not what the MLP reads."""
    model = get("llama")
    mid, mlp_in = read(model, 1, "resid_mid", "mlp_in")
    norm = module(model, "block", 1).post_attention_layernorm
    naive = mid * (mid.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    assert difference(naive * norm.weight.detach(), mlp_in) < TIGHT
    assert difference(naive, mlp_in) > WRONG


def test_grouped_heads_are_repeated_and_not_tiled(get: Any) -> None:
    """18: query head h reads key head h // group."""
    probs, value, z = read(get("llama"), 1, "attn_probs", "value", "z")
    assert value.shape[1] == 2
    assert difference(torch.einsum("hqk,khd->qhd", probs, value.repeat_interleave(2, dim=1)), z) < TIGHT
    assert difference(torch.einsum("hqk,khd->qhd", probs, value.repeat(1, 2, 1)), z) > WRONG


def test_a_linear_mixer_refuses_attention_points(get: Any) -> None:
    """19: Qwen3-Next's linear layers have no probabilities; one answer for the whole model is wrong at half of them."""
    model = get("qwen3_next")
    softmax = [hasattr(module(model, "block", layer), "self_attn") for layer in range(model.n_layers)]
    assert softmax == [False, True, False, True]
    for layer, there in enumerate(softmax):
        for point in ("attn_scores", "attn_probs", "value", "z"):
            assert (model.refusal(f"{point}.{layer}") is None) is there
    with pytest.raises(CapabilityUnsupported, match="linear_attention"):
        run_with_cache(model, PROMPT, ["attn_probs.0"])


def test_neurons_without_an_mlp_module(get: Any) -> None:
    """20: OPT's blocks hold ``fc1`` and ``fc2`` and no MLP; whoever looks for the module finds no neurons."""
    model = get("opt")
    block = module(model, "block", 1)
    with pytest.raises(AttributeError):
        block.get_submodule("mlp")
    pre, act, out = read(model, 1, "mlp_pre", "mlp_act", "mlp_out")
    assert torch.equal(first(hooked(model, block.fc1)), pre)
    with torch.no_grad():
        assert difference(block.fc2(act), out) < TIGHT
        assert difference(block.fc2(pre), out) > WRONG


def test_a_nested_text_trunk(get: Any) -> None:
    """21: the blocks of a wrapper's language model are the model's; those of its vision tower are as many."""
    model = get("gemma3-wrapper")
    trunk = inside(model).model
    with pytest.raises(AttributeError):
        inside(model).get_submodule("model.layers")  # where a plain decoder has them
    assert model.d_model == 48 != inside(model).config.vision_config.hidden_size
    want = first(hooked(model, trunk.language_model.layers[1]))
    assert torch.equal(read(model, 1, "resid_post")[0], want)


def test_positions_follow_the_mask(get: Any) -> None:
    """22: GPT-2's positions of a row that is padded on the left begin where its tokens do, not at the padding."""
    model, row = get("gpt2"), PROMPT[:6]
    padded, mask = torch.tensor([[0] * 4 + row]), torch.tensor([[0] * 4 + [1] * 6])
    got = run_with_cache(model, padded, ["lm_head"], attention_mask=mask)["lm_head"][0, 4:]
    with torch.no_grad():
        naive = inside(model)(input_ids=padded, attention_mask=mask, position_ids=torch.arange(10)[None]).logits[0, 4:]
    assert difference(got, hf_logits(model, row)) < TIGHT
    assert difference(naive, hf_logits(model, row)) > WRONG
