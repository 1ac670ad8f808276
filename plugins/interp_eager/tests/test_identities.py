"""The identities on every family of ``families``, the served points against bare hooks at paths written down here.

Numbers in names of tests are those of the list of identities in the project's table of points.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import families
import pytest
import torch
from checks import (
    TIGHT,
    Table,
    check_bare_hooks,
    check_identities_1_to_5,
    check_logits,
    check_modules,
    check_writes,
    hf_logits,
)
from tiny_families import PROMPT

from interp_core import CapabilityUnsupported, InterpModel, RequestError, load_model, run_with_cache
from interp_core.checks import difference


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

BART = parts("self_attn", "out_proj", "v_proj", "", FC, "")  # the residual between is what a norm gives: see below
ON_SUM = {"resid_mid": ("self_attn_layer_norm", "out"), "resid_post": ("final_layer_norm", "out")}

BERT = parts("attention.self", "o_proj", "value", "", "intermediate.dense output.dense", "")
BERT |= {"z": ("attention.output.dense", "in"), "attn_out": ("attention.output.dense", "out")}
BERT_ON_SUM = {"resid_mid": ("attention.output.LayerNorm", "out"), "resid_post": ("output.LayerNorm", "out")}
BERTS = "bert ernie roc_bert bert-generation git big_bird electra electra-narrow rembert roformer".split()
ROBERTAS = "roberta camembert xlm-roberta data2vec-text".split()
PRE_BERTS = {"megatron-bert": "ln", "roberta-prelayernorm": "intermediate.LayerNorm", "xlm-roberta-xl": "LayerNorm"}

PATHS: dict[str, Table] = {
    **dict.fromkeys(BERTS + ROBERTAS, BERT | BERT_ON_SUM),
    **{name: BERT | {"resid_mid": (norm, "in")} for name, norm in PRE_BERTS.items()},
    # Its last norm is applied behind its last projection, and again behind its adapter.
    "xmod": BERT | {"resid_mid": ("attention.output.LayerNorm", "out")},
    "bloom": parts("self_attention", "dense", "", "mlp", FOUR),
    "mpt": parts("attn", "out_proj", "", "ffn", UP_DOWN, "norm_2"),
    "ctrl": parts("multi_head_attention", "dense", "Wv", "ffn", "0 2", "layernorm2")
    | {"attn_in": ("layernorm1", "out")},
    "openai-gpt": parts("attn", "c_proj", "", "mlp", "c_fc c_proj", "")
    | {"resid_mid": ("ln_1", "out"), "resid_post": ("ln_2", "out")},
    **dict.fromkeys("bart plbart mvp marian blenderbot-small trocr".split(), BART | ON_SUM),
    **dict.fromkeys("mbart blenderbot bigbird_pegasus pegasus whisper".split(), OPT),
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
    **dict.fromkeys(("bitnet", "diffllama", "hunyuan", "ministral3"), PLAIN),
    "cohere_compass": parts(mid=""),
    **dict.fromkeys(("deepseek_v32", "minicpm3"), parts(v="")),
    "nanochat": parts(mlp_parts=FC),
    "vaultgemma": parts(mid="pre_feedforward_layernorm"),
}
BLOCKS = {
    "gemma3-wrapper": "model.language_model.layers",
    **dict.fromkeys("gpt2 gpt_bigcode gpt_neo gptj codegen bloom ctrl openai-gpt".split(), "transformer.h"),
    "mpt": "transformer.blocks",
    **dict.fromkeys("bert big_bird bert-generation megatron-bert".split(), "bert.encoder.layer"),
    **{name: f"{name}.encoder.layer" for name in "ernie roc_bert git electra rembert roformer roberta".split()},
    **dict.fromkeys("camembert xlm-roberta xmod xlm-roberta-xl".split(), "roberta.encoder.layer"),
    "electra-narrow": "electra.encoder.layer",
    "data2vec-text": "data2vec_text.encoder.layer",
    "roberta-prelayernorm": "roberta_prelayernorm.encoder.layer",
    **dict.fromkeys("bart plbart mvp marian blenderbot-small trocr mbart".split(), "model.decoder.layers"),
    **dict.fromkeys("blenderbot bigbird_pegasus pegasus whisper".split(), "model.decoder.layers"),
    **dict.fromkeys([name for name in families.FAMILIES if name.startswith("falcon")], "transformer.h"),
    **dict.fromkeys(("gpt_neox", "gpt_neox-sequential"), "gpt_neox.layers"),
    "biogpt": "biogpt.layers",
    "opt": "model.decoder.layers",
}
WITHOUT_CACHE = {"openai-gpt"}


@pytest.fixture(scope="session", params=families.FAMILIES)
def family(request: pytest.FixtureRequest, folders: Path) -> Iterator[tuple[str, InterpModel]]:
    """One tiny model of each family, float32, with the family's name."""
    with load_model(families.save(request.param, folders), backend="eager", dtype="float32") as model:
        yield request.param, model


