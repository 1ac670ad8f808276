"""Import one plugin, check it, call its hooks one by one, and check what they return.

Everything here is about one plugin at a time, and nothing it does outlives a failure: what a plugin
described before it failed is kept only as names, for messages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import pluggy
from attrs import define, evolve

from interp_core.architecture import Architecture
from interp_core.backend import BackendSpec
from interp_core.capabilities import Capability
from interp_core.discovery import GROUP, one_line
from interp_core.errors import InterpError, unknown_name
from interp_core.hookspecs import PROJECT, InterpHooks
from interp_core.validation import check_architecture, check_backend, check_capability, check_point_meanings

__all__ = ["CONTAINED", "Collected", "InvalidPlugin", "collect", "import_plugin"]

_Record = TypeVar("_Record", BackendSpec, Architecture, Capability)

CONTAINED: Final = (Exception, SystemExit)
"""What a plugin may raise without taking anything else down. Ctrl-C is the user's, and passes."""


class InvalidPlugin(InterpError, TypeError):
    """A plugin, or a record of one, that is not what the hooks ask for."""


@define
class Collected:
    """What one plugin described, up to the point where it failed, if it did."""

    backends: tuple[BackendSpec, ...] = ()
    architectures: tuple[Architecture, ...] = ()
    capabilities: tuple[Capability, ...] = ()
    error: BaseException | None = None
    reason: str = ""

    def fail(self, what: str, error: BaseException) -> Collected:
        """The same, failed: ``what`` says what was being done."""
        self.error = error
        self.reason = str(error) if isinstance(error, InvalidPlugin) else f"{what} raised {one_line(error)}"
        self.reason = self.reason.rstrip(".") + "."
        return self


def import_plugin(name: str, value: str) -> Any:
    """The object that an entry point names."""
    from importlib_metadata import EntryPoint

    return EntryPoint(name=name, value=value, group=GROUP).load()


def collect(plugin: Any, name: str, owner: str) -> Collected:
    """Call each hook of ``plugin`` once, and keep what it describes with its owner filled in."""
    found = Collected()
    doing = "Registering it"
    try:
        implementations = _implementations(plugin, name)
        for hook, keep in _KEEPERS.items():
            doing = f"Its hook {hook}"
            records: list[Any] = []
            for function in implementations[hook]:
                records += _as_list(hook, function())
            keep(found, records, owner)
    except CONTAINED as error:
        return found.fail(doing, error)
    return found


def _implementations(plugin: Any, name: str) -> dict[str, list[Callable[[], Any]]]:
    """The functions that implement each hook.

    Raises:
        InvalidPlugin: it is no plugin, or one that pluggy would accept and then never call.
        pluggy.PluginValidationError: a hook takes arguments that its specification does not have.
    """
    if inspect.isclass(plugin):
        raise InvalidPlugin(f"It is the class {plugin.__qualname__}; name an instance of it in the entry point")
    # One manager for each plugin. Two that compare equal are both taken, a failed one leaves nothing
    # behind, and no implementation is ever called because of another plugin.
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(InterpHooks)
    manager.register(plugin, name=name)
    callers = [caller for caller in vars(manager.hook).values() if isinstance(caller, pluggy.HookCaller)]
    found: dict[str, list[Callable[[], Any]]] = {hook: [] for hook in HOOKS}
    marked = 0
    for caller in callers:
        for implementation in caller.get_hookimpls():
            marked += 1
            if implementation.wrapper or implementation.hookwrapper:
                raise InvalidPlugin(f"Its hook {caller.name} is a wrapper; hooks of {PROJECT} only collect")
            if caller.has_spec():
                found[caller.name].append(implementation.function)
            elif not implementation.optionalhook:
                raise InvalidPlugin(f"It implements an {unknown_name('hook', caller.name, HOOKS)}")
    _reject_unmarked(plugin, found)
    if not marked:
        kind = "module" if inspect.ismodule(plugin) else type(plugin).__name__
        raise InvalidPlugin(
            f"It is no plugin: this {kind} implements no hook; mark functions named {' or '.join(HOOKS)} with @hookimpl"
        )
    return found


def _reject_unmarked(plugin: Any, found: Mapping[str, list[Callable[[], Any]]]) -> None:
    for hook in HOOKS:
        # Looked up without evaluating anything: a lazy attribute might import an engine.
        own = inspect.getattr_static(plugin, hook, None)
        inherited = own is inspect.getattr_static(InterpHooks, hook)
        if own is not None and not inherited and not found[hook]:
            raise InvalidPlugin(f"Its {hook} is not a function marked with @hookimpl, so it would never be called")


def _as_list(hook: str, returned: Any) -> list[Any]:
    if returned is None:
        return []
    if inspect.iscoroutine(returned):
        returned.close()
        raise InvalidPlugin(f"Its hook {hook} is asynchronous; hooks are plain functions")
    if not isinstance(returned, Sequence) or isinstance(returned, (str, bytes)):
        raise InvalidPlugin(f"Its hook {hook} returned {_kind(returned)}; return a list of records")
    return list(returned)


def _keep_backends(found: Collected, records: list[Any], owner: str) -> None:
    found.backends = tuple(spec.owned_by(owner) for spec in _checked(records, BackendSpec, check_backend))


def _keep_architectures(found: Collected, records: list[Any], owner: str) -> None:
    checked = _checked(records, Architecture, check_architecture)
    wrong = check_point_meanings(checked)
    if wrong:
        raise InvalidPlugin(f"Of its architectures, {wrong}")
    found.architectures = tuple(architecture.owned_by(owner) for architecture in checked)


def _keep_capabilities(found: Collected, records: list[Any], owner: str) -> None:
    found.capabilities = tuple(evolve(row, owner=owner) for row in _checked(records, Capability, check_capability))


_KEEPERS: Final = {
    "interp_backends": _keep_backends,
    "interp_architectures": _keep_architectures,
    "interp_capabilities": _keep_capabilities,
}
"""Each hook, in the order of calling, and what is done with its records."""

HOOKS: Final = tuple(_KEEPERS)


def _checked(records: list[Any], expected: type[_Record], check: Callable[[_Record], str | None]) -> list[_Record]:
    seen: set[str] = set()
    for record in records:
        if not isinstance(record, expected):
            raise InvalidPlugin(f"It returned {_kind(record)} where a {expected.__name__} is due")
        wrong = check(record)
        if wrong:
            raise InvalidPlugin(f"Its {expected.__name__} {record.name!r} is not valid: {wrong}")
        if record.name in seen:
            raise InvalidPlugin(f"It describes the {expected.__name__} {record.name!r} twice")
        seen.add(record.name)
    return records


def _kind(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
