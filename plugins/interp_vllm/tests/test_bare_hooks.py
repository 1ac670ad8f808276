"""Captured rows are bit-equal to what a second, bare hook in the same worker saw in the same forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm_families import PROMPTS, Loader

from interp_core import run_with_cache
from interp_vllm.engine import Engine
from interp_vllm.loop import finished, submit
from interp_vllm.payload import read_payload

pytestmark = pytest.mark.vllm

PLAIN = {
    "z": ("self_attn.o_proj", "in|0"),
    "attn_out": ("self_attn.o_proj", "out|0"),
    "attn_in": ("self_attn.qkv_proj", "in|0"),
    "mlp_in": ("mlp", "in|0"),
    "mlp_act": ("mlp.down_proj", "in|0"),
    "mlp_out": ("mlp", "out|0"),
}
LLAMA = {**PLAIN, "resid_mid": ("post_attention_layernorm", "out|1")}
GEMMA2 = {
    **PLAIN,
    "resid_mid": ("pre_feedforward_layernorm", "out|1"),
    "attn_out_post": ("post_attention_layernorm", "out|0"),
    "mlp_out_post": ("post_feedforward_layernorm", "out|0"),
}
QWEN3 = {
    **LLAMA,
    "q_norm_in": ("self_attn.q_norm", "in|0"),
    "q_norm_out": ("self_attn.q_norm", "out|0"),
    "k_norm_out": ("self_attn.k_norm", "out|0"),
}
GPT2 = {
    "z": ("attn.c_proj", "in|0"),
    "attn_out": ("attn.c_proj", "out|0"),
    "attn_in": ("attn.c_attn", "in|0"),
    "mlp_in": ("mlp", "in|0"),
    "mlp_pre": ("mlp.c_fc", "out|0"),
    "mlp_act": ("mlp.c_proj", "in|0"),
    "mlp_out": ("mlp", "out|0"),
    "resid_mid": ("ln_2", "in|0"),
    "resid_pre": ("", "in|0"),
    "resid_post": ("", "out|0"),
}
OLMO2 = {"z": PLAIN["z"], "mlp_act": PLAIN["mlp_act"], "resid_post": ("", "out|0")}
CASES = [
    ("llama", "vllm", "model.layers", LLAMA),
    ("qwen3", "vllm", "model.layers", QWEN3),
    ("gemma2", "vllm", "model.layers", GEMMA2),
    ("gpt2", "vllm", "transformer.h", GPT2),
    ("olmo2", "transformers", "model.layers", OLMO2),
]


@pytest.mark.parametrize(("family", "impl", "blocks", "table"), CASES, ids=lambda value: str(value)[:12])
def test_rows_are_what_a_bare_hook_saw(
    family: str, impl: str, blocks: str, table: dict[str, tuple[str, str]], loaded: Loader
) -> None:
    model = loaded(family, model_impl=impl)
    engine = _with_bare_hooks(model)
    blocks = blocks if impl == "vllm" else f"model.{blocks.removeprefix('model.')}"
    paths = {f"{blocks}.{i}.{path}".rstrip(".") for i in range(model.n_layers) for path, _ in table.values()}
    finished(submit(engine._rpc("bare_install", sorted(paths))))
    cache = run_with_cache(model, PROMPTS[0], [f"{point}.{i}" for point in table for i in range(model.n_layers)])
    seen = read_payload(finished(submit(engine._rpc("bare_fetch")))[0])
    for point, (path, side) in table.items():
        for i in range(model.n_layers):
            want = seen[f"{blocks}.{i}.{path}".rstrip(".") + f"|{side}"]
            assert torch.equal(cache[f"{point}.{i}"].flatten(), want.flatten()), (point, i)
    model.shutdown()


def test_the_fused_stream_is_the_sum_of_its_halves_bit_for_bit(loaded: Loader) -> None:
    model = loaded("mistral")
    engine = _with_bare_hooks(model)
    paths = [f"model.layers.{i}" for i in range(model.n_layers)]
    finished(submit(engine._rpc("bare_install", paths)))
    cache = run_with_cache(model, PROMPTS[0], ["resid_pre.*", "resid_post.*"])
    seen = read_payload(finished(submit(engine._rpc("bare_fetch")))[0])
    for i, path in enumerate(paths):
        assert torch.equal(cache[f"resid_post.{i}"][0], seen[f"{path}|out|0"] + seen[f"{path}|out|1"])
        assert not torch.equal(cache[f"resid_post.{i}"][0], seen[f"{path}|out|0"])
        if i:
            assert torch.equal(cache[f"resid_pre.{i}"][0], seen[f"{path}|in|0"] + seen[f"{path}|in|1"])


def _with_bare_hooks(model: Any) -> Engine:
    from interp_vllm.backend import VllmBackend

    backend = VllmBackend(model.profile, model.profile.options)
    backend.engine.arguments["worker_extension_cls"] = "bare_hooks.BareHooks"
    model.session.make = lambda *_: backend
    model.warmup()
    return backend.engine
