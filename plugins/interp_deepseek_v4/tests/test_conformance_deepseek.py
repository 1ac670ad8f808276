"""The trunks of this package under the conformance kit, as any author's, on eager.

What the kit proves of them by captured rows and writes, the tests of streams beside this file compare with the
modules' own weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from trunks import LAYER_TYPES, save

from interp_core import Cache
from interp_core.testing import ArchitectureConformance, Check, difference


def turned(rows: torch.Tensor, base: float) -> torch.Tensor:
    """``[pos, heads, head_dim]`` with each pair of the last 8 channels turned by the angle of its position."""
    angles = torch.arange(rows.shape[0])[:, None, None] * base ** (-torch.arange(0, 8, 2) / 8)
    pairs = torch.view_as_complex(rows[..., -8:].unflatten(-1, (4, 2)).contiguous())
    spun = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([rows[..., :-8], spun], dim=-1)


class TestDeepSeekV4(ArchitectureConformance):
    architecture = "deepseek-v4"
    backends = ("eager",)

    def checkpoint(self, folder: Path) -> str:
        return save("deepseek_v4", folder)

    def identities(self, cache: Cache) -> Iterator[Check]:
        """The value is the normed key, rotated: at one speed in sliding layers, at another where there are entries."""
        for layer, kind in enumerate(LAYER_TYPES):
            key, value = cache[f"k_norm_out.{layer}"][0], cache[f"value.{layer}"][0]
            bases = (10000.0, 160000.0) if kind == "sliding_attention" else (160000.0, 10000.0)
            yield Check(
                identity="k_norm_out, rotated, is value",
                layer=layer,
                proves=("value", "k_norm_out"),
                error=difference(turned(key, bases[0]), value),
                control=difference(turned(key, bases[1]), value),
                tolerance=2e-5,
            )


class TestGlm(ArchitectureConformance):
    architecture = "glm5-next"
    backends = ("eager",)

    def checkpoint(self, folder: Path) -> str:
        return save("glm5_next", folder)


class TestHy(ArchitectureConformance):
    architecture = "hy-v4"
    backends = ("eager",)

    def checkpoint(self, folder: Path) -> str:
        return save("hy_v4", folder)


class TestQwen(ArchitectureConformance):
    """One of its layers adds an embedding to the streams before its attention."""

    architecture = "qwen4-exp"
    backends = ("eager",)

    def checkpoint(self, folder: Path) -> str:
        return save("qwen4_exp_text", folder)


class TestGemma3n(ArchitectureConformance):
    """Its streams are updated once per block, by what comes of both sublayers."""

    architecture = "gemma3n"
    backends = ("eager",)

    def checkpoint(self, folder: Path) -> str:
        return save("gemma3n_text", folder)
