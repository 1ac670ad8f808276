"""Facts against real modules: every row of the table of families, on a tiny random model that is traced.

The truth here is what the modules compute, not what the tests' author remembers: widths are taken from
the tensors, norms from which output is whose input, factors from the sums that the block makes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from interp_core.facts import LayerFacts, ModelFacts
from interp_core.facts_reader import read_facts
from tests.unit.traced import (
    CASES,
    LAYERS,
    TOKENS,
    WINDOW,
    Block,
    Call,
    block_path,
    case_id,
    linears,
    same,
    tiny_config,
    tiny_model,
    trace,
)

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def tokens() -> Any:
    return torch.randint(5, 120, (2, TOKENS), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("model_type", "form"), CASES, ids=case_id)
def test_a_row_is_what_the_modules_compute(model_type: str, form: dict[str, Any], tokens: Any) -> None:
    config = tiny_config(model_type, **form)
    facts = read_facts(config)
    assert facts.structure_known, model_type
    assert (facts.model_type, facts.n_layers, len(facts.layers)) == (model_type, LAYERS, LAYERS)
    json.dumps(facts.describe())
    model = tiny_model(config)
    calls, result = trace(model, tokens)
    path = block_path(model, calls, LAYERS)
    for layer in facts.layers:
        block = Block.read(calls, f"{path}.{layer.index}")
        _check_residual(facts, layer, block)
        if layer.softmax:
            _check_attention(facts, layer, block)
        _check_mlp(facts, layer, block)
    _check_ends(facts, model, calls, Block.read(calls, f"{path}.0"), calls[f"{path}.{LAYERS - 1}"].made, result)


def _check_residual(facts: ModelFacts, layer: LayerFacts, block: Block) -> None:
    assert block.mixer is not None
    assert block.normed_before(block.mixer) == facts.attn_pre_norm
    if facts.norm_on_sum:
        _check_sums_that_are_normed(block)
        return
    added, post = block.contribution(block.mixer)
    assert post == facts.attn_post_norm
    total, raw = added, block.mixer.made.view_as(block.before)
    if layer.mlp == "none":
        assert block.mlp is None
    else:
        assert block.mlp is not None
        assert block.normed_before(block.mlp) == facts.mlp_pre_norm
        second, post = block.contribution(block.mlp)
        assert post == facts.mlp_post_norm
        total, raw = total + second, raw + block.mlp.made.view_as(block.before)
        normed = [call.given for call in block.norms.values() if same(call.made, block.mlp.given)]
        assert same((normed or [block.mlp.given])[0], block.before) == layer.parallel
    assert same(block.before + facts.residual_multiplier * total, block.after)
    if facts.attn_post_norm or facts.residual_multiplier != 1.0:
        assert not same(block.before + raw, block.after), "the raw outputs must not add up"


def _check_sums_that_are_normed(block: Block) -> None:
    assert block.mixer is not None
    assert block.mlp is not None
    first = block.before + block.mixer.made.view_as(block.before)
    middle = next(call.made for call in block.norms.values() if same(call.given, first))
    assert same(block.mlp.given, middle)
    second = middle + block.mlp.made.view_as(middle)
    assert same(next(call.made for call in block.norms.values() if same(call.given, second)), block.after)
    assert not same(second, block.after), "the sum itself must not be the output"


def _check_attention(facts: ModelFacts, layer: LayerFacts, block: Block) -> None:
    assert block.mixer is not None
    widths = {name.rsplit(".", 1)[-1]: call.made.shape[-1] for name, call in block.inside_mixer.items()}
    queries, keys = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
    values = layer.n_kv_heads * layer.v_head_dim
    if "z" in facts.absent:  # Queries and output projections are experts' here.
        assert widths["kv_proj"] == keys + values
        return
    if facts.latent_attention:
        widths = _latent_widths(layer, widths)
    fused = [widths[name] for name in ("query_key_value", "qkv_proj", "c_attn") if name in widths]
    if fused:
        assert (fused, facts.attn_gate) == ([queries + keys + values], "")
    else:
        packed = 2 if facts.attn_gate == "packed" else 1
        assert (widths["q_proj"], widths["k_proj"], widths["v_proj"]) == (packed * queries, keys, values)
    assert ("gate_proj" in widths) == (facts.attn_gate == "separate")
    outputs = [call for call in linears(block.inside_mixer) if same(call.made, block.mixer.made)]
    assert [call.given.shape[-1] for call in outputs] == [layer.n_heads * layer.v_head_dim]
    own = {n: c for n, c in block.inside_mixer.items() if c.given.dim() > 2 and ".indexer." not in n}
    norms = {n.rsplit(".", 1)[-1]: c for n, c in own.items()}
    norms = {n: c for n, c in norms.items() if "norm" in n and "_a_" not in n and n != "groupnorm"}
    assert (norms.pop("attn_sub_norm", None) is not None) == facts.attn_sub_norm
    full = {queries, keys}
    kinds = {"full" if c.given.shape[-1] in full and c.given.dim() == 3 else "head" for c in norms.values()}
    assert kinds == ({facts.qk_norm} if facts.qk_norm else {"head"} if "q_norm_in" in facts.absent else set())
    assert hasattr(block.mixer.module, "sinks") == facts.sinks
    scaling = getattr(block.mixer.module, "scaling", None)
    if scaling is not None:
        assert scaling == pytest.approx(layer.head_dim**-0.5 if facts.attn_scale is None else facts.attn_scale)


def _latent_widths(layer: LayerFacts, widths: dict[str, int]) -> dict[str, int]:
    """Widths of what is projected from the latent vectors, under the names of what would be projected else."""
    queries = widths["q_b_proj"] if "q_b_proj" in widths else widths["q_proj"]
    nope, values = widths["kv_b_proj"] - layer.n_heads * layer.v_head_dim, layer.n_heads * layer.v_head_dim
    assert nope == layer.n_heads * 16
    assert widths["kv_a_proj_with_mqa"] == 20 + layer.head_dim - 16
    return {"q_proj": queries, "k_proj": nope + layer.n_heads * (layer.head_dim - 16), "v_proj": values}


def _check_mlp(facts: ModelFacts, layer: LayerFacts, block: Block) -> None:
    if block.mlp is None:
        assert layer.mlp == "none"
        return
    parameters = dict(block.mlp.module.named_parameters()) if block.mlp.module is not None else {}
    experts = [p for name, p in parameters.items() if p.dim() == 3 and "conv" not in name]
    assert bool(experts) == (layer.mlp == "sparse")
    if experts:
        assert {p.shape[0] for p in experts} == {layer.n_experts}
        assert any("shared" in name for name in parameters) == (layer.n_shared_experts > 0)
        assert (layer.top_k, layer.d_mlp) == (2, 0)
        return
    projections = list(linears(block.inside_mlp))
    down = [call for call in projections if same(call.made, block.mlp.made)]
    assert [call.given.shape[-1] for call in down] == [layer.d_mlp]
    ups = [call.made.shape[-1] for call in projections if call not in down]
    assert sum(ups) == layer.d_mlp * (2 if facts.gated_mlp else 1)


def _check_ends(facts: ModelFacts, model: Any, calls: dict[str, Call], first: Block, last: Any, result: Any) -> None:
    table = model.get_input_embeddings()
    assert tuple(table.weight.shape) == (facts.vocab_size, facts.d_model)
    embedded = next(call for call in calls.values() if call.module is table)
    plain = torch.nn.functional.embedding(embedded.given, table.weight)
    inside = facts.embedding_scale if facts.embedding_scale_inside else 1.0
    outside = facts.embedding_scale / inside
    assert same(inside * plain, embedded.made)
    if facts.embedding_norm:
        assert not same(outside * embedded.made, first.before), "a norm stands between"
    elif facts.positions in ("rotary", "none", "alibi"):
        assert same(outside * embedded.made, first.before)
    else:
        assert not same(outside * embedded.made, first.before), "a table of positions is added"
    normed = [call for call in calls.values() if same(call.given, last) and "Norm" in type(call.module).__name__]
    assert bool(normed) == facts.final_norm
    head = model.get_output_embeddings()
    if head is None:
        return
    assert (head.weight is table.weight) == facts.tied_embeddings
    unembedded = next(call for call in calls.values() if call.module is head)
    assert same(unembedded.given, normed[0].made * facts.head_scale if facts.final_norm else last)
    logits = unembedded.made * facts.logit_multiplier
    if facts.final_softcap is not None:
        logits = torch.tanh(logits / facts.final_softcap) * facts.final_softcap
    assert same(logits, result.logits)


WINDOWED = (
    *("mistral", "mixtral", "phi3", "phimoe", "starcoder2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2"),
    *("gemma3_text", "vaultgemma", "cohere2", "olmo3", "ministral", "exaone4", "smollm3", "gpt_oss", "gpt_neo", "cwm"),
    *("dots1", "mellum", "exaone_moe", "afmoe", "qwen2_vl_text", "qwen2_5_vl_text"),
)
# No window is read by these, whatever their configuration says.
UNWINDOWED = ("llama", "gemma", "olmo2", "granite", "phi", "qwen3_vl_moe_text")


@pytest.mark.parametrize("model_type", WINDOWED + UNWINDOWED)
def test_a_window_leaves_exactly_as_many_keys(model_type: str, tokens: Any) -> None:
    form: dict[str, Any] = {"sliding_window": WINDOW} if model_type in UNWINDOWED else {}
    if model_type.endswith("vl_text"):
        form = {"use_sliding_window": True, "max_window_layers": 2}
    config = tiny_config(model_type, **form)
    facts = read_facts(config)
    windows = [layer.window for layer in facts.layers]
    assert (WINDOW in windows) == (model_type in WINDOWED)
    assert [layer.mixer == "sliding_attention" for layer in facts.layers] == [w is not None for w in windows]
    _, result = trace(tiny_model(config), tokens, output_attentions=True)
    seen = [int((probabilities[0, 0, -1] > 0).sum()) for probabilities in result.attentions]
    assert seen == [window or TOKENS for window in windows]


@pytest.mark.parametrize("model_type", ["gpt_neo", "opt", "biogpt"])
def test_the_factor_on_scores_where_no_module_names_it(model_type: str, tokens: Any) -> None:
    config = tiny_config(model_type)
    facts = read_facts(config)
    model = tiny_model(config)
    calls, result = trace(model, tokens, output_attentions=True)
    block = Block.read(calls, f"{block_path(model, calls, LAYERS)}.0")
    heads = facts.layers[0].n_heads
    made = {name.rsplit(".", 1)[-1]: call.made[0] for name, call in block.inside_mixer.items()}
    query, key = (made[name].view(TOKENS, heads, -1).transpose(0, 1) for name in ("q_proj", "k_proj"))
    scale = facts.head_dim**-0.5 if facts.attn_scale is None else facts.attn_scale
    scores = (query[:, -1:] @ key.transpose(1, 2)).squeeze(1)
    assert same(torch.softmax(scores * scale, dim=-1), result.attentions[0][0, :, -1])
    assert not same(torch.softmax(scores * scale * 2, dim=-1), result.attentions[0][0, :, -1])


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "vaultgemma"])
def test_an_attention_softcap_is_a_fact_only_where_it_acts(model_type: str, tokens: Any) -> None:
    logits = []
    for cap in (0.01, 50.0):
        config = tiny_config(model_type, attn_logit_softcapping=cap)
        assert read_facts(config).attn_softcap == (None if model_type == "gemma3_text" else cap)
        model = tiny_model(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "q_proj" in name or "k_proj" in name:
                    parameter.mul_(20)
        logits.append(trace(model, tokens)[1].logits)
    assert same(*logits) == (model_type == "gemma3_text")


def test_keys_and_values_that_later_layers_share() -> None:
    layers = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    config = transformers.CONFIG_MAPPING["gemma4_text"](
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        vocab_size=128,
        sliding_window=4,
        layer_types=layers,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=128,
    )
    facts = read_facts(config)
    assert [layer.kv_shared_from for layer in facts.layers] == [None, None, None, 2, 1]
    assert [layer.head_dim for layer in facts.layers] == [16, 32, 16, 16, 32]
    assert [layer.window for layer in facts.layers] == [4, None, 4, 4, None]
    for layer, block in zip(facts.layers, tiny_model(config).model.layers, strict=True):
        assert (not hasattr(block.self_attn, "k_proj")) == (layer.kv_shared_from is not None)
        assert block.self_attn.q_proj.out_features == layer.n_heads * layer.head_dim
        assert block.mlp.down_proj.in_features == layer.d_mlp


@pytest.mark.parametrize("text", ["cohere", "granite", "gemma2"])
def test_a_wrapper_has_an_unembedding_of_its_own(text: str, tokens: Any) -> None:
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14
    )
    trunk = tiny_config(text)
    config = transformers.LlavaConfig(text_config=trunk, vision_config=vision)
    facts = read_facts(config)
    assert (facts.structure_known, facts.text_path, facts.outer_model_type) == (True, "text_config", "llava")
    assert (facts.logit_multiplier, facts.final_softcap) == (1.0, None)
    alone = read_facts(trunk)
    assert (alone.logit_multiplier, alone.final_softcap) != (1.0, None), "the text model alone scales or caps"
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config).float().eval()
    calls, result = trace(model, tokens)
    unembedded = next(call for call in calls.values() if call.module is model.get_output_embeddings())
    assert same(unembedded.made, result.logits)
