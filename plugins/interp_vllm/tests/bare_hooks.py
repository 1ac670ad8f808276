"""A second, bare hook in the worker: nothing of the plugin's bookkeeping, only what a module was given and gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from interp_vllm.payload import write_payload
from interp_vllm.worker.ext import WorkerExtension

__all__ = ["BareHooks"]


class BareHooks(WorkerExtension):
    """Installed by a test, by its name, in place of the plugin's own extension."""

    def bare_install(self, paths: Sequence[str]) -> bool:
        """Keep the last input and output of the modules at ``paths``; tuples are kept whole."""
        worker: Any = self
        model = worker.model_runner.get_model()
        worker._bare = {}
        for path in paths:
            module = model.get_submodule(path)

            def keep(_module: Any, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
                given = [a for a in (*args, *kwargs.values()) if torch.is_tensor(a) and a.is_floating_point()]
                for side, tensors in (("in", given), ("out", output if isinstance(output, tuple) else (output,))):
                    for i, tensor in enumerate(t for t in tensors if torch.is_tensor(t)):
                        worker._bare[f"{path}|{side}|{i}"] = tensor.clone()

            # Before anything of the plugin's own could change what the module gives.
            module.register_forward_hook(keep, with_kwargs=True, prepend=True)
        return True

    def bare_fetch(self) -> list[Any]:
        """What was kept."""
        worker: Any = self
        return write_payload(worker._bare)
