"""An engine that somebody else built, on their loop; and what happens to engines that were not built for us."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm_families import PROMPTS, Loader

import interp_vllm
from interp_core import Add, BackendUnavailable, RequestError, inspect_model, run_with_cache
from interp_core.checks import difference

pytestmark = pytest.mark.vllm

TIGHT = 1e-5


def built(path: str, **options: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    sizes: dict[str, Any] = {"max_model_len": 256, "dtype": "float32", "skip_tokenizer_init": True}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(model=path, disable_log_stats=True, **sizes, **options))


async def plainly(llm: Any, prompt: list[int], name: str, body: dict[str, Any] | None = None) -> list[int]:
    """Greedy tokens, as a server would ask for them."""
    from vllm import SamplingParams

    extra = None if body is None else dict(body["vllm_xargs"])
    salt = {} if body is None else {"cache_salt": body["cache_salt"]}
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False, extra_args=extra)
    final: Any = None
    async for output in llm.generate({"prompt_token_ids": prompt, **salt}, params, request_id=name):
        final = output
    return list(final.outputs[0].token_ids)


def test_a_servers_own_engine_serves_the_whole_surface(loaded: Loader, vllm_folders: Callable[[str], str]) -> None:
    eager = loaded("llama", "eager")
    wanted = run_with_cache(eager, PROMPTS, ["resid_post.2", "attn_probs.1", "lm_head"])
    vector = torch.linspace(-1, 1, eager.d_model)
    plain = eager.generate(PROMPTS[0], max_tokens=6, ignore_eos=True)
    steered = eager.generate(
        PROMPTS[0], max_tokens=6, ignore_eos=True, steering=[Add("resid_post.1", vector, scale=9.0)]
    )
    assert plain.token_ids != steered.token_ids

    async def serve() -> None:
        llm = built(vllm_folders("llama"), **interp_vllm.engine_options())
        try:
            model = await interp_vllm.attach(llm)
            found = await model.aio.run_with_cache(PROMPTS, ["resid_post.2", "attn_probs.1", "lm_head"])
            assert all(difference(found[a][found[a] > -1e30], wanted[a][wanted[a] > -1e30]) < TIGHT for a in wanted)
            with pytest.raises(RequestError, match=r"model\.aio"):
                model.run_with_cache(PROMPTS[0], ["resid_post.2"])
            body = interp_vllm.steering_body(model.profile, PROMPTS[0], Add("resid_post.1", vector, scale=9.0))
            answers = await asyncio.gather(
                plainly(llm, PROMPTS[0], "a"), plainly(llm, PROMPTS[0], "b", body), plainly(llm, PROMPTS[0], "c")
            )
            assert [tuple(a) for a in answers] == [plain.token_ids, steered.token_ids, plain.token_ids]
            # The next step forgets what nobody will fetch.
            await plainly(llm, PROMPTS[1], "d")
            summary = await model.session.backend().engine.summary()  # type: ignore[attr-defined]
            assert summary[0]["requests"] == summary[0]["sites"] == 0
            model.shutdown()
            assert tuple(await plainly(llm, PROMPTS[0], "e")) == plain.token_ids
        finally:
            llm.shutdown()

    asyncio.run(serve())


def test_an_engine_that_did_not_ask_is_untouched_and_cannot_be_attached_to(vllm_folders: Callable[[str], str]) -> None:
    async def serve() -> None:
        llm = built(vllm_folders("llama"), enforce_eager=True)
        try:
            with pytest.raises(BackendUnavailable, match="engine_options"):
                await interp_vllm.attach(llm)
            profile = inspect_model(vllm_folders("llama"), "vllm")
            body = interp_vllm.steering_body(profile, PROMPTS[0], Add("resid_post.1", torch.ones(96), scale=9.0))
            assert await plainly(llm, PROMPTS[0], "a", body) == await plainly(llm, PROMPTS[0], "b")
        finally:
            llm.shutdown()

    asyncio.run(serve())
