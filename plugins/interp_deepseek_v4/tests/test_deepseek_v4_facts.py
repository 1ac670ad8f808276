"""What is answered of DeepSeek-V4 from its configuration, in both of its forms; and who knows of it at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trunks import LAYER_TYPES, PROMPT, RATES, WINDOW, small_config

from interp_core import inspect_model

LAYERS = range(4)


def write_config(folder: Path, values: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def test_facts_of_both_forms_of_a_configuration(tmp_path: Path) -> None:
    own = json.loads(small_config(compress_rates=None).to_json_string(use_diff=False))
    assert own["compress_rates"] == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    own["architectures"] = ["DeepseekV4ForCausalLM"]
    published = dict(own)
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor"):
        published.pop(key, None)
    published |= {"compress_ratios": [0, 4, 128, 4], "num_hash_layers": 1, "qk_rope_head_dim": 8}
    published |= {"compress_rope_theta": 160000.0, "topk_method": "noaux_tc"}
    facts = [
        inspect_model(write_config(tmp_path / name, values), backend="eager").facts
        for name, values in (("own", own), ("published", published))
    ]
    assert facts[0] == facts[1]
    assert dict(facts[0].extra) == dict(facts[1].extra)
    assert [layer.mixer for layer in facts[1].layers] == LAYER_TYPES
    assert [layer.compress_rate for layer in facts[1].layers] == [None, 4, 128, 4]
    other = inspect_model(write_config(tmp_path / "other", {**published, "num_hash_layers": 2}), backend="eager").facts
    assert dict(other.extra) != dict(facts[0].extra)


def test_the_description(deepseek: Any) -> None:
    record = inspect_model(deepseek.path, backend="eager").describe()
    json.dumps(record)
    assert record["architecture"] == "deepseek-v4"
    assert record["architecture_owner"] == "interp-deepseek-v4"
    facts = record["facts"]
    assert facts["n_streams"] == record["residual_basis"]["n_streams"] == 4
    assert facts["structure_known"]
    assert facts["sinks"]
    assert facts["qk_norm"] == "head"
    assert facts["extra"]["hash_routed_layers"] == [0]
    layers = facts["layers"]
    assert [layer["mixer"] for layer in layers] == LAYER_TYPES
    assert [layer["window"] for layer in layers] == [WINDOW] * 4
    assert [layer["compress_rate"] for layer in layers] == RATES
    assert [(layer["n_heads"], layer["n_kv_heads"], layer["head_dim"], layer["v_head_dim"]) for layer in layers] == [
        (4, 1, 32, 32)
    ] * 4
    assert [(layer["mlp"], layer["n_experts"], layer["top_k"], layer["n_shared_experts"]) for layer in layers] == [
        ("sparse", 4, 2, 1)
    ] * 4
    points = {point["name"]: point for point in record["points"]}
    assert points["resid_streams"]["axes"] == ["streams", "d_model"]
    assert points["resid_streams"]["owner"] == "interp-deepseek-v4"
    assert points["resid_post"]["axes"] == ["streams", "d_model"]
    assert set(points["attn_out_post"]["absent"]) == {"all"}
    assert record["capabilities"]["logit_lens"]["supported"] is False


def test_verify_finds_nothing_wrong(deepseek: Any) -> None:
    found = deepseek.model.verify(PROMPT)
    assert found.ok, found.failed()
    assert {check.layer for check in found.checks if "attn_probs" in check.proves} == set(LAYERS)


def test_what_is_only_read_says_so(deepseek: Any) -> None:
    for point in ("value", "attn_scores", "attn_probs", "router_logits", "expert_indices"):
        assert deepseek.model.refusal(f"{point}.1") is None
        refused = deepseek.model.refusal(f"{point}.1", write=True)
        assert refused is not None
        assert refused.why.strip()
        assert refused.instead.strip()
    for point in ("q_norm_in", "q_norm_out", "k_norm_in", "k_norm_out", "z", "expert_weights"):
        assert deepseek.model.refusal(f"{point}.1", write=True) is None


# Who knows of it.

ROOT = Path(__file__).parents[3]
LAYERED = ("interp_core", "plugins/interp_eager/src", "plugins/interp_vllm/src")


def sources(part: str) -> Iterator[Path]:
    for file in (ROOT / part).rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            yield file


@pytest.mark.parametrize("part", LAYERED)
def test_neither_the_core_nor_a_backend_names_this_trunk(part: str) -> None:
    names = (b"deepseek_v4", b"deepseek-v4", b"deepseekv4")
    found = list(sources(part))
    assert len(found) > 3
    assert [str(f) for f in found if any(name in f.read_bytes().lower() for name in names)] == []
    own = list(sources("plugins/interp_deepseek_v4/src"))
    assert any(names[0] in f.read_bytes().lower() for f in own)
