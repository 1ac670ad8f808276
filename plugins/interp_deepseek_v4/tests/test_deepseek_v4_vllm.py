"""DeepSeek-V4 on a real vLLM engine, through reference kernels, against the eager backend on the same checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from published import both_forms
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from interp_core import (
    Ablate,
    Add,
    Address,
    BackendUnavailable,
    CapabilityUnsupported,
    InterpModel,
    Replace,
    Scale,
    inspect_model,
    load_model,
    run_with_cache,
)
from interp_core.checks import difference

pytestmark = pytest.mark.vllm

CLOSE = 1e-4
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "reference_kernels": True}
PROMPTS = [[5 + (7 * i * i + 11 * k) % 290 for i in range(n)] for k, n in enumerate((7, 150, 40))]
LAST = "resid_streams.3"


class Pair(NamedTuple):
    """The same weights on both backends."""

    vllm: InterpModel
    eager: InterpModel
    saved: str
    published: str


@pytest.fixture(scope="module", autouse=True)
def quick_engines() -> Iterator[None]:
    """One thread, little cache, quick starts."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "OMP_NUM_THREADS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        }.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def pair(folders: Path, quick_engines: None) -> Iterator[Pair]:
    """vLLM first, then eager on what transformers saved: importing vLLM must not change what eager reads.

    Steps of at most 64 tokens, where this machine's vLLM splits prompts at all.
    """
    saved, published = both_forms(folders)
    before = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    vllm = load_model(published, backend="vllm", max_num_batched_tokens=64, **OPTIONS).warmup()
    # vLLM switches compilation off for this model by a variable, which must not reach the next engine.
    assert {name: value for name, value in os.environ.items() if name.startswith("VLLM_")} == before
    eager = load_model(saved, backend="eager", dtype="float32").warmup()
    yield Pair(vllm, eager, saved, published)
    vllm.shutdown()
    eager.shutdown()


def served(model: InterpModel, *, write: bool = False) -> list[Address]:
    """Every address that can be read, or written: whole points, and single streams of those that need one."""
    found = []
    for spec in model.points():
        for layer in [None] if spec.scope == "trunk" else range(model.n_layers):
            for coordinates in ((), (("stream", 2),)):
                address = Address(spec.name, layer, coordinates)
                if model.refusal(address, write=write) is None:
                    found.append(address)
    return found


def test_every_served_address_is_eagers(pair: Pair) -> None:
    addresses = [a for a in served(pair.vllm) if pair.eager.refusal(a) is None]
    assert {a.name for a in addresses} >= {"z", "value", "q_norm_out", "expert_weights", "mlp_stream_mix", "lm_head"}
    found, wanted = (run_with_cache(m, PROMPTS, addresses) for m in (pair.vllm, pair.eager))
    for address in addresses:
        if address.name.startswith("expert_"):
            continue
        assert difference(found[address], wanted[address]) < CLOSE, address
    for layer in range(pair.vllm.n_layers):
        (w, i), (weights, indices) = (
            (c[f"expert_weights.{layer}"], c[f"expert_indices.{layer}"]) for c in (found, wanted)
        )
        # The two need not list the chosen experts in one order.
        order, other = i.argsort(-1), indices.argsort(-1)
        assert torch.equal(i.gather(-1, order), indices.gather(-1, other))
        assert difference(w.gather(-1, order), weights.gather(-1, other)) < CLOSE
    # Controls: another layer's rows, and another prompt's.
    assert difference(found["resid_streams.2"], wanted[LAST]) > 0.05
    assert difference(found[LAST][1].roll(1, 0), wanted[LAST][1]) > 0.05


def test_the_mix_is_turned_the_way_its_definition_says(pair: Pair) -> None:
    names = [f"{site}_stream_{part}.2" for site in ("attn", "mlp") for part in ("mix", "write")]
    streams = [f"{point}.2.stream-{k}" for point in ("resid_pre", "resid_mid", "resid_post") for k in range(4)]
    cache = run_with_cache(pair.vllm, PROMPTS[1], [*names, *streams, "attn_out.2", "mlp_out.2"])
    pre, mid, post = (
        torch.stack([cache[f"{point}.2.stream-{k}"][0] for k in range(4)], dim=1)
        for point in ("resid_pre", "resid_mid", "resid_post")
    )
    for site, before, after in (("attn", pre, mid), ("mlp", mid, post)):
        mix, write, out = (
            cache[name][0] for name in (f"{site}_stream_mix.2", f"{site}_stream_write.2", f"{site}_out.2")
        )
        written = write.unsqueeze(-1) * out.unsqueeze(-2)
        assert difference(mix @ before + written, after) < 1e-5
        assert difference(mix.transpose(-1, -2) @ before + written, after) > 1e-2
        assert float((mix.sum(-1) - 1).abs().max()) < 1e-4


