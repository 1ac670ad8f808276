"""One request of a batch among others: its own steering, sampling, stops, steps and end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batches import TIGHT, UNEQUAL, counted
from tiny_families import _GROUPED, PROMPT, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from interp_core import Add, Apply, BackendUnavailable, InterpModel, RequestError, load_model, steer
from interp_core.checks import difference
from interp_core.requests import ForwardRequest, GenerationRun, Read, Sampling, Step

POINT = "resid_post.1"


def push(model: InterpModel, scale: float = 5.0) -> Add:
    return Add(POINT, torch.linspace(-1, 1, model.d_model), scale=scale)


def begun(model: InterpModel, **options: Any) -> list[GenerationRun]:
    """A batch of ``UNEQUAL``, run by run, as the core begins it."""
    sampling = Sampling(max_tokens=6, stop_token_ids=frozenset())
    reads = (Read(address=model.address(POINT)),)
    requests = [ForwardRequest(token_ids=tuple(p), sampling=sampling, reads=reads, **options) for p in UNEQUAL]
    (batch,) = model.session.generate_together(requests)
    return [batch[i] for i in range(len(requests))]


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InterpModel]:
    """A tiny Llama that says something else after each prompt, with a tokenizer of one token per byte.

    Most of what it says is parts of characters.
    """
    folder = tmp_path_factory.mktemp("sharp") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_GROUPED, initializer_range=0.2)).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({"<s>": 0, "</s>": 1} | {c: i + 2 for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    with load_model(folder, backend="eager", dtype="float32") as model:
        yield model


@pytest.mark.parametrize("options", [{"prompt": False}, {"generated": False}, {"positions": [1, 8, 12]}])
def test_positions_are_each_prompts_own(sharp: InterpModel, options: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    plain, _ = sharp.capture_generation(UNEQUAL, [POINT], **asked)
    with steer(sharp, push(sharp), **options):
        done, cache = sharp.capture_generation(UNEQUAL, [POINT], **asked)
        for i, prompt in enumerate(UNEQUAL):
            alone, rows = sharp.capture_generation(prompt, [POINT], **asked)
            assert done[i].token_ids == alone.token_ids
            assert difference(cache[POINT][i, : rows[POINT].shape[1]], rows[POINT][0]) < TIGHT
    assert [one.token_ids for one in done] != [one.token_ids for one in plain]


def test_a_write_to_one_row_leaves_the_others_bit_equal(sharp: InterpModel) -> None:
    points = [POINT, "resid_post.3", "attn_probs.2"]
    plain, rows = sharp.capture_generation(UNEQUAL, points, max_tokens=6, n_logprobs=2, ignore_eos=True)
    with steer(sharp, push(sharp, 50.0), positions=[9]):
        steered, written = sharp.capture_generation(UNEQUAL, points, max_tokens=6, n_logprobs=2, ignore_eos=True)
    # Position 9 is the last of the first prompt and a new token's of the third; the others do not get there.
    reached = [len(prompt) + 5 > 9 for prompt in UNEQUAL]
    assert reached == [True, False, True, False]
    for i, prompt in enumerate(UNEQUAL):
        n = len(prompt) + 5
        for point in points:
            mine, other = written[point][i], rows[point][i]
            if point.startswith("attn_"):
                mine, other = mine[:, :n, :n], other[:, :n, :n]
            assert torch.equal(mine, other) is not reached[i]
        assert (steered[i].logprobs == plain[i].logprobs) is not reached[i]


def test_the_end_of_one_row_changes_nothing_of_the_others(sharp: InterpModel, monkeypatch: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 8, "n_logprobs": 2}
    plain, rows = sharp.capture_generation(UNEQUAL, [POINT], **asked, ignore_eos=True)
    backend: Any = sharp.session.backend()
    said = [set(one.token_ids) for one in plain]
    end = next(token for one in said for token in one if any(token not in other for other in said))
    monkeypatch.setattr(backend, "end_tokens", frozenset({end}))
    done, ended = sharp.capture_generation(UNEQUAL, [POINT], **asked)
    reasons = []
    for i, prompt in enumerate(UNEQUAL):
        tokens = plain[i].token_ids
        new = tokens.index(end) + 1 if end in tokens else 8
        reasons.append(done[i].finish_reason)
        assert reasons[i] == ("stop" if end in tokens else "length")
        assert (done[i].token_ids, done[i].logprobs) == (tokens[:new], plain[i].logprobs[:new])
        n = len(prompt) + new - 1
        assert ended.lengths[i] == n
        assert torch.equal(ended[POINT][i, :n], rows[POINT][i, :n])
        assert not bool(ended[POINT][i, n:].any())
    assert set(reasons) == {"stop", "length"}


def test_a_sample_does_not_depend_on_its_neighbours(sharp: InterpModel) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 1.5, "seed": 11, "ignore_eos": True, "top_k": 40}
    alone = [sharp.generate(prompt, **asked).token_ids for prompt in UNEQUAL]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0]):
        got = sharp.generate([UNEQUAL[i] for i in order], **asked)
        assert [one.token_ids for one in got] == [alone[i] for i in order]
    assert sharp.generate(PROMPT, **{**asked, "seed": 12}).token_ids != alone[0]


def test_a_repetition_penalty_is_of_each_requests_own_tokens(sharp: InterpModel) -> None:
    asked: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}
    plain = [one.token_ids for one in sharp.generate(UNEQUAL, **asked)]
    done = sharp.generate(UNEQUAL, **asked, n_logprobs=1, repetition_penalty=1.8)
    for prompt, one, before in zip(UNEQUAL, done, plain, strict=True):
        tokens = list(prompt)
        for token, best in zip(one.token_ids, one.logprobs, strict=True):
            logits = sharp.run_with_cache(tokens, ["lm_head"])["lm_head"][0, -1]
            # Log-probabilities stay the model's own.
            assert best[0].token_id == int(logits.argmax())
            for seen in set(tokens):
                logits[seen] = logits[seen] / 1.8 if logits[seen] > 0 else logits[seen] * 1.8
            assert token == int(logits.argmax())
            tokens.append(token)
        assert sharp.generate(prompt, **asked, repetition_penalty=1.8).token_ids == one.token_ids
        assert sharp.generate(prompt, **asked, repetition_penalty=1).token_ids == before
    assert [one.token_ids for one in done] != plain
    for wrong in (0, -1.0, float("nan"), float("inf"), "2", None):
        with pytest.raises(RequestError, match="repetition_penalty is a number above 0"):
            sharp.generate(PROMPT, max_tokens=1, repetition_penalty=wrong)


def test_steps_carry_each_rows_own_logits(sharp: InterpModel) -> None:
    runs = begun(sharp, want_logits=True, n_logprobs=2)
    found: list[list[Step]] = [[] for _ in runs]
    with counted(sharp) as rows:
        for _ in range(6):
            for run, steps in zip(runs, found, strict=True):
                steps.append(next(run))
    assert rows == [4] * 6
    for prompt, run, steps in zip(UNEQUAL, runs, found, strict=True):
        assert next(run, None) is None
        assert run.finish_reason == "length"
        for step, alone in zip(steps, sharp.generate_stream(prompt, max_tokens=6, ignore_eos=True), strict=True):
            assert step.token_id == alone.token_id == step.logprobs[0].token_id
            assert step.logits is not None
            assert alone.logits is not None
            assert difference(step.logits, alone.logits) < TIGHT
            assert abs(step.logprobs[0].logprob - float(step.logits.log_softmax(-1).max())) < 1e-6


def test_a_run_may_be_closed_and_the_others_go_on(sharp: InterpModel) -> None:
    want = [sharp.generate(prompt, max_tokens=6, ignore_eos=True).token_ids for prompt in UNEQUAL]
    runs = begun(sharp)
    got = [[next(run).token_id] for run in runs]
    runs[0].close()
    assert next(runs[0], None) is None
    assert runs[0].finish_reason is None
    for i in (3, 1, 2):
        # One far ahead of the others: their steps wait for them, and their rows are those of the steps given.
        got[i] += [step.token_id for step in runs[i]]
        if i == 3:
            assert runs[1].finish_reason is None
            assert runs[1].result().rows[sharp.address(POINT)].shape[0] == len(UNEQUAL[1])
    assert [tuple(tokens) for tokens in got[1:]] == want[1:]
    batch: Any = runs[1].run.batch  # type: ignore[attr-defined]
    assert batch._cache is None
    runs = begun(sharp)
    next(runs[0])
    batch = runs[0].run.batch  # type: ignore[attr-defined]
    assert batch._cache is not None
    for run in runs:
        run.close()
        run.close()
    assert batch._cache is None


def test_a_row_whose_logits_are_no_numbers_fails_alone(sharp: InterpModel) -> None:
    def spoil(rows: torch.Tensor) -> torch.Tensor:
        return rows * float("nan")

    want = sharp.generate(UNEQUAL[1], max_tokens=6, ignore_eos=True).token_ids
    from interp_core.steering import as_steering, writes_for

    writes = [writes_for((as_steering(sharp.profile, [Apply("final_norm", spoil)], positions=[9]),), 10), (), (), ()]
    sampling = Sampling(max_tokens=6, stop_token_ids=frozenset())
    requests = [
        ForwardRequest(token_ids=tuple(p), sampling=sampling, writes=w) for p, w in zip(UNEQUAL, writes, strict=True)
    ]
    (batch,) = sharp.session.generate_together(requests)
    with pytest.raises(RequestError, match="no numbers"):
        next(batch[0])
    assert next(batch[0], None) is None
    assert tuple(step.token_id for step in batch[1]) == want
    with pytest.raises(RequestError, match="no numbers"), steer(sharp, Apply("final_norm", spoil), positions=[9]):
        sharp.generate(UNEQUAL, max_tokens=2)


def test_after_a_forward_that_failed_nothing_goes_on(sharp: InterpModel) -> None:
    calls = 0

    def fails_at_the_third(rows: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("on purpose")
        return rows

    with steer(sharp, Apply(POINT, fails_at_the_third), positions=[9, 10, 11]):
        runs = begun(sharp, writes=())
        from interp_core.steering import active_steering, writes_for

        sampling = Sampling(max_tokens=6, stop_token_ids=frozenset())
        request = ForwardRequest(
            token_ids=tuple(PROMPT), sampling=sampling, writes=writes_for(active_steering(sharp), len(PROMPT))
        )
        run = sharp.session.generate(request)
    next(run), next(run)
    with pytest.raises(RequestError, match="on purpose"):
        next(run)
    # The forward ended half way, and the cache holds the token in some layers only.
    with pytest.raises(RequestError, match="in no known state"):
        next(run)
    assert len(list(runs[0])) == 6


def test_every_row_of_a_batch_ends_by_name_after_shutdown(folders: Path) -> None:
    model = load_model(save("llama", folders), "eager", dtype="float32")
    runs = begun(model)
    for run in runs:
        next(run)
    model.shutdown()
    for run in runs:
        with pytest.raises(BackendUnavailable, match="shut down"):
            next(run)
        run.close()


def test_text_of_a_batch_is_each_prompts_own(sharp: InterpModel) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.5, "seed": 5}
    prompts = [sharp.to_tokens(text)[0].tolist() for text in ("é漢字🙂", "a", "🙂 b")]
    prompts.append(prompts[0][:-2])  # ends inside a character
    done = sharp.generate(prompts, **asked)
    for prompt, one in zip(prompts, done, strict=True):
        steps = list(sharp.generate_stream(prompt, **asked))
        assert "".join(step.token_str or "" for step in steps) == one.text == sharp.generate(prompt, **asked).text
        assert tuple(step.token_id for step in steps) == one.token_ids
        assert one.text == sharp.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    # One token per byte: pieces that are decoded one by one are another text.
    apart = ["".join(sharp.tokenizer.decode([token]) for token in one.token_ids) for one in done]
    assert apart != [one.text for one in done]


def test_a_stop_string_ends_its_own_row(sharp: InterpModel) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "temperature": 1.5, "seed": 5}
    prompts = [sharp.to_tokens(text)[0].tolist() for text in ("one two", "a", "three")]
    plain = sharp.generate(prompts, **asked)
    said = [set(one.text[:-4]) - {"\ufffd"} for one in plain]
    stop = next(c for one in said for c in sorted(one) if any(c not in other.text for other in plain))
    done = sharp.generate(prompts, stop=[stop], **asked)
    for prompt, one, before in zip(prompts, done, plain, strict=True):
        alone = sharp.generate(prompt, stop=[stop], **asked)
        assert (one.text, one.token_ids, one.finish_reason) == (alone.text, alone.token_ids, alone.finish_reason)
        assert one.text == before.text.split(stop)[0] or stop not in before.text
        assert stop not in one.text
    assert {one.finish_reason for one in done} == {"stop", "length"}
    assert min(len(one.token_ids) for one in done) < 24


def test_too_long_is_refused_before_any_forward_in_every_call(folders: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(save("llama", folders), tmp_path / "llama"))
    limit = json.loads((bare / "config.json").read_text())["max_position_embeddings"]
    (bare / "model.safetensors").unlink()  # whatever touches a weight fails
    model = load_model(bare, "eager")
    short, full, over = [7] * 3, [7] * limit, [7] * (limit + 1)
    calls: list[Any] = [
        lambda: model.run_with_cache(over, [POINT]),
        lambda: model.run_with_cache([short, over], [POINT]),
        lambda: model.capture_attention(over, [0]),
        lambda: model.logit_lens(over),
        lambda: model.verify(over),
        lambda: model.generate(over, max_tokens=1),
        lambda: model.generate(full, max_tokens=1),
        lambda: model.generate([short, full], max_tokens=1),
        lambda: model.generate(short, max_tokens=limit - 2),
        lambda: model.generate(short, max_tokens=limit - 2, n=3),
        lambda: model.capture_generation([short, full], [POINT], max_tokens=1),
        lambda: model.generate_stream(full, max_tokens=1),
    ]
    for call in calls:
        with pytest.raises(RequestError, match=f"more than this model takes .{limit}"):
            call()
    assert not model.session.warm
    with load_model(save("llama", folders), "eager") as whole:
        done, cache = whole.capture_generation(short, [POINT], max_tokens=limit - 3, ignore_eos=True)
        assert cache[POINT].shape[1] == len(done.token_ids) + 2 == limit - 1
        assert whole.run_with_cache(full, [POINT])[POINT].shape[1] == limit
