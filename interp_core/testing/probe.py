"""What importing a plugin does to a process, in a process of its own: ``python -m interp_core.testing.probe``.

Nothing here may import an engine, and everything that the snapshot looks at is imported before it is taken.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import io
import json
import logging
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from interp_core.collect import collect, import_plugin
from interp_core.lazy import load_object

__all__ = ["ENGINES", "main"]

ENGINES: Final = ("torch", "transformers", "vllm", "jax", "onnxruntime", "tensorflow", "mlx")
"""Modules that an entry point must leave alone."""


def main(question: str, subject: str, answer: str) -> None:
    """Answer one question about a plugin, as JSON in the file ``answer``.

    Args:
        question: ``import`` (of the entry point) or ``targets`` (a JSON mapping of labels to targets).
        subject: the value of the entry point, or that mapping.
        answer: where the answer goes; not standard output, which a plugin may print to.
    """
    found = _imported(subject) if question == "import" else _targets(json.loads(subject))
    Path(answer).write_text(json.dumps(found), encoding="utf-8")


def _imported(value: str) -> dict[str, Any]:
    # What importing costs everybody who uses the host is no doing of the plugin's.
    import importlib_metadata  # noqa: F401 - it adds a finder of its own to sys.meta_path

    collect(None, "", "")
    before, printed = _snapshot(), io.StringIO()
    error = ""
    plugin: Any = None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            plugin = import_plugin("plugin", value)
        except (Exception, SystemExit):  # noqa: BLE001 - becomes the finding
            error = traceback.format_exc(limit=-3)
    engines = _engines()
    changes = [what for what, state in _snapshot().items() if state != before[what]]
    if printed.getvalue():
        changes.append("standard output or standard error (it prints)")
    changes += _registrations()
    if not error and not engines:
        _ask(plugin)
    return {"error": error, "engines": engines, "changes": changes, "engines_of_hooks": _engines()}


def _engines() -> list[str]:
    return [name for name in ENGINES if name in sys.modules]


def _snapshot() -> dict[str, Any]:
    """State that is everybody's, by what it is called in a finding; compared for equality."""
    root = logging.getLogger()
    return {
        "the environment (os.environ)": dict(os.environ),
        "the filters of warnings": [str(entry) for entry in warnings.filters] + [repr(warnings.showwarning)],
        "the root logger (handlers, level)": [*map(repr, root.handlers), root.level, logging.root.disabled],
        "sys.path": list(sys.path),
        "the import system (sys.meta_path, sys.path_hooks)": [*map(repr, sys.meta_path), *map(repr, sys.path_hooks)],
        "builtins": {name: id(value) for name, value in vars(builtins).items() if name != "_"},
        "the hooks of sys (excepthook, displayhook)": [repr(sys.excepthook), repr(sys.displayhook)],
        "a signal handler": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "the threads (it starts one)": sorted(thread.name for thread in threading.enumerate()),
        "the working directory": os.getcwd(),
        "the files in the working directory": sorted(path.name for path in Path.cwd().iterdir()),
    }


def _registrations() -> list[str]:
    """Configuration classes that were added to transformers' registry, if transformers was imported at all."""
    module = sys.modules.get("transformers.models.auto.configuration_auto")
    added = getattr(getattr(module, "CONFIG_MAPPING", None), "_extra_content", {})
    return [f"transformers' registry of configurations (it registers {', '.join(sorted(added))})"] if added else []


def _ask(plugin: Any) -> None:
    """Call every hook, and every probe of a backend. What they raise is another rule's affair."""
    for spec in collect(plugin, "plugin", "plugin").backends:
        with contextlib.suppress(Exception, SystemExit):
            spec.probe()


def _targets(targets: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Per label: whether it is callable, or the name of a missing module, or what went wrong."""
    return {label: _target(target) for label, target in targets.items()}


def _target(target: str) -> dict[str, Any]:
    try:
        found = load_object(target)
    except ModuleNotFoundError as error:
        return {"missing": error.name or "", "error": f"{type(error).__name__}: {error}"}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - becomes the finding
        return {"error": f"{type(error).__name__}: {error}"}
    wanted = ("layout", "bind")
    return {"callable": callable(found), "trunk": all(_has(found, name) for name in wanted)}


def _has(found: Any, name: str) -> bool:
    member: Callable[..., Any] | None = getattr(found, name, None)
    return callable(member)


if __name__ == "__main__":
    importlib.invalidate_caches()
    main(*sys.argv[1:])