def test_identities_1_to_5(family: tuple[str, InterpModel]) -> None:
    check_identities_1_to_5(family[1], family[0])


def test_identity_3_modules(family: tuple[str, InterpModel]) -> None:
    check_modules(family[1])


def test_identity_6_logits(family: tuple[str, InterpModel]) -> None:
    check_logits(family[1])


def test_identity_8_writes_at_every_point_and_layer(family: tuple[str, InterpModel]) -> None:
    check_writes(family[1], {None, *range(family[1].n_layers)})


def test_identity_10_bare_hooks(family: tuple[str, InterpModel]) -> None:
    name, model = family
    check_bare_hooks(model, PATHS[name], BLOCKS.get(name, "model.layers"))


def test_parallel_blocks_refuse_resid_mid(family: tuple[str, InterpModel]) -> None:
    _, model = family
    if any(layer.parallel for layer in model.facts.layers):
        with pytest.raises(CapabilityUnsupported, match="parallel"):
            run_with_cache(model, PROMPT, ["resid_mid.0"])
    else:
        assert "resid_mid.0" in run_with_cache(model, PROMPT, ["resid_mid.0"])


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


def test_masked_scores_are_minus_infinity(family: tuple[str, InterpModel]) -> None:
    scores = run_with_cache(family[1], PROMPT, ["attn_scores.3"])["attn_scores.3"][0]
    future = torch.ones(scores.shape[1:]).triu(1).bool()
    assert bool(torch.isinf(scores[:, future]).all())
    assert not bool(torch.isinf(scores[:, ~future]).all(-1).any())


def test_batches_equal_one_by_one(family: tuple[str, InterpModel]) -> None:
    _, model = family
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


def test_capture_while_generating_equals_one_forward(family: tuple[str, InterpModel]) -> None:
    _, model = family
    points = ["resid_post.3", "attn_probs.0", "attn_scores.2", "lm_head"]
    if model.facts.model_type in WITHOUT_CACHE:
        with pytest.raises(RequestError, match="keeps no key/value cache"):
            model.generate(PROMPT, max_tokens=2)
        return
    completion, grown = model.capture_generation(PROMPT, points, max_tokens=6, ignore_eos=True)
    whole = [*PROMPT, *completion.token_ids[:-1]]
    once = run_with_cache(model, whole, points)
    for key in points:
        assert grown[key].shape == once[key].shape, key
        a, b = grown[key], once[key]
        if key.startswith("attn_scores") and model.facts.model_type == "mpt":
            # Its position biases count back from the last key, whichever that is: a constant for each query.
            a, b = (x - x.amax(-1, keepdim=True) for x in (a, b))
        assert difference(a.nan_to_num(neginf=-1e4), b.nan_to_num(neginf=-1e4)) < TIGHT, key
    greedy = [int(row.argmax()) for row in hf_logits(model, whole)[len(PROMPT) - 1 :]]
    assert list(completion.token_ids) == greedy
    assert list(model.generate(PROMPT, max_tokens=6, ignore_eos=True).token_ids) == greedy
