"""The real model by the same checks as the tiny ones; and what steering and hooks leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checks import (
    TIGHT,
    check_bare_hooks,
    check_identities_1_to_5,
    check_logits,
    check_modules,
    check_writes,
)
from families import save
from test_identities import parts
from tiny_families import PROMPT

from interp_core import Add, InterpModel, load_model, run_with_cache, steer
from interp_core.checks import difference


def test_identity_1_with_learned_positions(folders: Any) -> None:
    with load_model(save("gpt2", folders), backend="eager", dtype="float32") as gpt2:
        cache = run_with_cache(gpt2, PROMPT, ["embeddings", "resid_pre.0"])
        backend: Any = gpt2.session.backend()
        table = backend.model.transformer.wpe.weight.detach()[: len(PROMPT)]
        assert torch.equal(cache["embeddings"][0] + table, cache["resid_pre.0"][0])
        assert difference(cache["embeddings"][0], cache["resid_pre.0"][0]) > 10 * TIGHT


def test_steering_reaches_only_generated_or_only_prompt_positions(llama: InterpModel) -> None:
    vector = torch.linspace(-1, 1, llama.d_model)
    plain = run_with_cache(llama, PROMPT, ["resid_post.1"])["resid_post.1"]
    with steer(llama, [Add("resid_post.1", vector, scale=5.0)], prompt=False):
        completion, cache = llama.capture_generation(PROMPT, ["resid_post.1"], max_tokens=4, ignore_eos=True)
    whole = [*PROMPT, *completion.token_ids[:-1]]
    clean = run_with_cache(llama, whole, ["resid_post.1"])["resid_post.1"][0]
    moved = cache["resid_post.1"][0] - clean
    n = len(PROMPT)
    assert torch.equal(cache["resid_post.1"][0, :n], plain[0])
    assert difference(moved[n:], (5.0 * vector).expand(3, -1)) < 1e-4


def test_hooks_are_gone_after_a_failure_and_a_users_own_stay(llama: InterpModel) -> None:
    from interp_core import Apply, RequestError

    backend: Any = llama.session.backend()
    mine = backend.model.register_forward_hook(lambda *_: None)

    def count() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in backend.model.modules())

    before = count()

    def broken(rows: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("on purpose")

    with pytest.raises(RequestError, match="on purpose"), steer(llama, Apply("resid_post.1", broken)):
        llama.generate(PROMPT, max_tokens=2)
    assert count() == before
    for _ in llama.generate_stream(PROMPT, max_tokens=5):
        assert count() == before
        break
    mine.remove()


@pytest.mark.real_model
class TestRealModel:
    """The same on SmolLM2-135M-Instruct."""

    def test_identities_1_to_5(self, smollm: InterpModel) -> None:
        check_identities_1_to_5(smollm, "smollm")

    def test_identity_3_modules(self, smollm: InterpModel) -> None:
        check_modules(smollm)

    def test_identity_6_logits(self, smollm: InterpModel) -> None:
        check_logits(smollm)

    def test_identity_8_writes(self, smollm: InterpModel) -> None:
        # Every layer's writes of zero are in verify(), which a test runs on this model too.
        check_writes(smollm, {None, *range(0, smollm.n_layers, 6), smollm.n_layers - 1})

    def test_identity_10_bare_hooks(self, smollm: InterpModel) -> None:
        check_bare_hooks(smollm, parts(), "model.layers")

    def test_it_says_paris_and_streams_bytes_whole(self, smollm: InterpModel) -> None:
        ids = smollm.to_tokens("The capital of France is")
        assert smollm.generate(ids, max_tokens=1).text == " Paris"
        steps = list(smollm.generate_stream(smollm.to_tokens("é漢字🙂 é漢字🙂 é漢字🙂"), max_tokens=12))
        text = smollm.generate(smollm.to_tokens("é漢字🙂 é漢字🙂 é漢字🙂"), max_tokens=12).text
        assert "".join(step.token_str or "" for step in steps) == text
        assert "🙂" in text


@pytest.mark.parametrize("family", ["gemma2", "mistral", "gpt_neo"])
def test_padding_beside_a_window_reaches_nobody_in_float64(family: str, folders: Path) -> None:
    """Padded rows see no key at all there; a mask made their values no numbers, and zero times those is none either."""
    short = PROMPT[:3]
    with load_model(save(family, folders), backend="eager", dtype="float64") as model:
        both = run_with_cache(model, [PROMPT, short], ["resid_post.*"])
        alone = run_with_cache(model, short, ["resid_post.*"])
        for address in alone:
            assert difference(both[address][1, :3], alone[address][0]) < 1e-6
            assert difference(both[address][0, :3], alone[address][0]) < 1e-6
