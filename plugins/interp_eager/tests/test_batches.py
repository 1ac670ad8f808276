"""Generation in batches: what comes of a prompt does not depend on the prompts beside it, in every family."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import families
import pytest
import tiny_families
import torch
import transformers as hf
from tiny_families import _GROUPED, _SIZES, _WIDE, PROMPT

from interp_core import InterpModel, load_model, run_with_cache
from interp_core.checks import difference
from interp_core.requests import ForwardRequest, Sampling
from interp_eager import batching, generation

UNEQUAL = [PROMPT, PROMPT[4:7], PROMPT[2:9], PROMPT[1:4]]
NEW = 8
TIGHT = 1e-5
POINTS = ("resid_post", "z", "value", "attn_scores", "attn_probs")

_LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [4.0] * 6}
_TYPES = {"layer_types": ["linear_attention", "full_attention"] * 2, "mlp_only_layers": [0, 1, 2, 3]}
_LINEAR = {f"linear_{kind}": n for kind, n in {"num_key_heads": 2, "num_value_heads": 2}.items()}
_LINEAR |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_JAMBA = {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "mamba_d_state": 8, "mamba_dt_rank": 4}

NO_POSITIONS = frozenset(
    "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart roformer trocr whisper".split()
)
FROM_ELSEWHERE = frozenset(
    "camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod".split()
)
OF_THEIR_OWN = frozenset({"deepseek_v32", "git", "mpt"})
"""Families of ``families`` of which only prompts of one length go together: positions, caches, masks and scores."""

ONE_LENGTH: dict[str, tuple[Callable[[], Any], str]] = {
    "lfm2": (lambda: hf.Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention"] * 2), "not every layer"),
    "jamba": (lambda: hf.JambaConfig(**_GROUPED, **_JAMBA, use_mamba_kernels=False), "not every layer"),
    "qwen3_next": (lambda: hf.Qwen3NextConfig(**_WIDE, **_TYPES, **_LINEAR), "not every layer"),
    "llama4": (
        lambda: hf.Llama4TextConfig(
            **_WIDE, moe_layers=[], intermediate_size_mlp=80, floor_scale=4, no_rope_layer_interval=2
        ),
        "scale queries by their column",
    ),
    "phi3-long": (
        lambda: hf.Phi3Config(
            **_GROUPED,
            original_max_position_embeddings=8,
            rope_parameters={**_LONG, "original_max_position_embeddings": 8},
        ),
        "longest prompt",
    ),
}
"""Families of which only prompts of one length go together, and why."""


@contextmanager
def loaded(folder: str) -> Iterator[InterpModel]:
    with load_model(folder, backend="eager", dtype="float32") as model:
        yield model.warmup()


@contextmanager
def counted(model: InterpModel) -> Iterator[list[int]]:
    """Rows of each forward inside the block."""
    rows: list[int] = []
    backend: Any = model.session.backend()
    assert isinstance(backend.unequal_refusal, str)  # asked once, by two forwards of its own
    embed = backend.model.get_input_embeddings()
    handle = embed.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    try:
        yield rows
    finally:
        handle.remove()


def wanted(model: InterpModel) -> list[str]:
    addresses = [f"{point}.{layer}" for point in POINTS for layer in range(model.n_layers)] + ["lm_head"]
    return [address for address in addresses if model.refusal(address) is None]


def misfit(model: InterpModel, prompts: list[list[int]] = UNEQUAL) -> float:
    """How far a batch is from its prompts one by one: infinite where tokens differ."""
    points = wanted(model)
    asked: dict[str, Any] = {"max_tokens": NEW, "ignore_eos": True, "n_logprobs": 2}
    done, cache = model.capture_generation(prompts, points, **asked)
    worst = 0.0
    for i, prompt in enumerate(prompts):
        alone, rows = model.capture_generation(prompt, points, **asked)
        if alone.token_ids != done[i].token_ids:
            return float("inf")
        for one, other in zip(alone.logprobs or (), done[i].logprobs or (), strict=True):
            worst = max(worst, *(abs(a.logprob - b.logprob) for a, b in zip(one, other, strict=True)))
        n = len(prompt) + NEW - 1
        for point in points:
            mine = cache[point][i, ..., :n, :n] if point.startswith("attn_") else cache[point][i, :n]
            if not torch.equal(mine.isinf(), rows[point][0].isinf()):
                return float("inf")
            worst = max(worst, difference(mine.nan_to_num(neginf=0.0), rows[point][0].nan_to_num(neginf=0.0)))
    return worst


@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name != "openai-gpt"])
def test_a_batch_is_its_prompts_one_by_one(family: str, folders: Path) -> None:
    with loaded(families.save(family, folders)) as model:
        with counted(model) as rows:
            model.generate(UNEQUAL, max_tokens=NEW, ignore_eos=True)
        alone = family in NO_POSITIONS | FROM_ELSEWHERE | OF_THEIR_OWN
        assert rows == ([2] * NEW + [1] * NEW + [1] * NEW if alone else [len(UNEQUAL)] * NEW)
        error = misfit(model)
        # Where rounding is that large, it is so among four copies of one prompt too, which need no padding.
        assert error < TIGHT or error < 2 * max(misfit(model, [prompt] * 4) for prompt in UNEQUAL) < 20 * TIGHT


@pytest.mark.parametrize("family", ONE_LENGTH)
def test_where_a_trunk_carries_a_state_only_prompts_of_one_length_go_together(family: str, folders: Path) -> None:
    config, why = ONE_LENGTH[family]
    with loaded(tiny_families.write(config, folders / f"batch-{family}")) as model:
        backend: Any = model.session.backend()
        assert why in backend.unequal_refusal
        with counted(model) as rows:
            model.generate(UNEQUAL, max_tokens=NEW, ignore_eos=True)
        # Two prompts are as long as each other.
        assert rows == [2] * NEW + [1] * NEW + [1] * NEW
        assert misfit(model) < TIGHT


def test_rotary_frequencies_of_the_longest_row_do_not_reach_the_others(folders: Path, monkeypatch: Any) -> None:
    """In a plain forward too: a prompt beside a longer one is read as it is alone."""
    with loaded(tiny_families.write(ONE_LENGTH["phi3-long"][0], folders / "batch-phi3-long")) as model:
        alone = run_with_cache(model, UNEQUAL[1], ["resid_post.3"])["resid_post.3"][0]
        beside = run_with_cache(model, UNEQUAL, ["resid_post.3"])["resid_post.3"][1, : len(alone)]
        assert difference(beside, alone) < TIGHT
        monkeypatch.setattr("interp_eager.backend.padding_refusal", lambda model, facts: "")
        naive = run_with_cache(model, UNEQUAL, ["resid_post.3"])["resid_post.3"][1, : len(alone)]
        assert difference(naive, alone) > 10 * TIGHT


def paligemma(*, causal: bool) -> Callable[[], Any]:
    images = {"image_size": 16, "patch_size": 8, "hidden_size": 16, "intermediate_size": 16}
    vision = {**images, "num_hidden_layers": 1, "num_attention_heads": 2, "model_type": "siglip_vision_model"}
    text = {**_WIDE, "model_type": "gemma", "use_bidirectional_attention": not causal}
    return lambda: hf.PaliGemmaConfig(text_config=text, vision_config=vision, projection_dim=48, image_token_index=299)


def roberta() -> Any:
    return hf.RobertaConfig(**_SIZES, is_decoder=True, type_vocab_size=1)


@pytest.mark.parametrize("name", ["paligemma", "roberta"])
def test_where_positions_do_not_begin_at_zero_only_one_length_goes_together(
    name: str, folders: Path, monkeypatch: Any
) -> None:
    config = roberta if name == "roberta" else paligemma(causal=True)
    auto = hf.AutoModelForCausalLM if name == "roberta" else hf.AutoModelForImageTextToText
    with loaded(tiny_families.write(config, folders / f"batch-{name}", auto)) as model:
        backend: Any = model.session.backend()
        assert backend.unequal_refusal == "it does not take positions that are numbered from 0"
        assert misfit(model) < TIGHT
        monkeypatch.setattr(backend, "_unequal", "")
        assert misfit(model) > 10 * TIGHT


def test_attention_that_is_not_causal_takes_no_padding(folders: Path, monkeypatch: Any) -> None:
    auto = hf.AutoModelForImageTextToText
    with loaded(tiny_families.write(paligemma(causal=False), folders / "paligemma-whole", auto)) as model:
        assert misfit(model) < TIGHT
        alone = run_with_cache(model, UNEQUAL[1], ["resid_post.3"])["resid_post.3"][0]
        for padded in (False, True):
            if padded:
                monkeypatch.setattr("interp_eager.backend.padding_refusal", lambda model, facts: "")
            beside = run_with_cache(model, UNEQUAL, ["resid_post.3"])["resid_post.3"][1, : len(alone)]
            assert (difference(beside, alone) > 10 * TIGHT) is padded


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_positions_that_do_not_follow_the_mask_would_be_seen(family: str, folders: Path, monkeypatch: Any) -> None:
    with loaded(families.save(family, folders)) as model:
        backend: Any = model.session.backend()
        monkeypatch.setattr(backend, "takes_positions", False)
        assert misfit(model) > 10 * TIGHT


@pytest.mark.parametrize("family", ["gpt_neo", "llama", "mistral"])
def test_columns_that_are_not_moved_would_be_seen(family: str, folders: Path, monkeypatch: Any) -> None:
    def as_they_are(prefilled: Any, lengths: Any, cache: Any) -> Any:
        for index, layer in enumerate(prefilled.layers):
            cache.update(layer.keys, layer.values, index)
        return cache

    with loaded(families.save(family, folders)) as model:
        monkeypatch.setattr(generation, "aligned", as_they_are)
        assert misfit(model) > 10 * TIGHT


def test_a_trunk_that_has_one_mask_for_all_layers_generates_whatever_types_are_stated(folders: Path) -> None:
    """Qwen3-MoE: a cache that forgets keys at some layers only would not fit its mask."""
    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    windows = {
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    config = lambda: hf.Qwen3MoeConfig(**_WIDE, **sizes, **windows)  # noqa: E731 - a builder, as in the tables
    with loaded(tiny_families.write(config, folders / "batch-qwen3_moe")) as model:
        assert misfit(model) < TIGHT


def test_padding_that_holds_no_number_reaches_nobody() -> None:
    keys = torch.ones(2, 1, 3, 4)
    keys[1, :, 1:] = float("nan")
    moved = batching._moved(keys, [3, 1])
    assert torch.equal(moved[0], keys[0])
    assert torch.equal(moved[1, 0], torch.tensor([0.0, 0.0, 1.0])[:, None].expand(3, 4))


def test_many_prompts_run_as_several_batches(llama: InterpModel, monkeypatch: Any) -> None:
    want = [model.token_ids for model in llama.generate(UNEQUAL, max_tokens=4, ignore_eos=True)]
    monkeypatch.setattr(batching, "_MAX_TOKENS", 2 * (len(PROMPT) + 4))
    with counted(llama) as rows:
        got = llama.generate(UNEQUAL, max_tokens=4, ignore_eos=True)
    # By length: the two of three tokens, then those of seven and ten.
    assert rows == [2] * 8
    assert [one.token_ids for one in got] == want


@pytest.mark.parametrize(
    ("lengths", "new", "options", "want"),
    [
        ([3, 1, 3, 2], [4, 4, 4, 4], {"unequal": True, "longest": None}, [[1, 3, 0, 2]]),
        ([3, 1, 3, 2], [4, 4, 4, 4], {"unequal": False, "longest": None}, [[1], [3], [0, 2]]),
        # Columns of the short one's tokens beside the long prompt would be more than the model takes.
        ([60, 3], [4, 40], {"unequal": True, "longest": 64}, [[1], [0]]),
        ([8000, 8000, 8000], [100, 100, 100], {"unequal": True, "longest": None}, [[0, 1], [2]]),
    ],
)
def test_what_goes_together(lengths: list[int], new: list[int], options: Any, want: list[list[int]]) -> None:
    requests = [
        ForwardRequest(token_ids=(7,) * length, sampling=Sampling(max_tokens=most))
        for length, most in zip(lengths, new, strict=True)
    ]
    assert batching.generations(requests, **options) == want


def test_samples_of_one_prompt_are_one_batch(llama: InterpModel) -> None:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "ignore_eos": True}
    with counted(llama) as rows:
        got = llama.generate(PROMPT, n=5, seed=3, **options)
    assert rows == [5] * 6
    want = [llama.generate(PROMPT, seed=3 + i, **options).token_ids for i in range(5)]
    assert [one.token_ids for one in got] == want
    assert len(set(want)) == 5
