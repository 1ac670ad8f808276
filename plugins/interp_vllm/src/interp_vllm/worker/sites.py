"""Hooks at module boundaries, there while some request has work at them, and the work itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import define, field
from torch import Tensor, nn

from interp_core.arithmetic import apply_operation
from interp_core.expressions import Expression, Place, Read, derives, leaves, read_value, write_value
from interp_core.requests import narrowed
from interp_core.selection import select
from interp_vllm.worker.frame import Frame, parameter_names
from interp_vllm.worker.rows import Span, kept_copy
from interp_vllm.worker.shards import Shard
from interp_vllm.worker.state import AttentionRows, ReadJob, RequestState, SiteKey, Work, WriteJob
from interp_vllm.worker.sums import halves_of, rewritten

__all__ = ["Site", "Sites"]


@define(eq=False)
class Site:
    """One side of one module. Its hook is installed while ``users`` is not empty."""

    key: SiteKey
    module: nn.Module
    names: tuple[str, ...]
    shard: Shard | None = None
    users: set[str] = field(factory=set)
    remove: Callable[[], None] | None = None


@define(eq=False)
class Sites:
    """All sites with work, and the step that runs.

    Attributes:
        spans: rows of the running step per request; empty between steps and in runs that serve no request.
        tokens: rows of the running step, padding included.
    """

    states: Mapping[str, RequestState]
    key_of: Callable[[Read, int | None], SiteKey]
    place: Callable[[int | None, Tensor], Place]
    spans: list[Span] = field(factory=list)
    tokens: int = 0
    _sites: dict[SiteKey, Site] = field(factory=dict)

    def __len__(self) -> int:
        return len(self._sites)

    def use(self, key: SiteKey, module: nn.Module, shard: Shard | None, user: str) -> None:
        """A request has work at a site."""
        site = self._sites.get(key)
        if site is None:
            site = self._sites[key] = Site(key, module, parameter_names(module), shard)
            site.remove = self._install(site)
        site.users.add(user)

    def leave(self, keys: Iterable[SiteKey], user: str) -> None:
        """A request is over: hooks that nobody else needs are removed."""
        for key in keys:
            site = self._sites.get(key)
            if site is None:
                continue
            site.users.discard(user)
            if not site.users:
                del self._sites[key]
                if site.remove is not None:
                    site.remove()

    def visit(self, site: Site, frame: Frame) -> None:
        """Each request's work on its own rows; what fails, fails for that request alone."""
        for span in self.spans:
            state = self.states.get(span.request)
            work = None if state is None else state.work.get(site.key)
            if state is None or work is None or state.error is not None:
                continue
            try:
                self._serve(site, state, work, frame, span)
            except Exception as error:  # noqa: BLE001  An operation or a shape of any kind: the step of the others goes on.
                state.error = f"{type(error).__name__}: {error}"

    def _install(self, site: Site) -> Callable[[], None]:
        if site.key[1] == "call":
            return self._install_on_call(site)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.spans:
                return None
            frame = Frame(self.tokens, "input", site.shard, names=site.names, args=args, kwargs=kwargs)
            self.visit(site, frame)
            return frame.arguments()

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            if not self.spans:
                return None
            frame = Frame(self.tokens, "output", site.shard, output=output)
            self.visit(site, frame)
            return frame.result()

        if site.key[1] == "input":
            return site.module.register_forward_pre_hook(before, with_kwargs=True).remove
        return site.module.register_forward_hook(after).remove

    def _install_on_call(self, site: Site) -> Callable[[], None]:
        """vLLM's attention layer is called by its ``forward``, past any hook, inside transformers' tree."""
        module: Any = site.module
        plain = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.spans:
                self.visit(site, Frame(self.tokens, "input", None, names=site.names, args=args, kwargs=kwargs))
            return plain(*args, **kwargs)

        module.forward = forward

        def remove() -> None:
            del module.forward

        return remove

    def _serve(self, site: Site, state: RequestState, work: Work, frame: Frame, span: Span) -> None:
        def value(leaf: Read) -> Tensor:
            key = self.key_of(leaf, work.layer)
            if key == site.key:
                return frame.rows(leaf, span.start, span.stop)
            return state.kept[key, leaf.slot]

        if work.attention is not None:
            _keep_attention(work.attention, frame, span)
            return
        for job in work.direct:
            _write(state, job, frame, span, value)
        for leaf in work.kept:
            state.kept[site.key, leaf.slot] = value(leaf).clone()
        for read in work.reads:
            _read(read, span, value, self.place)
        for job in work.carried:
            _write(state, job, frame, span, value)


def _read(
    job: ReadJob, span: Span, value: Callable[[Read], Tensor], place: Callable[[int | None, Tensor], Place]
) -> None:
    chosen = job.store.chosen(span.position, span.length)
    if chosen == []:
        return
    at = None
    if derives(job.expression):
        device = value(next(leaves(job.expression))).device
        at = place(job.address.layer, torch.arange(span.position, span.position + span.length, device=device))
    rows = select(read_value(job.expression, value, at), job.axes, job.coordinates)
    job.store.add(span.position, span.length, kept_copy(rows, chosen))


def _write(state: RequestState, job: WriteJob, frame: Frame, span: Span, value: Callable[[Read], Tensor]) -> None:
    old: Tensor | None = None
    new: Tensor | None = None
    for write, coordinates in job.items:
        where, operation = narrowed(write, span.position, span.length, state.request.prompt_length)
        if not where:
            continue
        if old is None or new is None:
            old = read_value(job.expression, value)
            new = old.clone()
        target = select(new, job.axes, coordinates)
        rows = target[where]
        out = apply_operation(operation, rows.reshape(rows.shape[0], -1))
        target[where] = out.to(rows.dtype).reshape(rows.shape)
    if old is None or new is None:
        return
    halves = halves_of(job.expression)
    if halves is None:
        frame.put(_last(job.expression), span.start, span.stop, write_value(job.expression, value, old, new))
        return
    first, second = halves
    for leaf, rows in zip(halves, rewritten(value(first), value(second), old, new), strict=True):
        frame.put(leaf, span.start, span.stop, rows)


def _last(expression: Expression) -> Read:
    *_, last = leaves(expression)
    return last


def _keep_attention(attention: AttentionRows, frame: Frame, span: Span) -> None:
    for slot, store, shard in (
        (0, attention.queries, attention.query_shard),
        (1, attention.keys, attention.key_shard),
    ):
        rows = frame.rows(Read("attn.kernel", "input", slot=slot), span.start, span.stop)
        rows = rows if shard is None else shard.gather(rows)
        chosen = store.chosen(span.position, span.length)
        if chosen != []:
            store.add(span.position, span.length, kept_copy(rows, chosen))
