"""Hooks on modules for the time of one forward: install, work, remove, also after an exception."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from interp_core.errors import InterpError
from interp_eager.program import Program, Site, SiteKey
from interp_eager.taps import Taps

__all__ = ["StopForward", "installed"]


class StopForward(Exception):
    """Raised in a hook once everything that was wanted has been read."""


@contextmanager
def installed(taps: Taps, *, stop: bool = False) -> Iterator[None]:
    """Hooks of ``taps`` on the model inside the block; with ``stop``, the forward ends at the last one needed.

    Raises:
        RequestError: an operation failed inside the forward.
        InterpError: a hook did not fire, as in a compiled forward.
    """
    fired: set[SiteKey] = set()
    stopped = False
    handles = [_hook(site, taps, fired) for site in taps.program.sites.values()]
    if stop:
        handles.append(_stop_hook(taps.program))
    try:
        yield
    except StopForward:
        stopped = True
    finally:
        for handle in handles:
            handle.remove()
    # Writes behind the last block that anyone reads were passed over on purpose: they cannot change what was read.
    due = [site for site in taps.program.sites.values() if site.reads or site.sums or not stopped]
    silent = [site.leaf.role for site in due if site.key not in fired]
    if silent:
        raise InterpError(
            f"hooks on {', '.join(sorted(set(silent)))} never fired: the forward is compiled or skips these modules. "
            "Load the model without torch.compile"
        )


def _hook(site: Site, taps: Taps, fired: set[SiteKey]) -> Any:
    keep = taps.keeper(site)
    return _working_hook(site, taps, fired) if keep is None else _keeping_hook(site, keep, fired)


def _keeping_hook(site: Site, keep: Callable[[Tensor], None], fired: set[SiteKey]) -> Any:
    slot, key, thread = site.leaf.slot, site.key, get_ident()

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if get_ident() != thread:
            return
        fired.add(key)
        keep(_argument(module, slot, args, kwargs)[1])

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() != thread:
            return
        fired.add(key)
        keep(output if isinstance(output, Tensor) else output[slot])

    if site.leaf.side == "input":
        return site.module.register_forward_pre_hook(before, with_kwargs=True)
    return site.module.register_forward_hook(after)


def _working_hook(site: Site, taps: Taps, fired: set[SiteKey]) -> Any:
    calls, thread = count(), get_ident()

    def passes() -> bool:
        """Whether this call of the module is not the one that is meant; another thread's forward never is."""
        if get_ident() != thread:
            return True
        if site.leaf.call not in (None, next(calls)):
            return True
        fired.add(site.key)
        return False

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if passes():
            return None
        name, raw = _argument(module, site.leaf.slot, args, kwargs)
        new = taps.visit(site, raw)
        if new is None:
            return None
        if isinstance(name, int):
            return (*args[:name], new, *args[name + 1 :]), kwargs
        return args, {**kwargs, name: new}

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if passes():
            return None
        slot = site.leaf.slot
        raw = output if isinstance(output, Tensor) else output[slot]
        new = taps.visit(site, raw)
        if new is None or isinstance(output, Tensor):
            return new
        return type(output)((*output[:slot], new, *output[slot + 1 :]))

    if site.leaf.side == "input":
        return site.module.register_forward_pre_hook(before, with_kwargs=True)
    return site.module.register_forward_hook(after)


def _argument(module: nn.Module, slot: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | str, Tensor]:
    """A module's input: a positional argument, or the keyword that transformers uses for it."""
    if slot < len(args) and isinstance(args[slot], Tensor):
        return slot, args[slot]
    if slot > 0:
        # Any tensor will not do: behind the first argument, only the signature says which one is meant.
        name = list(inspect.signature(module.forward).parameters)[slot]
        return name, kwargs[name]
    if "hidden_states" in kwargs:
        return "hidden_states", kwargs["hidden_states"]
    for name, value in kwargs.items():
        if torch.is_tensor(value):
            return name, value
    raise InterpError("a module was called without a tensor where one was expected")


def _stop_hook(program: Program) -> Any:
    last, thread = max(program.last_layer, 0), get_ident()

    def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if get_ident() == thread:
            raise StopForward

    return program.layout.module("block", last).register_forward_hook(end)
