"""Faults that a fresh pair of eyes found, one test each, so that none comes back."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import PROMPT, save

from interp_core import (
    Ablate,
    Add,
    Apply,
    BackendUnavailable,
    InterpModel,
    ModelUnavailable,
    NormScaledAdd,
    Replace,
    RequestError,
    Scale,
    Swap,
    load_model,
    run_with_cache,
    steer,
)
from interp_core.checks import difference

POINT = "resid_post.1"


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(save("llama", folders), tmp_path / "copy"))


def capture(model: InterpModel, *operations: Any, point: str = POINT, **options: Any) -> torch.Tensor:
    with steer(model, operations, **options):
        return run_with_cache(model, PROMPT, [point])[point][0]


def test_steering_behind_the_last_read_layer_is_no_failure(llama: InterpModel) -> None:
    plain = run_with_cache(llama, PROMPT, ["resid_post.0", "attn_probs.0"])
    for where in ("resid_post.2", "final_norm", "embeddings"):
        with steer(llama, Add(where, torch.ones(llama.d_model))):
            got = run_with_cache(llama, PROMPT, ["resid_post.0", "attn_probs.0"])
            llama.logit_lens(PROMPT, [0])
            llama.capture_attention(PROMPT, [0])
        for key, rows in plain.items():
            assert torch.equal(got[key], rows) is (where != "embeddings")


def test_rows_of_replace_follow_the_positions_as_listed(llama: InterpModel) -> None:
    rows = torch.randn(2, llama.d_model)
    got = capture(llama, Replace(POINT, rows), positions=[7, 2])
    assert torch.equal(got[[7, 2]], rows)
    assert torch.equal(got[:2], capture(llama)[:2])
    with steer(llama, Replace(POINT, rows), positions=[7, 2]):
        completion, cache = llama.capture_generation(PROMPT, [POINT], max_tokens=3, ignore_eos=True)
    assert torch.equal(cache[POINT][0, [7, 2]], rows)
    assert len(completion.token_ids) == 3
    for positions in ([2, 2], [2, 30]):
        with pytest.raises(RequestError, match="rows are for prompt positions"):
            capture(llama, Replace(POINT, rows), positions=positions)


def test_a_hook_that_calls_its_own_model_is_refused_and_does_not_hang(llama: InterpModel) -> None:
    def inner(rows: torch.Tensor) -> torch.Tensor:
        run_with_cache(llama, PROMPT, [POINT])
        return rows

    with pytest.raises(RequestError, match="called the model that is running it"):
        capture(llama, Apply(POINT, inner))
    assert capture(llama).shape == (len(PROMPT), llama.d_model)


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_huge_and_tiny_directions_keep_their_direction(llama: InterpModel, factor: float) -> None:
    vector = torch.linspace(-1, 2, llama.d_model)
    far = vector.double() * factor
    for make in (Ablate, lambda a, v: Scale(a, v, 2.0), lambda a, v: NormScaledAdd(a, v, 0.5)):
        assert difference(capture(llama, make(POINT, far)), capture(llama, make(POINT, vector))) < 1e-5
    mixed = Swap(POINT, vector, vector.roll(3).double())
    assert difference(capture(llama, mixed), capture(llama, Swap(POINT, vector, vector.roll(3)))) < 1e-5


def test_vectors_of_half_precision_are_multiplied_in_float32(llama: InterpModel) -> None:
    vector = torch.linspace(-1, 2, llama.d_model).bfloat16()
    moved = capture(llama, Add(POINT, vector, scale=1.3)) - capture(llama)
    assert difference(moved, (1.3 * vector.float()).expand_as(moved)) < 1e-5
    with pytest.raises(RequestError, match="not finite"):
        capture(llama, Add(POINT, torch.ones(llama.d_model), scale=1e39))


def test_apply_gives_the_shape_that_it_got(llama: InterpModel) -> None:
    for wrong in (lambda x: x.T, lambda x: x[:, :-1], lambda x: x + 0j, lambda x: None):
        with pytest.raises(RequestError, match="for rows of shape"):
            capture(llama, Apply(POINT, wrong))
    head = "z.1.head-2"
    assert torch.equal(capture(llama, Apply(head, lambda x: 0 * x), point=head), torch.zeros(len(PROMPT), 16))


def test_steering_that_would_write_nowhere_is_refused(llama: InterpModel) -> None:
    operation = Add(POINT, torch.ones(llama.d_model))
    bad: list[dict[str, Any]] = [{"positions": []}, {"positions": "last", "prompt": False}, {"positions": "first"}]
    bad += [{"positions": slice(20, 30)}, {"positions": [-1]}, {"positions": slice("a", None)}]
    bad += [{"prompt": False, "generated": False}, {"positions": [30], "generated": False}]
    for options in bad:
        with pytest.raises(RequestError):
            capture(llama, operation, **options)


def test_lens_positions_and_layers(llama: InterpModel) -> None:
    for positions in ([], slice(3, 3)):
        with pytest.raises(RequestError, match="select nothing"):
            llama.logit_lens(PROMPT, positions=positions)
    assert llama.logit_lens(PROMPT, torch.tensor(1).numpy()).layers == (1,)
    for layers in (1.5, [], [1.5], "1"):
        with pytest.raises(RequestError, match="layers are a list"):
            llama.logit_lens(PROMPT, layers)
        with pytest.raises(RequestError, match="layers are a list"):
            llama.capture_attention(PROMPT, layers)


def test_what_only_looks_like_a_number(llama: InterpModel) -> None:
    half = torch.tensor(1.5)
    calls: list[Any] = [
        lambda: llama.generate([half], max_tokens=1),
        lambda: llama.generate(PROMPT, max_tokens=half),
        lambda: llama.generate(PROMPT, max_tokens=1, seed=half, temperature=1.0),
        lambda: llama.generate(PROMPT, max_tokens=1, seed=2**64, temperature=1.0),
        lambda: llama.generate(PROMPT, max_tokens=1, temperature=1e-40),
        lambda: llama.generate(PROMPT, max_tokens=1, stop=5),
        lambda: run_with_cache(llama, PROMPT, [POINT], positions=[half]),
        lambda: llama.decode_residuals(None),
        lambda: llama.decode_residuals([[1.0], [2.0, 3.0]]),
        lambda: llama.to_string([1.5]),
        lambda: llama.to_string(None),
        lambda: llama.to_str_tokens([-5]),
    ]
    for call in calls:
        with pytest.raises(RequestError):
            call()
    scale = torch.tensor(0.5).numpy()[()]
    assert capture(llama, Add(POINT, torch.ones(llama.d_model), scale=scale)).isfinite().all()


def test_logits_that_are_no_numbers_are_an_error(llama: InterpModel) -> None:
    broken = Apply("final_norm", lambda x: x * float("nan"))
    for temperature in (0.0, 1.0):
        with pytest.raises(RequestError, match="no numbers"), steer(llama, broken):
            llama.generate(PROMPT, max_tokens=2, temperature=temperature)


def test_a_stream_after_shutdown_is_one_error(folders: Path) -> None:
    model = load_model(save("llama", folders), "eager")
    stream = model.generate_stream(PROMPT, max_tokens=5, ignore_eos=True)
    next(stream)
    model.shutdown()
    with pytest.raises(BackendUnavailable, match="shut down"):
        next(stream)


def test_inference_mode_gives_ordinary_tensors(folders: Path) -> None:
    with torch.inference_mode(), load_model(save("llama", folders), "eager", requires_grad=True) as model:
        rows = run_with_cache(model, PROMPT, [POINT])[POINT]
        with pytest.raises(RequestError, match="inference_mode"):
            run_with_cache(model, PROMPT, [POINT], detach=False)
    assert not rows.is_inference()
    rows.add_(1)


def test_every_capture_in_inference_mode_is_of_ordinary_tensors(folders: Path) -> None:
    points = [POINT, "z.1", "attn_probs.1"]
    with load_model(save("llama", folders), "eager") as model, torch.inference_mode():
        caches = [
            run_with_cache(model, PROMPT, points),
            run_with_cache(model, [PROMPT, PROMPT[:2]], points),
            model.capture_generation(PROMPT, points, max_tokens=3, ignore_eos=True)[1],
            model.capture_generation([PROMPT, PROMPT[:2]], points, max_tokens=3, ignore_eos=True)[1],
        ]
        control = torch.ones(2)
    assert control.is_inference()
    for cache in caches:
        for rows in cache.values():
            assert not rows.is_inference()
            rows.mul_(2)


def test_a_configuration_of_fewer_layers_is_said(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.warns(UserWarning, match=r"no place for weights .* model\.layers\.3"):
        load_model(copied, "eager").warmup()


def test_spoiled_checkpoints_are_one_error(copied: Path, tmp_path: Path) -> None:
    def spoiled(name: str, change: Any) -> None:
        folder = Path(shutil.copytree(copied, tmp_path / name))
        change(folder)
        with pytest.raises(ModelUnavailable), load_model(folder, "eager") as model:
            model.warmup()
        assert not model.session.warm

    weights = "model.safetensors"
    spoiled("truncated", lambda f: (f / weights).write_bytes((copied / weights).read_bytes()[:5000]))
    spoiled("empty", lambda f: (f / weights).write_bytes(b""))
    spoiled("gone", lambda f: (f / weights).unlink())
    spoiled("generation", lambda f: (f / "generation_config.json").write_text("{"))

    def without_one(folder: Path) -> None:
        tensors = load_file(folder / weights)
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        save_file(tensors, folder / weights, metadata={"format": "pt"})

    spoiled("one missing", without_one)
    with pytest.raises(RequestError, match="revision"):
        load_model(copied, "eager", revision="x").warmup()


def test_a_broken_tokenizer_is_not_taken_for_none(llama: InterpModel, copied: Path) -> None:
    assert llama.generate(PROMPT, max_tokens=1).text is None
    (copied / "tokenizer.json").write_text("{")
    with load_model(copied, "eager") as model, pytest.raises(ModelUnavailable, match="tokenizer"):
        model.generate(PROMPT, max_tokens=1)


def test_cancelled_tasks_end_their_work(llama: InterpModel) -> None:
    forwards = 0

    def count(rows: torch.Tensor) -> torch.Tensor:
        nonlocal forwards
        forwards += 1
        return rows

    async def stream() -> None:
        async for _ in llama.aio.generate_stream(PROMPT, max_tokens=50, ignore_eos=True):
            await asyncio.sleep(0)

    async def work() -> int:
        for delay in (0.0, 0.01, 0.02, 0.03, 0.05):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(stream(), delay)
        with steer(llama, Apply(POINT, count)), pytest.raises(TimeoutError):
            await asyncio.wait_for(llama.aio.generate(PROMPT, max_tokens=50, ignore_eos=True), 0.05)
        at_cancel = forwards
        await asyncio.sleep(0.5)
        return forwards - at_cancel

    assert asyncio.run(work()) <= 2
    assert forwards < 50


def test_an_awaited_stream_is_checked_and_steered_when_it_is_made(llama: InterpModel) -> None:
    operation = Add(POINT, torch.linspace(-5, 5, llama.d_model), scale=3.0)

    async def work() -> list[int]:
        with steer(llama, operation):
            made = llama.aio.generate_stream(PROMPT, max_tokens=4, ignore_eos=True)
        return [step.token_id async for step in made]

    with steer(llama, operation):
        want = llama.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids
    assert tuple(anyio.run(work)) == want
    assert want != llama.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids
    with pytest.raises(RequestError):
        llama.aio.generate_stream([], max_tokens=4)
    with pytest.raises(TypeError, match="max_tokns"):
        llama.aio.generate_stream(PROMPT, max_tokns=4)


@pytest.mark.real_model
def test_the_real_model_verifies_in_half_precision() -> None:
    from interp_eager.demo_model import prepare

    with load_model(prepare(), "eager", dtype="bfloat16") as model:
        found = model.verify()
        assert found.ok, found.failed()


@pytest.mark.parametrize("family", ["gemma2", "llama"])
def test_attention_matrices_have_the_models_dtype(family: str, folders: Path) -> None:
    """Where the softmax is computed in float32 too."""
    with load_model(save(family, folders), backend="eager", dtype="bfloat16") as model:
        cache = run_with_cache(model, PROMPT, ["attn_scores.0", "attn_probs.0", "resid_post.0"])
    assert {tensor.dtype for tensor in cache.values()} == {torch.bfloat16}


def test_what_fails_inside_the_forward_is_one_typed_error(llama: InterpModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = llama.session.backend()

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("expected scalar type Float but found BFloat16\nsecond line")

    monkeypatch.setattr(model.model.model.layers[1], "forward", broken)
    with pytest.raises(RequestError, match="forward of this model failed: expected scalar type Float") as caught:
        run_with_cache(llama, PROMPT, ["resid_post.2"])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_path_and_a_point_on_one_module_do_not_disturb_each_other(llama: InterpModel) -> None:
    path = "path.model.layers.1"
    alone = {a: run_with_cache(llama, PROMPT, [a])[a] for a in (POINT, path)}
    assert torch.equal(alone[POINT], alone[path])
    for order in ([POINT, path], [path, POINT]):
        both = run_with_cache(llama, PROMPT, order)
        assert all(torch.equal(both[a], alone[a]) for a in order)
    with steer(llama, [Add(POINT, torch.ones(llama.d_model)), Apply(path, lambda rows: rows * 2)]):
        steered = run_with_cache(llama, PROMPT, [POINT, path])
    assert torch.equal(steered[POINT], (alone[POINT] + 1) * 2)
    assert torch.equal(steered[path], steered[POINT])


def test_a_path_whose_axes_are_not_prompts_and_positions_is_refused(llama: InterpModel) -> None:
    """Rotary embeddings of one batch for all, here: rows of it would stand for prompts that they are not."""
    with pytest.raises(RequestError, match=r"rotary_emb gives \[1, \d+, \d+\], which does not begin with 2 prompts"):
        run_with_cache(llama, [PROMPT, PROMPT], ["path.model.rotary_emb"])
