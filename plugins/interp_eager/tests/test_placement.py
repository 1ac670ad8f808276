"""Where weights go: models in memory, devices, device maps, quantisation; and refusals before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_families import FAMILIES, PROMPT, save

from interp_core import (
    Add,
    BackendUnavailable,
    InterpModel,
    ModelUnavailable,
    RequestError,
    generate,
    inspect_model,
    load_model,
    run_with_cache,
)
from interp_core.checks import difference


@pytest.fixture
def in_memory(folders: Path) -> Any:
    """The tiny Llama as transformers loads it."""
    return hf.AutoModelForCausalLM.from_pretrained(save("llama", folders), dtype=torch.float32)


def state(model: Any) -> dict[str, Any]:
    """All of a model that somebody could notice: weights by address and value, switches, hooks."""
    return {
        "weights": {name: (p.data_ptr(), p._version, p.requires_grad) for name, p in model.named_parameters()},
        "training": [part.training for part in model.modules()],
        "hooks": [(len(p._forward_hooks), len(p._forward_pre_hooks)) for p in model.modules()],
        "attention": model.config._attn_implementation,
    }


def test_a_model_in_memory_is_run_without_a_copy_and_left_as_it_was(in_memory: Any, llama: InterpModel) -> None:
    before = state(in_memory)
    with load_model(in_memory) as model:
        assert model.backend == "eager"
        assert model.profile.options["dtype"] == "float32"
        steering = [Add("resid_post.1", torch.ones(48))]
        cache = run_with_cache(model, PROMPT, ["resid_post.*", "z.2"], steering=steering)
        wanted = run_with_cache(llama, PROMPT, ["resid_post.*", "z.2"], steering=steering)
        assert all(torch.equal(cache[address], wanted[address]) for address in wanted)
        assert model.session.backend().model is in_memory
        generate(model, PROMPT, max_tokens=3)
        weight = in_memory.model.layers[0].mlp.down_proj.weight
        with torch.no_grad():
            weight.mul_(2.0)
        changed = run_with_cache(model, PROMPT, ["resid_post.3"])["resid_post.3"]
        assert difference(changed, run_with_cache(llama, PROMPT, ["resid_post.3"])["resid_post.3"]) > 1e-3
        with torch.no_grad():
            weight.div_(2.0)
    after = state(in_memory)
    after["weights"] = {
        name: (p, v - 2 if v > before["weights"][name][1] else v, g) for name, (p, v, g) in after["weights"].items()
    }
    assert after == before
    with pytest.raises(BackendUnavailable, match="shut down"):
        run_with_cache(model, PROMPT, ["resid_post.0"])
    assert in_memory(torch.tensor([PROMPT])).logits.isfinite().all()


def test_a_tokenizer_may_be_given_and_is_asked_for_where_there_is_none(folders: Path, smollm: InterpModel) -> None:
    config = FAMILIES["llama"]()
    config.vocab_size = smollm.vocab_size
    bare = load_model(hf.LlamaForCausalLM(config).eval())
    assert bare.model_id == "LlamaForCausalLM"
    assert generate(bare, PROMPT, max_tokens=2).token_ids
    with pytest.raises(ModelUnavailable, match="tokenizer="):
        bare.to_tokens("hello")
    given = load_model(hf.LlamaForCausalLM(config).eval(), tokenizer=smollm.tokenizer)
    assert given.tokenizer is smollm.tokenizer
    assert isinstance(generate(given, given.to_tokens("Hello"), max_tokens=2).text, str)
    beside = load_model(save("llama", folders), "eager", tokenizer=smollm.tokenizer)
    assert beside.to_string(beside.to_tokens("Hello")) == "Hello"


def test_gradients_of_a_model_in_memory_are_as_its_weights_say(in_memory: Any) -> None:
    assert load_model(in_memory).grad_support.through_forward
    in_memory.requires_grad_(False)
    assert not load_model(in_memory).grad_support.through_forward


def test_what_cannot_be_run_as_it_is_is_refused(in_memory: Any, folders: Path) -> None:
    with pytest.raises(RequestError, match="takes no load options; given: dtype"):
        load_model(in_memory, dtype="float16")
    with pytest.raises(RequestError, match="requires_grad"):
        load_model(in_memory, requires_grad=True)
    with pytest.raises(RequestError, match="takes no model in memory; those that do: eager"):
        load_model(in_memory, backend="vllm-generate")
    with pytest.raises(BackendUnavailable, match="nonsense"):
        load_model(in_memory, backend="nonsense")
    with pytest.raises(RequestError, match=r"not Linear"):
        load_model(torch.nn.Linear(2, 2))
    with pytest.raises(RequestError, match=r"not int"):
        load_model(3)
    with pytest.raises(RequestError, match=r"give the model that was compiled"):
        load_model(torch.compile(in_memory))
    noisy = hf.GPT2LMHeadModel(FAMILIES["gpt2"]()).train()
    with pytest.raises(RequestError, match=r"model\.eval\(\)"):
        load_model(noisy)
    softcapped = hf.AutoModelForCausalLM.from_pretrained(save("gemma2", folders), attn_implementation="sdpa")
    with pytest.raises(RequestError, match="set_attn_implementation"):
        load_model(softcapped).warmup()
    softcapped.set_attn_implementation("eager")
    load_model(softcapped).warmup()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device": "cpu", "device_map": "auto"}, RequestError, "give one of them"),
        ({"max_memory": {0: "1GB"}}, RequestError, "device_map='auto'"),
        ({"quantization_config": {"bits": 4}}, RequestError, "quant_method"),
        ({"quantization_config": {"load_in_4bit": True}}, BackendUnavailable, "bitsandbytes"),
        ({"quantization_config": hf.GPTQConfig(bits=4)}, BackendUnavailable, "pip install optimum"),
        ({"quantization_config": hf.AwqConfig(bits=4)}, BackendUnavailable, "pip install gptqmodel"),
        ({"device": "cuda:9"}, BackendUnavailable, "cuda:9"),
        ({"device": "nowhere"}, BackendUnavailable, "nowhere"),
    ],
)
def test_placements_that_cannot_be_had_are_refused_by_name(
    folders: Path, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        load_model(save("llama", folders), "eager", **options).warmup()


def test_quantised_weights_give_no_gradients_which_is_said_before(folders: Path) -> None:
    profile = inspect_model(save("llama", folders), "eager", quantization_config={"load_in_8bit": True})
    assert not profile.grad_support.through_forward
    assert "quantised" in profile.grad_support.blockers[0]
    assert inspect_model(save("llama", folders), "eager", requires_grad=True).grad_support.through_forward


def test_families_that_overflow_in_float16_give_no_gradients_there(folders: Path) -> None:
    def verdict(family: str, dtype: str) -> Any:
        return inspect_model(save(family, folders), "eager", dtype=dtype, requires_grad=True).grad_support

    assert "float16" in verdict("gemma3", "float16").blockers[0]
    assert verdict("gemma3", "bfloat16").through_forward
    assert verdict("llama", "float16").through_forward
    assert "overflow" in " ".join(verdict("llama", "float16").caveats)


def test_a_device_map_places_the_weights_and_changes_no_number(folders: Path, llama: InterpModel) -> None:
    """Every other block is kept off the device, and fetched for its forward."""
    parts = {f"model.layers.{i}": "cpu" if i % 2 else "disk" for i in range(4)}
    where = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu", **parts}
    points = ["resid_post.*", "z.*", "mlp_act.*", "attn_probs.1", "lm_head"]
    with load_model(save("llama", folders), "eager", dtype="float32", device_map=where) as model:
        cache = run_with_cache(model, PROMPT, points, steering=[Add("mlp_out.2", torch.ones(48))])
        wanted = run_with_cache(llama, PROMPT, points, steering=[Add("mlp_out.2", torch.ones(48))])
        assert {a: difference(cache[a], wanted[a]) for a in wanted if difference(cache[a], wanted[a]) > 1e-6} == {}
        assert model.session.backend().model.model.layers[0].mlp.down_proj.weight.is_meta