def test_verify_proves_the_streams(pair: Pair) -> None:
    found = pair.vllm.verify(PROMPTS[2])
    assert found.ok, found.failed()
    for point in ("attn_stream_mix", "mlp_stream_write", "resid_streams", "resid_mid", "attn_out", "mlp_out"):
        assert found.points[point] == "proven", point


def test_every_writable_address_is_written_as_on_eager(pair: Pair) -> None:
    addresses = [a for a in served(pair.vllm, write=True) if a.layer in (None, 1) and pair.eager.refusal(a) is None]
    assert {a.name for a in addresses} >= {"resid_streams", "resid_pre", "attn_stream_collapse", "k_norm_out", "mlp_in"}
    plain = run_with_cache(pair.vllm, PROMPTS[1], ["final_norm"])["final_norm"]
    for address in addresses:
        shape = pair.vllm.profile.shape(address)
        vector = torch.sin(0.5 + 0.9 * torch.arange(int(torch.Size(shape).numel()))).reshape(shape)
        for operation in (Add(address, vector, scale=3.0), Scale(address, vector, factor=-1.5)):
            found, wanted = (
                run_with_cache(m, PROMPTS[1], ["final_norm"], steering=[operation])["final_norm"]
                for m in (pair.vllm, pair.eager)
            )
            assert difference(found, wanted) < CLOSE, (address, operation)
        with pair.vllm.steer(Add(address, vector, scale=3.0), positions=[100]):
            late = run_with_cache(pair.vllm, PROMPTS[1], ["final_norm"])["final_norm"]
        assert torch.equal(late[0, :100], plain[0, :100]), address
        assert difference(late[0, 100], plain[0, 100]) > 1e-4, address


def test_one_stream_and_one_collapse_alone(pair: Pair) -> None:
    vector = torch.linspace(-1, 1, 128)
    reads = ["resid_streams.1", "attn_out.1", "mlp_stream_collapse.1", "mlp_in.1", "attn_stream_mix.1"]
    plain = run_with_cache(pair.vllm, PROMPTS[1], reads)
    with pair.vllm.steer(Add("resid_streams.1.stream-2", vector, scale=3.0)):
        moved = run_with_cache(pair.vllm, PROMPTS[1], reads)
    change = moved["resid_streams.1"] - plain["resid_streams.1"]
    assert torch.equal(moved["resid_streams.1"][:, :, [0, 1, 3]], plain["resid_streams.1"][:, :, [0, 1, 3]])
    assert float((change[:, :, 2] - 3.0 * vector).abs().max()) < 1e-4
    with pair.vllm.steer(Add("mlp_stream_collapse.1", vector, scale=3.0)):
        moved = run_with_cache(pair.vllm, PROMPTS[1], reads)
    assert float((moved["mlp_stream_collapse.1"] - plain["mlp_stream_collapse.1"] - 3.0 * vector).abs().max()) < 1e-4
    assert torch.equal(moved["attn_out.1"], plain["attn_out.1"])
    assert difference(moved["mlp_in.1"], plain["mlp_in.1"]) > 1e-2
    with pair.vllm.steer([Ablate("resid_streams.1.stream-0"), Replace("resid_streams.1.stream-3", vector)]):
        moved = run_with_cache(pair.vllm, PROMPTS[1], reads)
    assert not moved["resid_streams.1"][:, :, 0].any()
    assert torch.equal(moved["resid_streams.1"][0, :, 3], vector.expand(150, -1))


def test_generation(pair: Pair) -> None:
    vector = torch.linspace(-1, 1, 128)
    steerings: list[Any] = [None, [Add("resid_streams.1.stream-2", vector, scale=20.0)]]
    for steering in steerings:
        runs = [
            m.capture_generation(PROMPTS, [LAST, "z.1", "value.2"], max_tokens=9, ignore_eos=True, steering=steering)
            for m in (pair.vllm, pair.eager)
        ]
        (found, rows), (wanted, reference) = runs
        assert [c.token_ids for c in found] == [c.token_ids for c in wanted]
        assert all(difference(rows[a], reference[a]) < CLOSE for a in reference), steering


def test_company_of_a_steered_request_is_not_touched(pair: Pair) -> None:
    alone = run_with_cache(pair.vllm, PROMPTS, [LAST])[LAST]
    stream = pair.vllm.generate_stream(
        PROMPTS[1], max_tokens=40, ignore_eos=True, steering=[Add("resid_streams.0", torch.ones(4, 128), scale=9.0)]
    )
    next(stream)
    beside = run_with_cache(pair.vllm, PROMPTS, [LAST])[LAST]
    stream.close()  # type: ignore[attr-defined]
    assert difference(beside, alone) < 1e-5


