"""A trunk that a distribution of its own describes: before it is installed, with it, and after it is uninstalled.

Wheels, in an environment whose only other packages are what the backends require; nothing of this checkout is in it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.packaging.environment import Environment, Wheels

TRUNK = "interp-deepseek-v4"

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 64,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "hc_mult": 4,
    "num_nextn_predict_layers": 0,
    "layer_types": ["sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["hash_moe", "moe"],
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

ASK = """
import json, sys
from interp_core import CapabilityUnsupported, InterpError, inspect_model, load_model, run_with_cache
path = sys.argv[1]
profile = inspect_model(path, backend="eager")
found = {
    "streams": profile.facts.n_streams,
    "layers": profile.facts.n_layers,
    "own": sorted(p.name for p in profile.points() if "_stream" in p.name),
    "owner": profile.architecture.owner if profile.architecture else None,
    "refusals": {},
}
for address in ("resid_post.1", "resid_post.1.stream-2"):
    try:
        run_with_cache(load_model(path, backend="eager"), [1, 2, 3], [address])
    except InterpError as error:
        found["refusals"][address] = [type(error).__name__, str(error)]
if "resid_streams" in found["own"]:
    shape = run_with_cache(load_model(path, backend="eager"), [1, 2, 3], ["resid_streams.1"])["resid_streams.1"].shape
    found["shape"] = list(shape)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with weights."""
    import torch
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    values = {k: v for k, v in CONFIG.items() if k not in ("architectures", "model_type")}
    DeepseekV4ForCausalLM(DeepseekV4Config(**values)).save_pretrained(folder)
    return folder


def test_it_comes_and_goes(wheels: Wheels, checkpoint: Path, tmp_path: Path) -> None:
    here = Environment(tmp_path)
    here.install(wheels["interp-core"])
    here.install(wheels["interp-eager"])

    def ask() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(here.run("-c", ASK, str(checkpoint)))
        return found

    before = ask()
    assert (before["streams"], before["layers"], before["own"], before["owner"]) == (4, 2, [], None)
    for address, (kind, said) in before["refusals"].items():
        assert kind in ("CapabilityUnsupported", "AddressError"), (address, said)
    assert f"pip install {TRUNK}" in before["refusals"]["resid_post.1"][1]

    here.install(wheels[TRUNK])
    during = ask()
    assert during["owner"] == TRUNK
    assert len(during["own"]) == 7
    assert during["shape"] == [1, 3, 4, 32]
    assert list(during["refusals"]) == ["resid_post.1"]
    assert "stream" in during["refusals"]["resid_post.1"][1]
    assert "deepseek_v4" in here.run("-m", "interp_core.cli", "plugins")

    here.uninstall(TRUNK)
    assert ask() == before
    assert "deepseek_v4" not in here.run("-m", "interp_core.cli", "plugins")
