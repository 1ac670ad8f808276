"""The vLLM backends: validated requests to an engine, and rows back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from interp_core.checkpoint import require_weights
from interp_core.errors import RequestError
from interp_core.profile import ModelProfile
from interp_core.requests import ForwardRequest, ForwardResult
from interp_vllm.arguments import engine_arguments
from interp_vllm.ends import end_tokens
from interp_vllm.engine import Engine
from interp_vllm.proof import prove

if TYPE_CHECKING:
    from torch import Tensor

    from interp_vllm.run import VllmRun

__all__ = ["VllmBackend", "make_engine"]


def make_engine(profile: ModelProfile, options: Mapping[str, Any]) -> VllmBackend:
    """The backend object of a profile.

    Raises:
        BackendUnavailable: vLLM cannot run the model, or the declared taps do not fit.
    """
    return VllmBackend(profile, options)


class VllmBackend:
    """Executes validated requests on a vLLM engine. See :class:`interp_core.backend.Backend`."""

    def __init__(self, profile: ModelProfile, options: Mapping[str, Any], engine: Engine | None = None) -> None:
        self.profile = profile
        require_weights(profile.model_id)
        self.engine = engine or Engine(profile.model_id, engine_arguments(profile, options), end_tokens(profile))

    def warmup(self) -> None:
        """Start the engine's processes and load the weights; prove the taps of a compiled forward."""
        self.engine.wait(self.engine.start())
        if self.profile.spec.static is not None:
            self.engine.wait(prove(self.engine, self.profile))

    def shutdown(self) -> None:
        """End them."""
        self.engine.stop()

    def run(self, requests: Sequence[ForwardRequest]) -> list[ForwardResult]:
        """All requests at once; vLLM batches them as it likes."""
        for request in requests:
            self._check_length(request)
        return self.engine.wait(self.engine.run(requests))

    def generate(self, request: ForwardRequest) -> VllmRun:
        """Begin a generation, which runs beside whatever else runs."""
        from interp_vllm.run import VllmRun

        self._check_length(request)
        return VllmRun(self.engine, request)

    def unembed(self, rows: Any, *, raw: bool) -> Tensor:
        """Logits of residual rows, with the family's softcap and multiplier."""
        if raw:
            self.profile.require("raw_logits")
        return self.engine.wait(self.engine.unembed(rows, 0))["logits"].to(rows.dtype)

    def top_tokens(self, rows: Any, count: int) -> tuple[Any, Any]:
        """Most likely tokens of residual rows; the vocabulary stays in the worker."""
        found = self.engine.wait(self.engine.unembed(rows, count))
        return found["ids"], found["probs"]

    def _check_length(self, request: ForwardRequest) -> None:
        new = request.sampling.max_tokens if request.sampling else 1
        limit, prompt = self.engine.max_length, len(request.token_ids)
        if prompt + new > limit:
            wanted = f"{new} new ones" if request.sampling else "the one that vLLM always samples"
            raise RequestError(
                f"{prompt} tokens and {wanted} are more than this engine's max_model_len of {limit}; "
                "load_model(..., max_model_len=...) sets it"
            )
