"""The extension that vLLM mixes into its worker: what ``collective_rpc`` may call, and where hooks come from.

vLLM imports this module in the worker, before the model loads, and only where an engine was built with
``worker_extension_cls="interp_vllm.worker.ext.WorkerExtension"``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

from interp_core.errors import BackendUnavailable, InterpError
from interp_vllm.adapters import adapter
from interp_vllm.payload import read_payload, write_payload
from interp_vllm.registration import register
from interp_vllm.trunk import own_trunk
from interp_vllm.wire import EXTRA_ARG
from interp_vllm.worker.tracker import Tracker

__all__ = ["WorkerExtension"]

_TRACKER = "_interp_tracker"
_STATIC, _PLAIN = "vllm-static", "vllm-generate"


class WorkerExtension:
    """Methods are called on every rank; what they return is plain lists and text."""

    def interp_attach(self) -> list[Any]:
        """Find the model's modules, and check vLLM's terms against the facts; ``["ok", class, pid]`` or an error."""
        worker: Any = self
        if _declared(worker.vllm_config)["backend"] == _PLAIN:
            # Built with this extension for what its trunk needed before the model; nothing is read or written.
            return ["ok", "", os.getpid()]
        try:
            tracker = _attach(self)
        except Exception as error:  # noqa: BLE001  Told to the caller, whose engine is then stopped in order.
            return [type(error).__name__, str(error), os.getpid()]
        return ["ok", type(tracker.tree.model).__name__, os.getpid()]

    def interp_collect(self, names: Sequence[str]) -> list[Any]:
        """``[[name, error or "", payload], ...]``; rows travel from the first rank only."""
        tracker = _tracker(self)
        found = []
        for name, rows in tracker.collect(names).items():
            if isinstance(rows, str):
                found.append([name, rows, []])
            elif tracker.rank or not rows:
                found.append([name, "", []])
            else:
                found.append([name, *_written({str(address): tensor for address, tensor in rows.items()})])
        return found

    def interp_drop(self, names: Sequence[str]) -> bool:
        """Forget requests that nobody will ask for."""
        _tracker(self).drop_named(names)
        return True

    def interp_unembed(self, payload: Sequence[Any], top: int) -> list[Any]:
        """``[error, payload]`` of logits, or with ``top`` of the most likely tokens, of residual rows."""
        tracker = _tracker(self)
        try:
            rows = read_payload(payload, keep=True)["rows"]
            return list(_unembedded(tracker, rows, top))
        except Exception as error:  # noqa: BLE001  Out of memory, above all: the caller's own affair, not the engine's.
            return [f"{type(error).__name__}: {error}", []]

    def interp_hooked(self, hooked: bool) -> bool:
        """Serve a compiled model by Python forwards and hooks, or by its graph again."""
        _tracker(self).run_hooked(hooked)
        return True

    def interp_summary(self) -> dict[str, int]:
        """What the worker holds."""
        return {**_tracker(self).summary(), "pid": os.getpid()}


def _attach_when_loaded() -> None:
    """Serve requests from the first one on, also where nobody calls ``interp_attach`` (``vllm serve``)."""

    def prepare(worker: Any) -> None:
        # Not for an engine that somebody else built: what it needs was there before.
        if _ours(worker) and EXTRA_ARG in (worker.vllm_config.additional_config or {}):
            _prepare(worker.vllm_config)

    def attach(worker: Any) -> None:
        declared = _declared(worker.vllm_config)
        if not _ours(worker) or declared["backend"] == _PLAIN:
            return
        if declared["backend"] == _STATIC:
            # Taps are compiled in, or not at all.
            _attach(worker)
            return
        # A model that cannot be served is told to whoever calls interp_attach; plain requests go on.
        with contextlib.suppress(Exception):
            _attach(worker)

    names: Any = adapter()
    names.on_load(prepare, attach)


def _ours(worker: Any) -> bool:
    return bool(worker.vllm_config.parallel_config.worker_extension_cls.startswith(__name__.partition(".")[0]))


def _prepare(config: Any) -> None:
    """What the trunk needs in this process before its model is built."""
    declared, profile = _declared(config), _profile(config)
    register(profile)
    trunk = own_trunk(profile.architecture, declared["backend"], hooks=profile.spec.hooks)
    if trunk is not None:
        trunk.prepare(declared["trunk"])


def _attach(worker: Any) -> Tracker:
    found: Tracker | None = getattr(worker, _TRACKER, None)
    if found is not None:
        return found
    names: Any = adapter()
    if worker.vllm_config.speculative_config is not None:
        raise BackendUnavailable("speculative decoding runs rows that are thrown away again; it is not served yet")
    names.mend_pipeline(worker)
    tracker = Tracker(worker, _profile(worker.vllm_config), names)
    names.on_forward(worker, tracker.around)
    setattr(worker, _TRACKER, tracker)
    return tracker


def _profile(config: Any) -> Any:
    from interp_core.loading import inspect_model

    model = config.model_config
    declared = _declared(config)
    options: dict[str, Any] = {
        "trust_remote_code": bool(model.trust_remote_code),
        "model_impl": str(getattr(model.model_impl, "value", model.model_impl)),
        **declared["trunk"],
    }
    if declared["backend"] == _STATIC:
        options["static_points"], options["static_writes"] = list(declared["points"]), list(declared["writes"])
        options["tensor_parallel_size"] = config.parallel_config.tensor_parallel_size
    return inspect_model(model.model, declared["backend"], **options)


def _declared(config: Any) -> dict[str, Any]:
    """What the engine was built for; an engine of somebody else's, with nothing said, is a hooked one."""
    found: dict[str, Any] | None = (config.additional_config or {}).get(EXTRA_ARG)
    return {"backend": "vllm", "trunk": {}} if found is None else found


def _tracker(worker: Any) -> Tracker:
    tracker: Tracker | None = getattr(worker, _TRACKER, None)
    if tracker is None:
        raise BackendUnavailable("interp_attach was not called on this engine")
    return tracker


def _written(tensors: dict[str, Any]) -> tuple[str, list[Any]]:
    try:
        return "", write_payload(tensors)
    except InterpError as error:
        return str(error), []


def _unembedded(tracker: Tracker, rows: Any, top: int) -> tuple[str, list[Any]]:
    import torch

    model, layout = tracker.tree.model, tracker.tree.layout
    if not tracker.tree.last_stage:
        return "", []
    with tracker.names.no_gradients():
        kind = tracker.worker.model_runner
        hidden = rows.to(device=kind.device, dtype=kind.model_config.dtype)
        if hidden.dim() == 3:
            # A stack of streams, which the model's own contraction makes one row of.
            hidden = tracker.tree.contract(hidden)
        if tracker.profile.facts.final_norm:
            # Its forward, past any tap: these rows belong to no request.
            normed = layout.module("final_norm", None).forward(hidden)
            hidden = normed if isinstance(normed, torch.Tensor) else normed[0]
        logits = tracker.names.finished_logits(model, hidden)
        if logits is None:
            return "", []
        if not top:
            return _written({"logits": logits})
        best = logits.float().softmax(-1).topk(top, dim=-1)
        return _written({"ids": best.indices, "probs": best.values})


_attach_when_loaded()