def test_the_lens_with_a_named_reduction(pair: Pair) -> None:
    with pytest.raises(CapabilityUnsupported, match="stream"):
        pair.vllm.logit_lens(PROMPTS[0])
    for reduction in ("head", "mean", "sum", 2):
        found, wanted = (m.logit_lens(PROMPTS[2], reduction=reduction) for m in (pair.vllm, pair.eager))
        assert difference(found.top_probs, wanted.top_probs) < CLOSE, reduction
        assert (found.top_ids == wanted.top_ids).float().mean() > 0.99
    stack = run_with_cache(pair.eager, PROMPTS[2], [LAST])[LAST][0]
    decoded = [m.decode_residuals(stack, reduction="head") for m in (pair.vllm, pair.eager)]
    assert difference(*decoded) < CLOSE
    assert difference(pair.vllm.decode_residuals(stack, reduction="mean"), decoded[1]) > 1e-2


def test_what_cannot_be_had_says_why(pair: Pair) -> None:
    for address in ("attn_scores.1", "attn_probs.0", "attn_out_post.1", "resid_mid.1"):
        refused = pair.vllm.refusal(address)
        assert isinstance(refused, CapabilityUnsupported), address
        assert refused.why
        assert refused.instead
    for address in ("z.1", "value.1", "router_logits.1", "attn_stream_mix.1", "resid_mid.1.stream-1"):
        refused = pair.vllm.refusal(address, write=True)
        assert isinstance(refused, CapabilityUnsupported), address
        assert refused.why


def test_checkpoints_and_builds_that_vllm_cannot_run_are_refused_by_name(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(BackendUnavailable, match=r"saved by transformers.*published form.*eager"):
        load_model(pair.saved, backend="vllm", **OPTIONS).warmup()
    plain = {**OPTIONS, "reference_kernels": False}
    # Whatever this machine's build has: compiled kernels take no float32, and another build lacks them.
    with pytest.raises(BackendUnavailable, match="reference_kernels=True"):
        load_model(pair.published, backend="vllm", **plain).warmup()
    monkeypatch.setattr("interp_deepseek_v4.kernels.needed", lambda: ["hc_pre_fused_cpu", "hash_topk_cpu"])
    with pytest.raises(BackendUnavailable, match=r"lacks compiled kernels.*hc_pre_fused_cpu.*reference_kernels=True"):
        load_model(pair.published, backend="vllm", **{**plain, "dtype": "bfloat16"}).warmup()
    with pytest.raises(BackendUnavailable, match="vllm-static"):
        load_model(pair.published, backend="vllm-static", dtype="float32").warmup()
    for ranks in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with pytest.raises(BackendUnavailable, match="one rank only"):
            load_model(pair.published, backend="vllm", **OPTIONS, **ranks).warmup()
    other = Path(shutil.copytree(pair.published, tmp_path / "other"))
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**values, "index_topk": 3}))
    with pytest.raises(BackendUnavailable, match="index_topk=3, not 512"):
        load_model(other, backend="vllm", **OPTIONS).warmup()
    assert inspect_model(pair.saved, backend="vllm").facts == inspect_model(pair.published, backend="eager").facts


def test_plain_generation(pair: Pair) -> None:
    with load_model(pair.published, backend="vllm-generate", **OPTIONS) as model:
        found = [c.token_ids for c in model.generate(PROMPTS, max_tokens=8, ignore_eos=True)]
    assert found == [c.token_ids for c in pair.eager.generate(PROMPTS, max_tokens=8, ignore_eos=True)]


def test_a_tokenizer_of_eager_is_read_after_vllm_began(pair: Pair, tmp_path: Path) -> None:
    """vLLM puts its own configuration class in the place of transformers', which refuses this configuration."""
    saved = Path(shutil.copytree(pair.saved, tmp_path / "saved"))
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(saved)
    with load_model(saved, backend="eager", dtype="float32") as model:
        assert model.to_tokens("a b a").tolist() == [[0, 1, 0]]  # type: ignore[union-attr]
        assert model.generate([5, 6, 7], max_tokens=2).text is not None


ORDER = """
import sys, torch
from interp_core import load_model, run_with_cache
saved, published = sys.argv[1:]
ids, rows = list(range(5, 60)), []
options = {"max_model_len": 256, "reference_kernels": True}
for path, backend, extra in ((saved, "eager", {}), (published, "vllm", options), (saved, "eager", {})):
    with load_model(path, backend=backend, dtype="float32", **extra) as model:
        rows.append(run_with_cache(model, ids, ["resid_streams.3"])["resid_streams.3"])
assert torch.equal(rows[0], rows[2])
print(float((rows[0] - rows[1]).abs().max() / rows[0].abs().max()))
"""


def test_eager_before_and_after_vllm_in_one_process(pair: Pair) -> None:
    command = [sys.executable, "-c", ORDER, pair.saved, pair.published]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) < CLOSE
