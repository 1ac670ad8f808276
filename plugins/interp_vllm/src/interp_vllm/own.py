"""The hooked backend on an engine that somebody else built: an ``AsyncLLM`` of a server, or ``vllm serve``."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from interp_core.errors import BackendUnavailable
from interp_core.loading import inspect_model
from interp_core.requests import ForwardRequest
from interp_core.steering import as_steering, writes_for
from interp_vllm.arguments import EXTENSION

if TYPE_CHECKING:
    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile

__all__ = ["attach", "engine_options", "steering_body"]


def engine_options() -> dict[str, Any]:
    """What an engine has to be built with: keyword arguments of vLLM's ``AsyncEngineArgs`` or ``LLM``.

    On a command line: ``vllm serve MODEL --enforce-eager --worker-extension-cls
    interp_vllm.worker.ext.WorkerExtension``. Nothing changes in the engine until a request asks for it.
    """
    return {"worker_extension_cls": EXTENSION, "enforce_eager": True}


async def attach(llm: Any) -> InterpModel:
    """A model on a running ``AsyncLLM``; to be awaited on the loop that the engine runs on.

    Use ``model.aio`` on that loop, and the plain methods from other threads. Shutting the model down leaves the
    engine running.

    Args:
        llm: the engine, built with :func:`engine_options`.

    Raises:
        BackendUnavailable: the engine was built without them, or runs a model that the tables do not know.
    """
    from interp_core.model import InterpModel
    from interp_vllm.adapters import adapter
    from interp_vllm.backend import VllmBackend
    from interp_vllm.ends import end_tokens
    from interp_vllm.engine import Engine

    names: Any = adapter()
    found = names.model_of_engine(llm)
    if found.pop("extension") != EXTENSION or not found.pop("hooks"):
        raise BackendUnavailable(
            "this engine was built without interp_vllm.engine_options(), so its workers cannot be reached: "
            f"build it with {engine_options()}"
        )
    profile = inspect_model(found.pop("model"), "vllm", **found)
    engine = Engine(profile.model_id, {}, end_tokens(profile), llm=llm, loop=asyncio.get_running_loop())
    await engine.start()
    model = InterpModel(profile)
    model.session.adopt(VllmBackend(profile, profile.options, engine))
    return model


def steering_body(profile: ModelProfile, token_ids: Sequence[int], operations: Any, **where: Any) -> dict[str, Any]:
    """Fields of a completion request over HTTP that steer it: ``extra_body`` of an OpenAI client.

    Args:
        profile: of the served model (``inspect_model(..., backend="vllm")``).
        token_ids: the prompt's own ids, as the server will have them.
        operations: one or more operations.
        **where: ``positions``, ``prompt``, ``generated``, as :func:`interp_core.steer` takes them.

    Raises:
        AddressError, CapabilityUnsupported, RequestError: as :func:`interp_core.steer`.
    """
    from interp_vllm.wire import encode_request

    steering = as_steering(profile, operations, **where)
    request = ForwardRequest(token_ids=tuple(token_ids), writes=writes_for([steering], len(token_ids)))
    name = uuid.uuid4().hex
    data = encode_request(name, request, fetched=False)
    # A salt of its own: what a steered request computes must never serve one that is not steered.
    return {"vllm_xargs": {"interp": base64.b64encode(data).decode()}, "cache_salt": name}
