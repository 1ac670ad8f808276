"""A part of the run over all architectures, in every run of the tests: one of each shape of block.

``make conformance`` does the others, and writes the page that is compared with here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.page import current, parse
from zoo.prove import prove

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"

PROVEN = (
    "llama",
    "gpt2",  # learned positions, layer norms, fused projections
    "gemma2",  # sandwich norms, softcaps, scale inside the embedding
    "granite",  # multipliers everywhere
    "falcon",  # parallel, one key, in-place sums
    "olmo2",  # norms behind the sublayers, over all heads
    "opt",  # no MLP module
    "bloom",  # modules that return the residual too
    "bert",  # norms on the sums
    "qwen3_moe",  # experts, and a dense layer
    "gpt_oss",  # sinks
    "deepseek_v3",  # latent attention, shared experts
    "qwen3_next",  # linear and gated attention
    "mamba",  # one sublayer, no attention
    "falcon_h1",  # two mixers side by side
    "nemotron_h",  # one sublayer of four kinds
    "hy_v4",  # several streams
    "deepseek_v4",  # streams, sinks, compressed entries, keys that are the values
    "gemma3n_text",  # streams that are updated once per block
    "mm:llava",  # a wrapper
    "mm:qwen2_audio",  # a wrapper that is no causal class
    "mm:qwen2_5_omni_thinker",  # positions of a generation kept in a module
    "mm:paligemma",  # attention in both directions
)
OTHERS = {
    "mm:blip-2": "refused",  # no forward without an image
    "mm:t5gemma2": "refused",  # an encoder-decoder
    "gemma4_assistant": "not built",
}


@pytest.mark.parametrize("name", [*PROVEN, *OTHERS])
def test_an_architecture_is_what_the_page_says(name: str) -> None:
    found = prove(name)
    assert (found.problems, found.kind) == ((), OTHERS.get(name, "proven")), found.doubts
    assert not current(PAGE.read_text(encoding="utf-8"), [found]), "make conformance, or --write this name"


def test_the_page_keeps_the_promise() -> None:
    found = parse(PAGE.read_text(encoding="utf-8")).values()
    assert sum(outcome.whole for outcome in found) >= 150
    assert not {"failed", "error", "not proven"} & {outcome.kind for outcome in found}
