"""``interp new-plugin NAME``: a complete plugin project, whose own tests pass before anything in it is changed."""

from __future__ import annotations

import keyword
import shlex
import shutil
import string
import tempfile
import warnings
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from attrs import asdict, frozen

from interp_core._version import __version__
from interp_core.cli.console import out, print_json
from interp_core.cli.models import Json
from interp_core.errors import RequestError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = ["Kind", "Names", "new_plugin", "write_project"]

_SUFFIX: Final = ".tmpl"
"""Behind every template's name, so that no tool takes one for a file of this project."""

_SUMMARIES: Final = {
    "architecture": "A decoder, described for interp-core.",
    "backend": "A backend of interp-core.",
}
_DEPENDENCIES: Final = {
    "architecture": (),  # what its model needs comes with the backend that runs it
    "backend": ("torch>=2.6", "transformers>=5.16"),
}


class Kind(StrEnum):
    """What a plugin can bring."""

    architecture = "architecture"
    backend = "backend"


@frozen(kw_only=True)
class Names:
    """Everything that a new project calls itself.

    Attributes:
        distribution: as pip calls it: ``interp-foo``.
        package: as Python imports it: ``interp_foo``.
        plugin: its entry point: ``foo``.
        name: of its backend or architecture: ``foo``, with ``-`` for ``_``.
        title: the start of its classes' names: ``Foo``.
    """

    distribution: str
    package: str
    plugin: str
    name: str
    title: str

    @classmethod
    def of(cls, distribution: str) -> Names:
        """The names that follow from the distribution's.

        Raises:
            RequestError: it is no name of a distribution, or no package can be called so.
        """
        from packaging.utils import InvalidName, canonicalize_name

        try:
            normal = canonicalize_name(distribution, validate=True)
        except InvalidName:
            raise RequestError(
                f"{distribution!r} is no name of a distribution: letters, digits, '-', '_' and '.', such as interp-foo"
            ) from None
        package = normal.replace("-", "_")
        plugin = package.removeprefix("interp_")
        for word in (package, plugin):
            if not word.isidentifier() or keyword.iskeyword(word):
                raise RequestError(f"{distribution!r} would need a Python name {word!r}, which is none")
        title = "".join(part.capitalize() for part in plugin.split("_"))
        return cls(distribution=normal, package=package, plugin=plugin, name=plugin.replace("_", "-"), title=title)


def new_plugin(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new distribution's name, such as interp-foo.")],
    kind: Annotated[Kind, typer.Option("--kind", help="What it brings.")],
    into: Annotated[
        Path | None, typer.Option("--into", metavar="FOLDER", help="The project's folder; by default one called NAME.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a plugin project that works: its tests pass once it is installed. Then change it into yours."""
    names = Names.of(name)
    folder = Path(names.distribution) if into is None else into.expanduser()
    for clash in _clashes(names):
        raise RequestError(f"{clash}; choose another name")
    files = write_project(names, kind, folder)
    commands = [f"pip install -e {shlex.quote(f'{folder}[test]')}", f"pytest {shlex.quote(str(folder))}"]
    if as_json:
        print_json({**asdict(names), "kind": kind, "folder": str(folder), "files": files, "next": commands})
        return
    out.print(f"made {folder}, a plugin {names.plugin!r} that brings the {kind} {names.name!r}:", markup=False)
    for file in files:
        out.print(f"  {file}", markup=False)
    out.print("next:")
    for command in commands:
        out.print(f"  {command}", markup=False, soft_wrap=True)


def write_project(names: Names, kind: str, folder: Path) -> list[str]:
    """Write the project to ``folder``, whole or not at all.

    Returns:
        Its files, relative to ``folder``.

    Raises:
        RequestError: there is something at ``folder`` already.
    """
    from importlib.resources import files

    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise RequestError(f"{folder} is there already; name a folder that is not, or is empty, with --into")
    templates = files("interp_core") / "templates"
    values = _values(names, kind)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        written = [
            _write(template, made / _path(path, names), values)
            for source in ("common", kind)
            for path, template in _walk(templates / source)
        ]
        made.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return sorted(path.relative_to(made).as_posix() for path in written)


def _values(names: Names, kind: str) -> dict[str, str]:
    major, minor, *_ = __version__.split(".")
    return {
        **asdict(names),
        "summary": _SUMMARIES[kind],
        "core_range": f">={major}.{minor},<{major}.{int(minor) + 1}",
        "dependencies": "".join(f'    "{line}",\n' for line in _DEPENDENCIES[kind]),
        "model_type": f"{names.plugin}_decoder",
        "valve": f"{names.plugin}_valve",
    }


def _walk(folder: Traversable, path: str = "") -> Iterator[tuple[str, Traversable]]:
    """The templates below a folder, each with the path of what becomes of it."""
    for entry in sorted(folder.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            yield from _walk(entry, f"{path}{entry.name}/")
        elif entry.name.endswith(_SUFFIX):
            yield f"{path}{entry.name.removesuffix(_SUFFIX)}", entry


def _path(template: str, names: Names) -> str:
    # Not called tests here: a wheel of this project holds none.
    return template.replace("__package__", names.package).replace("__tests__/", "tests/test_")


def _write(template: Traversable, path: Path, values: dict[str, str]) -> Path:
    text = string.Template(template.read_text(encoding="utf-8")).substitute(values)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _clashes(names: Names) -> Iterator[str]:
    """What is installed under one of the names: plugins, what they bring, and anything that Python can import."""
    from importlib.util import find_spec

    from interp_core.discovery import normalised, scan
    from interp_core.host import default_host

    for entry in scan():
        for attribute in ("name", "distribution"):
            taken = getattr(entry, attribute)
            if normalised(taken) in (normalised(names.plugin), names.distribution):
                yield f"the installed plugin {entry.name!r} (of {entry.distribution} {entry.version}) has that name"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a plugin that does not load is another command's affair
        host = default_host()
        host.load()
    taken_names = [(spec.name, spec.owner) for spec in host.backends.values()]
    taken_names += [(known.name, known.owner) for known in host.architectures.values()]
    yield from (f"{owner} brings something called {name!r}" for name, owner in taken_names if name == names.name)
    if names.name == "auto":
        yield "'auto' is a word of load_model's own"
    if find_spec(names.package) is not None:
        yield f"Python imports something called {names.package!r} already"
