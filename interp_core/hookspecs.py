"""The hooks of this framework, all three of them.

Each is *collecting*: every plugin's answers are joined, none is first, none wraps another. They are
called once per process, in the process that asked (an engine's workers are handed what they need and
call no hooks), when :meth:`PluginHost.load` runs, one implementation at a time, so that one plugin's
failure is its own. Hooks return **descriptions**, frozen records; they must not import torch,
transformers or an engine. Give heavy things as ``"package.module:name"`` strings.

A plugin is a module (or an object) named by an entry point of the group ``interp.plugins``::

    [project.entry-points."interp.plugins"]
    my_plugin = "my_package.plugin"

A distribution says which cores it works with by requiring ``interp-core`` in its metadata, for example
``interp-core>=0.1,<0.2``; the host checks that before it imports anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    from interp_core.architecture import Architecture
    from interp_core.backend import BackendSpec
    from interp_core.capabilities import Capability

__all__ = ["PROJECT", "InterpHooks", "hookimpl", "hookspec"]

PROJECT: Final = "interp"
"""pluggy's project name; the entry-point group is ``interp.plugins``."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function of a plugin as the implementation of a hook of the same name."""


class InterpHooks:
    """The specifications. A plugin class may inherit this; what it does not override is not a hook."""

    @hookspec
    def interp_backends(self) -> Sequence[BackendSpec]:
        """Describe the backends that this plugin brings.

        Called once, when plugins are loaded, in the user's process.

        Returns:
            Any number of :class:`~interp_core.backend.BackendSpec`. An empty sequence (or ``None``)
            means that the plugin brings no backend. A name that another distribution already owns is
            a conflict: neither is usable until one is switched off.

        Example::

            from interp_core import BackendSpec, hookimpl
            from interp_core.points import hook

            @hookimpl
            def interp_backends():
                return [BackendSpec(
                    name="numpy",
                    summary="A decoder in plain NumPy.",
                    factory="my_package.engine:NumpyBackend",
                    points={"resid_post": hook(writable=False, why="this engine only reads")},
                    capabilities={"capture"},
                )]
        """
        return ()

    @hookspec
    def interp_architectures(self) -> Sequence[Architecture]:
        """Describe the trunks that this plugin knows.

        Called once, when plugins are loaded, in the user's process.

        Returns:
            Any number of :class:`~interp_core.architecture.Architecture`. An empty sequence (or
            ``None``) means none. The most specific claim on a configuration wins, whatever the order
            of installation; two equally specific claims are a conflict that names both owners.

        Example::

            from interp_core import Architecture, hookimpl
            from interp_core.architecture import Claim

            @hookimpl
            def interp_architectures():
                return [Architecture(
                    name="my-decoder",
                    summary="A decoder with a residual multiplier.",
                    claim=Claim(model_types={"my_decoder"}),
                    facts=my_facts,
                    bindings={"eager": "my_package.eager:BINDINGS"},
                )]
        """
        return ()

    @hookspec
    def interp_capabilities(self) -> Sequence[Capability]:
        """Add rows to the table of capabilities.

        Called once, when plugins are loaded, in the user's process.

        Returns:
            Any number of :class:`~interp_core.capabilities.Capability`. An empty sequence (or
            ``None``) means none. A row's name must not be one of another distribution's.

        Example::

            from interp_core import Capability, hookimpl

            @hookimpl
            def interp_capabilities():
                return [Capability(
                    name="replay",
                    what="Replay a captured graph with other weights.",
                    why="Only this engine records graphs.",
                    instead="backend='my-engine'",
                )]
        """
        return ()
