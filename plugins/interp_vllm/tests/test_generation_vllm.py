"""Generation with SmolLM2 on a real engine: sampling, stop strings, text, log-probabilities, rows.

What a test expects comes from the eager backend, or from vLLM's own answer to a question put otherwise.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interp_core import Add, Completion, InterpModel, RequestError, load_model, run_with_cache, steer
from interp_core.checks import difference
from interp_eager.demo_model import prepare

pytestmark = [pytest.mark.vllm, pytest.mark.real_model]

STORY = "Once upon a time, there was a"
TEXTS = [STORY, "The capital of France is", "1, 2, 3, 4,"]
LETTERS = "é漢字🙂"
CLOSE = 1e-4


@pytest.fixture(scope="module")
def smollm(quick_engines: None) -> Iterator[InterpModel]:
    """SmolLM2 on vLLM."""
    with load_model(prepare(), backend="vllm", dtype="float32", max_model_len=256) as model:
        yield model.warmup()


@pytest.fixture(scope="module")
def reference(quick_engines: None) -> Iterator[InterpModel]:
    """SmolLM2 on eager."""
    with load_model(prepare(), backend="eager", dtype="float32") as model:
        yield model.warmup()


def ids(model: InterpModel, text: str = STORY) -> list[int]:
    tokens: Any = model.to_tokens(text)
    found: list[int] = tokens[0].tolist()
    return found


@pytest.fixture(scope="module")
def greedy(smollm: InterpModel) -> Completion:
    """The most likely story."""
    return _completion(smollm.generate(ids(smollm), max_tokens=24))


def _completion(found: Any) -> Completion:
    assert isinstance(found, Completion)
    return found


def log_probabilities(model: InterpModel, completion: Completion) -> torch.Tensor:
    """``[new, vocab]`` that each new token was chosen from."""
    tokens = [*completion.prompt_token_ids, *completion.token_ids]
    first = len(completion.prompt_token_ids) - 1
    logits = run_with_cache(model, tokens, ["lm_head"])["lm_head"][0, first:-1]
    return logits.log_softmax(-1)


def test_the_most_likely_text_is_that_of_eager(smollm: InterpModel, reference: InterpModel) -> None:
    found = [smollm.generate(ids(smollm, text), max_tokens=8) for text in TEXTS]
    assert found == [reference.generate(ids(smollm, text), max_tokens=8) for text in TEXTS]
    assert len({got.text for got in found}) == len(TEXTS)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_as_many_tokens_as_allowed(count: int, smollm: InterpModel, greedy: Completion) -> None:
    got = smollm.generate(ids(smollm), max_tokens=count)
    assert got.token_ids == greedy.token_ids[:count]
    assert got.finish_reason == "length"


def test_a_seed_repeats(smollm: InterpModel, greedy: Completion) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5}
    once = smollm.generate(ids(smollm), seed=3, **options)
    assert smollm.generate(ids(smollm), seed=3, **options) == once
    assert smollm.generate([ids(smollm, TEXTS[1]), ids(smollm)], seed=3, **options)[1] == once
    others = [smollm.generate(ids(smollm), seed=seed, **options).token_ids for seed in (4, 5)]
    assert len({once.token_ids, *others, greedy.token_ids[:8]}) == 4
    free = {smollm.generate(ids(smollm), **options).token_ids for _ in range(3)}
    assert len(free) == 3


@pytest.mark.parametrize("restriction", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_what_restricts_sampling_to_the_most_likely(
    restriction: dict[str, Any], smollm: InterpModel, greedy: Completion
) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 2.0, "seed": 1}
    assert smollm.generate(ids(smollm), **options, **restriction).token_ids == greedy.token_ids[:8]
    assert smollm.generate(ids(smollm), **options).token_ids != greedy.token_ids[:8]


def test_top_k_and_top_p_keep_to_the_likely(smollm: InterpModel, reference: InterpModel) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 2.0, "seed": 2}
    of_three = log_probabilities(reference, smollm.generate(ids(smollm), top_k=3, **options))
    free = smollm.generate(ids(smollm), **options)
    likely = smollm.generate(ids(smollm), top_p=0.5, **options)
    chosen = smollm.generate(ids(smollm), top_k=3, **options).token_ids
    ranks = [int((row > row[token]).sum()) for row, token in zip(of_three, chosen, strict=True)]
    assert max(ranks) <= 2
    assert max(ranks) > 0
    of_free = log_probabilities(reference, free)
    assert max(int((row > row[t]).sum()) for row, t in zip(of_free, free.token_ids, strict=True)) > 2
    # The mass before a token that top_p keeps is less than top_p, at the temperature that was asked for.
    for row, token in zip(log_probabilities(reference, likely), likely.token_ids, strict=True):
        probs = (row / 2.0).softmax(-1)
        assert float(probs[probs > probs[token]].sum()) < 0.5 + CLOSE


def test_several_completions_of_one_prompt(smollm: InterpModel, greedy: Completion) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 1.5}
    three = smollm.generate(ids(smollm), n=3, seed=7, **options)
    assert three == [smollm.generate(ids(smollm), seed=7 + i, **options) for i in range(3)]
    assert len({c.token_ids for c in three}) == 3
    unseeded = smollm.generate(ids(smollm), n=3, **options)
    assert len({c.token_ids for c in unseeded}) == 3
    batch = smollm.generate([ids(smollm), ids(smollm, TEXTS[1])], n=2, max_tokens=3)
    assert [[c.prompt_token_ids for c in row] for row in batch] == [
        [tuple(ids(smollm, text))] * 2 for text in TEXTS[:2]
    ]
    assert {c.token_ids for c in batch[0]} == {greedy.token_ids[:3]}


def test_a_batch_is_each_prompt_by_itself(smollm: InterpModel) -> None:
    prompts = [ids(smollm, text) for text in TEXTS]
    together = smollm.generate(prompts, max_tokens=6, n_logprobs=1)
    for prompt, got in zip(prompts, together, strict=True):
        alone = smollm.generate(prompt, max_tokens=6, n_logprobs=1)
        assert (got.token_ids, got.text, got.finish_reason) == (alone.token_ids, alone.text, alone.finish_reason)
        for (one,), (other,) in zip(got.logprobs, alone.logprobs, strict=True):
            assert abs(one.logprob - other.logprob) < CLOSE
    padded = torch.zeros(2, 12, dtype=torch.long)
    mask = torch.zeros_like(padded)
    for row, prompt in enumerate(prompts[:2]):
        padded[row, -len(prompt) :] = torch.tensor(prompt)
        mask[row, -len(prompt) :] = 1
    masked = smollm.generate(padded, attention_mask=mask, max_tokens=6)
    assert [c.token_ids for c in masked] == [c.token_ids for c in together[:2]]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_log_probabilities_are_those_of_the_model(
    temperature: float, smollm: InterpModel, reference: InterpModel
) -> None:
    got = smollm.generate(ids(smollm), max_tokens=10, n_logprobs=5, temperature=temperature, seed=1)
    want = log_probabilities(reference, got)
    assert got.logprobs is not None
    assert len(got.logprobs) == len(got.token_ids)
    for found, row in zip(got.logprobs, want, strict=True):
        best = row.topk(5)
        assert [one.token_id for one in found] == best.indices.tolist()
        assert max(abs(one.logprob - float(value)) for one, value in zip(found, best.values, strict=True)) < CLOSE
    first = [found[0].logprob for found in got.logprobs]
    assert max(abs(a - b) for a, b in itertools.pairwise(first)) > 100 * CLOSE
    assert smollm.generate(ids(smollm), max_tokens=2).logprobs is None
    steps = list(smollm.generate_stream(ids(smollm), max_tokens=10, n_logprobs=5, temperature=temperature, seed=1))
    assert tuple(step.logprobs for step in steps) == got.logprobs


@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_stop_string_ends_the_text_before_it(
    length: int, smollm: InterpModel, reference: InterpModel, greedy: Completion
) -> None:
    assert greedy.text is not None
    stop = greedy.text[20 : 20 + length]
    end = greedy.text.index(stop)
    options: dict[str, Any] = {"max_tokens": 60, "stop": [stop, "no such text"]}
    got = smollm.generate(ids(smollm), **options)
    assert got.text == greedy.text[:end]
    assert got.finish_reason == "stop"
    assert stop in smollm.to_string(list(got.token_ids))
    assert stop not in smollm.to_string(list(got.token_ids[:-1]))
    steps = list(smollm.generate_stream(ids(smollm), **options))
    assert "".join(step.token_str or "" for step in steps) == got.text
    assert tuple(step.token_id for step in steps) == got.token_ids
    completion, cache = smollm.capture_generation(ids(smollm), ["resid_post.3", "attn_probs.5"], **options)
    assert completion == got
    rows = len(got.prompt_token_ids) + len(got.token_ids) - 1
    assert cache.lengths == (rows,)
    assert cache["attn_probs.5"].shape[-2:] == (rows, rows)
    whole = [*got.prompt_token_ids, *got.token_ids][:-1]
    want = run_with_cache(reference, whole, ["resid_post.3", "attn_probs.5"])
    for address in want:
        assert difference(cache[address][0], want[address][0]) < CLOSE


def test_rows_of_a_generation_are_those_of_its_own_tokens(smollm: InterpModel, reference: InterpModel) -> None:
    points, prompts = ["resid_post.20", "z.7"], [ids(smollm, text) for text in TEXTS[:2]]
    vector = torch.linspace(-1, 1, smollm.d_model)
    plain, _ = smollm.capture_generation(prompts, points, max_tokens=6)
    for scale in (20.0, 0.0):
        operation = Add("resid_post.10", vector, scale=scale)
        with steer(smollm, operation):
            completions, cache = smollm.capture_generation(prompts, points, max_tokens=6, ignore_eos=True)
        assert cache.lengths == tuple(len(prompt) + 5 for prompt in prompts)
        assert ([c.token_ids for c in completions] == [c.token_ids for c in plain]) is (scale == 0.0)
        for i, completion in enumerate(completions):
            whole = [*completion.prompt_token_ids, *completion.token_ids][:-1]
            want = run_with_cache(reference, whole, points, steering=operation)
            for address in want:
                assert difference(cache[address][i, : len(whole)], want[address][0]) < CLOSE


def test_streamed_text_is_whole_characters(smollm: InterpModel) -> None:
    prompt = ids(smollm, " ".join([LETTERS] * 5))
    steps = list(smollm.generate_stream(prompt, max_tokens=24))
    completion = smollm.generate(prompt, max_tokens=24)
    pieces = [step.token_str for step in steps]
    assert "".join(piece or "" for piece in pieces) == completion.text
    assert LETTERS in completion.text
    assert "\ufffd" not in completion.text.rstrip("\ufffd")
    assert pieces.count("") > 4
    alone = "".join(str(smollm.to_string([token])) for token in completion.token_ids)
    assert alone != completion.text


def test_a_stop_string_of_several_bytes_per_character(smollm: InterpModel) -> None:
    prompt = ids(smollm, " ".join([LETTERS] * 5))
    whole = smollm.generate(prompt, max_tokens=24).text
    got = smollm.generate(prompt, max_tokens=24, stop="🙂")
    assert got.text == whole[: whole.index("🙂")]
    assert got.finish_reason == "stop"


def test_a_conversation_ends_by_itself(smollm: InterpModel, reference: InterpModel) -> None:
    tokens = smollm.chat_tokens([{"role": "user", "content": "Answer in one word: what is the capital of France?"}])
    got = smollm.generate(tokens, max_tokens=60)
    assert got == reference.generate(tokens, max_tokens=60)
    assert got.finish_reason == "stop"
    assert got.token_ids[-1] == smollm.tokenizer.eos_token_id
    assert "<|im_end|>" not in got.text
    assert "Paris" in got.text
    on = smollm.generate(tokens, max_tokens=len(got.token_ids) + 4, ignore_eos=True)
    assert on.token_ids[: len(got.token_ids)] == got.token_ids
    assert len(on.token_ids) == len(got.token_ids) + 4
    assert on.finish_reason == "length"


def test_more_than_the_engine_takes_is_refused(smollm: InterpModel) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        smollm.generate(ids(smollm), max_tokens=256)
    with pytest.raises(RequestError):
        smollm.generate(ids(smollm), max_tokens=0)
    with pytest.raises(RequestError):
        smollm.generate(ids(smollm), max_tokens=1, top_p=1.5)
    assert len(smollm.generate(ids(smollm), max_tokens=1).token_ids) == 1
