"""What a table of names consists of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from attrs import field, frozen

from interp_core.converters import as_tuple
from interp_core.facts import LayerFacts, ModelFacts

__all__ = ["LIBRARIES", "Condition", "Name", "NoName", "NotAPoint", "Vocabulary", "first_failing", "pattern"]

LIBRARIES: Final = ("transformer_lens", "nnterp", "nnsight", "interp_engine")
"""The libraries whose names are known."""


@frozen(kw_only=True)
class Condition:
    """Something about a model that decides whether a name means a point.

    Attributes:
        where: completes "where ...", for tables.
        fails: the reason where it does not hold, as a sentence without its full stop.
        holds: the test; the layer is ``None`` for names of the whole trunk.
    """

    where: str
    fails: str
    holds: Callable[[ModelFacts, LayerFacts | None], bool] = field(eq=False, repr=False)


@frozen(kw_only=True)
class Name:
    """One of their names, and the point whose tensor it is.

    Attributes:
        name: the name, ``{layer}`` standing for the layer's number.
        point: our point.
        when: keys of ``CONDITIONS``, all of which have to hold.
        note: what a reader has to know though the tensor is the same: an axis, or which of their classes has it.
        near: what to use where ``when`` does not hold, or where the model has no such tensor.
    """

    name: str
    point: str
    when: tuple[str, ...] = field(default=(), converter=as_tuple)
    note: str = ""
    near: str = ""


@frozen(kw_only=True)
class NotAPoint:
    """One of their names whose tensor is no point of ours: why, and what is near."""

    name: str
    why: str
    near: str
    when: tuple[str, ...] = field(default=(), converter=as_tuple)


@frozen(kw_only=True)
class NoName:
    """A point of ours for which they have no name: why, and what is near."""

    point: str
    why: str
    near: str
    when: tuple[str, ...] = field(default=(), converter=as_tuple)


@frozen(kw_only=True)
class Vocabulary:
    """The names of one library, or of one module tree of a library whose names are module paths.

    Attributes:
        library: its key among ``LIBRARIES``.
        title: how it is called in texts.
        names: their names that are points, the spelling to emit first.
        others: their names that are not.
        unnamed: our points that they have no name for.
        families: ``model_type`` of the models whose tree this is; empty for names that depend on no tree.
        module_output: their name for the output of any module, with ``{path}``; empty if they have none.
        addresses: whether their names follow the grammar of our addresses.
        flexible: whether ``[3]`` is ``.3``, a leading ``model.`` is a variable, and a tuple's slot may follow.
    """

    library: str
    title: str
    names: tuple[Name, ...] = field(converter=as_tuple)
    others: tuple[NotAPoint, ...] = field(default=(), converter=as_tuple)
    unnamed: tuple[NoName, ...] = field(default=(), converter=as_tuple)
    families: frozenset[str] = frozenset()
    module_output: str = ""
    addresses: bool = False
    flexible: bool = False

    def spellings(self, name: str) -> tuple[str, ...]:
        """``name`` as the patterns of this vocabulary may know it."""
        name = name.strip()
        if not self.flexible:
            return (name,)
        dotted = re.sub(r"\[(\d+)\]", r".\1", name.replace(" ", ""))
        dotted = re.sub(r"\.inputs\.0\.0$", ".input", dotted)
        dotted = re.sub(r"\.(output|input)\.0$", r".\1", dotted)
        bare = dotted.removeprefix("model.")
        return (dotted,) if bare == dotted else (dotted, bare)

    def named(self, point: str) -> tuple[Name, ...]:
        """Their names for a point, whatever their conditions."""
        return tuple(row for row in self.names if row.point == point)

    def without(self, point: str) -> tuple[NoName, ...]:
        """The reasons why they have no name for a point."""
        return tuple(row for row in self.unnamed if row.point == point)


def pattern(template: str, *, flexible: bool) -> re.Pattern[str]:
    """A template with ``{layer}`` as a pattern over spellings."""
    if flexible:
        template = template.replace("[{layer}]", ".{layer}")
    return re.compile(re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)"))


def first_failing(
    keys: Iterable[str], conditions: Mapping[str, Condition], facts: ModelFacts, layer: LayerFacts | None
) -> Condition | None:
    """The first condition that does not hold, or ``None``."""
    for key in keys:
        if not conditions[key].holds(facts, layer):
            return conditions[key]
    return None
