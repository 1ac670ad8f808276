"""Names of other libraries: every general point is translated or refused with a reason, per library and family."""

from __future__ import annotations

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from interp_core import AddressError, CapabilityUnsupported, RequestError, inspect_model, load_model, run_with_cache
from interp_core.address import Address
from interp_core.points import GENERAL_POINTS
from interp_core.profile import ModelProfile
from interp_core.vocabularies import LIBRARIES, VOCABULARIES, Name, Vocabulary, from_address, to_address
from interp_core.vocabularies.conditions import CONDITIONS

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
OWN: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128},
    "gpt_neox": {**SMALL, "use_parallel_residual": True},
    "granite": {**SMALL, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    "qwen3_moe": {**SMALL, **MOE},
    "opt": {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 128},
}
FAMILIES = ("llama", "gemma2", "olmo2", "qwen3", "qwen3_moe", "granite", "gpt2", "gpt_neox")
CONFIGURATIONS = tempfile.TemporaryDirectory(prefix="vocabularies-")  # removed when the process ends
TREES = {family: tree for tree in VOCABULARIES["nnsight"] for family in sorted(tree.families)}


@functools.cache
def profile(family: str, backend: str = "eager") -> ModelProfile:
    """The profile of a configuration without weights."""
    folder = tempfile.mkdtemp(prefix=f"{family}-", dir=CONFIGURATIONS.name)
    AutoConfig.for_model(family, **OWN.get(family, SMALL)).save_pretrained(folder)
    return inspect_model(folder, backend)


def vocabularies() -> list[Vocabulary]:
    return [vocabulary for library in LIBRARIES for vocabulary in VOCABULARIES[library]]


def address_of(point: str, layer: int = 3) -> Address:
    return Address(point, layer if GENERAL_POINTS[point].scope == "layer" else None)


def same_tensor(mine: Address, other: Address, model: ModelProfile) -> bool:
    """Equal, or the contribution of a sublayer that is added as it is, or what a norm-less MLP reads."""
    facts = model.facts
    pairs = {
        ("attn_out", "attn_out_post"): not facts.attn_post_norm and facts.residual_multiplier == 1.0,
        ("mlp_out", "mlp_out_post"): not facts.mlp_post_norm and facts.residual_multiplier == 1.0,
        ("mlp_in", "resid_mid"): not facts.mlp_pre_norm,
    }
    names = tuple(sorted((mine.name, other.name)))
    return mine.layer == other.layer and (mine.name == other.name or pairs.get(names, False))


def attempt(call: Callable[..., Any], *args: object) -> Any:
    """What the call gives, or its refusal."""
    try:
        return call(*args)
    except CapabilityUnsupported as refused:
        return refused


# Coverage.


@pytest.mark.parametrize("vocabulary", vocabularies(), ids=lambda v: v.title)
@pytest.mark.parametrize("point", GENERAL_POINTS)
def test_every_general_point_has_a_name_or_a_reason(vocabulary: Vocabulary, point: str) -> None:
    assert vocabulary.named(point) or vocabulary.without(point)


