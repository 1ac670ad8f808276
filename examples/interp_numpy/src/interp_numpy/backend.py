"""The backend object: validated requests in, rows and steps out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp_core import BackendUnavailable, ModelProfile, RequestError
from interp_core.configuration import read_configuration
from interp_core.requests import ForwardRequest, ForwardResult
from interp_numpy.decoder import Decoder
from interp_numpy.generation import NumpyRun
from interp_numpy.rows import Rows
from interp_numpy.shape import why_not
from interp_numpy.weights import read_ends, read_weights, rotary_frequencies

__all__ = ["NumpyBackend"]


class NumpyBackend:
    """Executes validated requests, one after another. See :class:`interp_core.backend.Backend`."""

    def __init__(self, profile: ModelProfile, options: Mapping[str, Any]) -> None:
        reason = why_not(profile.facts)
        if reason:
            raise BackendUnavailable(f"{profile.model_id}: {reason}; use backend='eager'")
        if options["dtype"] not in ("auto", "float32"):
            raise RequestError(
                f"dtype={options['dtype']!r}: this backend computes in float32, whatever the checkpoint's dtype; "
                "leave dtype out, or use backend='eager'"
            )
        if options["device"] not in (None, "cpu"):
            raise BackendUnavailable(f"device {options['device']!r}: NumPy runs on the CPU only; use backend='eager'")
        self.profile = profile
        self._trusted = options["trust_remote_code"]
        self._decoder: Decoder | None = None
        self._ends: frozenset[int] = frozenset()

    def warmup(self) -> None:
        """Read the weights."""
        profile, folder = self.profile, Path(self.profile.model_id).expanduser()
        config = read_configuration(profile.model_id, trust_remote_code=self._trusted)
        frequencies = rotary_frequencies(config, profile.facts.head_dim)
        self._ends = read_ends(folder, profile.facts)
        self._decoder = Decoder(profile.facts, read_weights(folder, profile.facts), frequencies)

    def shutdown(self) -> None:
        """Drop the weights."""
        self._decoder = None

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        """One forward per request, no deeper than what it reads."""
        return [self._forward(request) for request in requests]

    def generate(self, request: ForwardRequest) -> NumpyRun:
        """Begin a generation."""
        sampling = request.sampling
        if sampling is None:
            raise ValueError("a generation needs sampling")
        ends = self._ends if sampling.stop_token_ids is None else sampling.stop_token_ids
        return NumpyRun(self._ready, self.profile, request, sampling, ends)

    def unembed(self, rows: Tensor, *, raw: bool) -> Tensor:
        """Logits of residual rows. A Llama's are raw: it has no softcap and no multiplier."""
        decoder, given = self._ready(), rows.detach().to("cpu", torch.float32).numpy()
        return torch.from_numpy(decoder.unembed(decoder.normed(given, lambda *_: None, logits=False)))

    def _forward(self, request: ForwardRequest) -> ForwardResult:
        decoder, rows = self._ready(), Rows(self.profile, request)
        x = decoder.blocks(request.token_ids, {}, rows, rows.depth)
        if rows.names & {"final_norm", "lm_head"}:
            decoder.normed(x, rows, logits="lm_head" in rows.names)
        return rows.result()

    def _ready(self) -> Decoder:
        if self._decoder is None:
            raise BackendUnavailable("this model was shut down; load it again")
        return self._decoder