@pytest.mark.parametrize("vocabulary", vocabularies(), ids=lambda v: v.title)
def test_rows_are_about_points_and_conditions_that_exist(vocabulary: Vocabulary) -> None:
    streams = {f"{site}_stream_{part}" for site in ("attn", "mlp") for part in ("collapse", "mix", "write")}
    points = {*GENERAL_POINTS, *streams, "resid_streams"}
    assert {row.point for row in (*vocabulary.names, *vocabulary.unnamed)} <= points
    assert {key for row in (*vocabulary.names, *vocabulary.others, *vocabulary.unnamed) for key in row.when} <= set(
        CONDITIONS
    )
    for row in (*vocabulary.others, *vocabulary.unnamed):
        assert row.why
        assert row.near


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("point", GENERAL_POINTS)
def test_round_trip_or_refusal(library: str, family: str, point: str) -> None:
    model, address = profile(family), address_of(point)
    name = attempt(from_address, address, library, model)
    if isinstance(name, CapabilityUnsupported):
        assert name.why
        assert name.instead
        return
    back = to_address(name, library, model)
    assert same_tensor(address, back, model), f"{address} -> {name} -> {back}"
    assert not model.specs[back.name].absent.get(3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("vocabulary", vocabularies(), ids=lambda v: v.title)
def test_every_name_is_translated_or_refused_with_a_way_forward(vocabulary: Vocabulary, family: str) -> None:
    if vocabulary.families and family not in vocabulary.families:
        return
    for row in (*vocabulary.names, *vocabulary.others):
        name = row.name.replace("{layer}", "3")
        found = attempt(to_address, name, vocabulary.library, profile(family))
        if isinstance(found, CapabilityUnsupported):
            assert found.point == name
            assert found.instead
        else:
            assert isinstance(row, Name)
            assert found == profile(family).address(found)


def refusal(name: object, library: str, family: str) -> CapabilityUnsupported:
    with pytest.raises(CapabilityUnsupported) as caught:
        to_address(name, library, profile(family))  # type: ignore[arg-type]
    return caught.value


# What depends on the model.

CASES = [
    ("blocks.3.hook_attn_out", "llama", "attn_out.3"),
    ("blocks.3.hook_attn_out", "gemma2", "attn_out_post.3"),
    ("blocks.3.hook_attn_out", "olmo2", "attn_out_post.3"),
    ("blocks.3.hook_attn_out", "granite", "attn_out.3"),
    ("blocks.3.attn.hook_out", "gemma2", "attn_out.3"),
    ("blocks.3.hook_mlp_out", "gemma2", "mlp_out_post.3"),
    ("blocks.3.hook_mlp_out", "gpt2", "mlp_out.3"),
    ("blocks.3.hook_resid_mid", "gpt2", "resid_mid.3"),
    ("blocks.3.attn.hook_q", "qwen3", "q_norm_in.3"),
    ("blocks.3.attn.hook_k", "olmo2", "k_norm_in.3"),
    ("blocks.3.attn.hook_v", "llama", "value.3"),
    ("blocks.3.mlp.hook_pre", "gpt2", "mlp_pre.3"),
    ("blocks.3.mlp.hook_expert_indices", "qwen3_moe", "expert_indices.3"),
    ("hook_embed", "gemma2", "embeddings"),
    ("unembed.hook_in", "llama", "final_norm"),
]


@pytest.mark.parametrize(("name", "family", "wanted"), CASES)
def test_transformer_lens(name: str, family: str, wanted: str) -> None:
    assert str(to_address(name, "transformer_lens", profile(family))) == wanted


REFUSED = [
    ("blocks.3.hook_resid_mid", "gpt_neox", "in parallel", "resid_pre"),
    ("blocks.3.attn.hook_q", "llama", "only where a query or key norm", "q_proj"),
    ("blocks.3.ln1.hook_normalized", "llama", "before the gain", "attn_in"),
    ("blocks.3.ln2.hook_normalized", "gpt2", "before the gain", "mlp_in"),
    ("ln_final.hook_normalized", "llama", "before the gain", "final_norm"),
    ("blocks.3.hook_mlp_in", "llama", "before the norm", "resid_mid"),
    ("blocks.3.attn.hook_rot_q", "qwen3", "rotary", "attn_scores"),
    ("blocks.3.mlp.hook_pre_linear", "gpt2", "no gate", "mlp_pre"),
    ("blocks.3.mlp.hook_post", "qwen3_moe", "mixture of experts", "mlp_out"),
    ("blocks.3.mlp.hook_expert_weights", "qwen3_moe", "before the choice", "router_logits"),
]


@pytest.mark.parametrize(("name", "family", "why", "near"), REFUSED)
def test_transformer_lens_refusals(name: str, family: str, why: str, near: str) -> None:
    refused = refusal(name, "transformer_lens", family)
    assert why in refused.why
    assert near in refused.instead
    assert str(refused).startswith(name)


def test_a_multiplier_is_in_no_module_that_others_hook() -> None:
    for library in ("transformer_lens", "nnterp", "nnsight"):
        with pytest.raises(CapabilityUnsupported, match="attn_out") as caught:
            from_address("attn_out_post.3", library, profile("granite"))
        assert caught.value.architecture == "granite"
    assert from_address("attn_out_post.3", "interp_engine", profile("granite")) == "attn_out_post.3"


PATHS = [
    ("nnterp", "layers_output[3]", "gpt2", "resid_post.3"),
    ("nnterp", "model.mlps_output[3]", "gemma2", "mlp_out.3"),
    ("nnterp", "logits", "llama", "lm_head"),
    ("nnterp", "ln_final.output", "gpt_neox", "final_norm"),
    ("nnsight", "model.layers[3].output", "llama", "resid_post.3"),
    ("nnsight", "model.model.layers[3].output[0]", "llama", "resid_post.3"),
    ("nnsight", "model.model.layers.3.self_attn.o_proj.input", "llama", "z.3"),
    ("nnsight", "model.layers[3].post_attention_layernorm.output", "llama", "mlp_in.3"),
    ("nnsight", "model.layers[3].post_attention_layernorm.output", "gemma2", "attn_out_post.3"),
    ("nnsight", "model.layers[3].post_attention_layernorm.input", "olmo2", "attn_out.3"),
    ("nnsight", "model.layers[3].mlp.inputs[0][0]", "olmo2", "mlp_in.3"),
    ("nnsight", "model.transformer.h[3].attn.c_proj.input", "gpt2", "z.3"),
    ("nnsight", "gpt_neox.layers[3].post_attention_layernorm.input", "gpt_neox", "resid_pre.3"),
]


@pytest.mark.parametrize(("library", "name", "family", "wanted"), PATHS)
def test_accessors_and_module_paths(library: str, name: str, family: str, wanted: str) -> None:
    assert str(to_address(name, library, profile(family))) == wanted


def test_nnterp_refusals() -> None:
    assert "caps" in refusal("logits", "nnterp", "gemma2").why
    assert "no module" in refusal("mlps_output[3]", "nnterp", "opt").why
    assert "it is a module" in refusal("layers[3]", "nnterp", "llama").why


def test_nnsight_needs_a_tree_that_is_known() -> None:
    assert "module tree" in refusal("model.layers[3].output", "nnsight", "phi3").why
    assert from_address("path.model.layers.3.mlp", "nnsight", profile("llama")) == "model.layers.3.mlp.output"


def test_interp_engine_addresses() -> None:
    model = profile("llama")
    assert to_address("path.model.layers.3.mlp", "interp_engine", model) == Address("path.model.layers.3.mlp")
    assert from_address("path.model.norm", "interp_engine", model) == "path.model.norm"
    with pytest.raises(AddressError, match="no coordinate 'head'"):
        to_address("z.3.head-1", "interp_engine", model)
    assert "the gate alone" in refusal("attn_gate.3", "interp_engine", "llama").instead


# Trunks of several streams.


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> ModelProfile:
    folder = tmp_path_factory.mktemp("streams")
    AutoConfig.for_model("deepseek_v4", **{**SMALL, "num_key_value_heads": 1, "num_hash_layers": 0}).save_pretrained(
        folder
    )
    return inspect_model(str(folder), "eager")


def test_streams(streams: ModelProfile) -> None:
    def found(name: str, library: str) -> str:
        return str(to_address(name, library, streams))

    assert found("blocks.3.hook_out", "transformer_lens") == "resid_streams.3"
    assert found("blocks.3.attn_hc.hook_out", "transformer_lens") == "attn_stream_collapse.3"
    assert found("resid_post.3.stream-2", "interp_engine") == "resid_post.3.stream-2"
    assert found("resid_streams.3", "interp_engine") == "resid_streams.3"
    assert from_address("resid_post.3.stream-2", "interp_engine", streams) == "resid_post.3.stream-2"
    assert from_address("resid_streams.3", "transformer_lens", streams) == "blocks.3.hook_out"
    for name, library in (("blocks.3.attn_hc.hook_comb", "transformer_lens"), ("attn_stream_mix.3", "interp_engine")):
        with pytest.raises(CapabilityUnsupported, match="transposed"):
            to_address(name, library, streams)
    with pytest.raises(CapabilityUnsupported, match="several residual streams"):
        to_address("blocks.3.hook_resid_post", "transformer_lens", streams)
    with pytest.raises(CapabilityUnsupported, match="transposed"):
        from_address("mlp_stream_mix.3", "interp_engine", streams)


# Mistakes.


@pytest.mark.parametrize(
    ("name", "library", "guess"),
    [
        ("blocks.3.hook_z", "transformer_lens", "blocks.3.attn.hook_z"),
        ("blocks.3.hook_resid_pst", "transformer_lens", "blocks.3.hook_resid_post"),
        ("hook_embeds", "transformer_lens", "hook_embed"),
        ("layer_output[3]", "nnterp", "layers_output[3]"),
        ("model.layers[3].self_attn.out_proj.input", "nnsight", "model.layers[3].self_attn.o_proj.input"),
        ("resid_pots.3", "interp_engine", "resid_post.3"),
    ],
)
def test_unknown_names_get_a_near_miss(name: str, library: str, guess: str) -> None:
    with pytest.raises(AddressError, match="Did you mean") as caught:
        to_address(name, library, profile("llama"))
    assert repr(guess) in str(caught.value)


def test_other_mistakes() -> None:
    model = profile("llama")
    with pytest.raises(RequestError, match="Did you mean 'transformer_lens'"):
        to_address("hook_embed", "transformerlens", model)
    with pytest.raises(RequestError, match="unknown library"):
        from_address("z.3", "garcon", model)
    with pytest.raises(RequestError, match="a string"):
        to_address(3, "transformer_lens", model)  # type: ignore[arg-type]
    for library, name in (("transformer_lens", "blocks.4.hook_resid_pre"), ("nnterp", "layers_output[4]")):
        with pytest.raises(AddressError, match="0 to 3"):
            to_address(name, library, model)
    with pytest.raises(AddressError, match="no coordinate"):
        from_address("z.3.head-1", "transformer_lens", model)
    with pytest.raises(AddressError, match="0 to 3"):
        from_address("z.4", "transformer_lens", model)
    with pytest.raises(CapabilityUnsupported, match="nnsight"):
        from_address("path.model.norm", "nnterp", model)


def test_a_translation_does_not_depend_on_the_backend() -> None:
    """What a backend serves is asked of the profile; what a name means is not."""
    for backend in ("vllm", "vllm-generate"):
        assert (
            to_address("blocks.3.attn.hook_pattern", "transformer_lens", profile("llama", backend)).name == "attn_probs"
        )


# The trees are those of transformers.


@pytest.mark.parametrize("family", sorted(TREES))
def test_module_paths_are_those_of_transformers(family: str) -> None:
    config = AutoConfig.for_model(family, **OWN.get(family, SMALL))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    modules = {name for name, _ in model.named_modules()}
    facts = profile(family)
    checked = 0
    for point in GENERAL_POINTS:
        try:
            name = from_address(address_of(point), "nnsight", facts)
        except CapabilityUnsupported:
            continue
        path = name.replace("[", ".").replace("]", "").rpartition(".")[0]
        assert path in modules, f"{point}: {name}"
        checked += 1
    assert checked >= 12, transformers.__version__


@pytest.mark.parametrize("module", ["interp_core.vocabularies"])
def test_importing_it_is_light(module: str) -> None:
    code = f"import sys, {module}; assert not {{'torch', 'transformers', 'vllm'}} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# And their tensors are those of the points, in numbers.


def seen_by_hook(model: torch.nn.Module, name: str, ids: list[int]) -> torch.Tensor:
    """What a bare hook sees at a module path with its side."""
    path, _, side = name.replace("[", ".").replace("]", "").rpartition(".")
    found: list[Any] = []

    def keep(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        value = output if side == "output" else (*args, *kwargs.values())[0]
        found.append((value[0] if isinstance(value, tuple) else value).detach().clone())

    handle = model.get_submodule(path).register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(torch.tensor([ids]))
    handle.remove()
    return found[0]


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2", "qwen3", "granite", "arcee", "gpt2", "gpt_neox"])
def test_module_paths_carry_the_tensors_of_the_points(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **OWN.get(family, SMALL))
    hf = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in hf.named_parameters():
        if "norm" in name or "ln_" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0, 0.3)  # a norm without a gain would prove nothing
    hf.save_pretrained(tmp_path)
    model = load_model(tmp_path, backend="eager", dtype="float32")
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = [5, 17, 3, 90, 41]
    checked = set()
    for row in TREES[family].names:
        theirs = row.name.replace("{layer}", "2")
        address = attempt(to_address, theirs, "nnsight", model.profile)
        if isinstance(address, CapabilityUnsupported):
            continue
        point = run_with_cache(model, ids, [address])[address]
        seen = seen_by_hook(hf, theirs, ids)
        torch.testing.assert_close(seen.reshape(point.shape), point, rtol=1e-4, atol=1e-5, msg=f"{theirs}: {address}")
        checked.add(address.name)
    assert len(checked) >= 10
    raw = run_with_cache(model, ids, ["attn_out.2", "attn_out_post.2"])
    differ = not torch.allclose(raw["attn_out.2"], raw["attn_out_post.2"])
    assert differ == (family in ("gemma2", "olmo2", "granite"))  # or the two names would be told apart by nothing
    model.shutdown()
