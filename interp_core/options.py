"""Load options: the keywords of ``load_model``, checked before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from interp_core.backend import BackendSpec
from interp_core.errors import RequestError, unknown_name
from interp_core.keywords import OptionSpec

__all__ = ["DTYPES", "check_options", "trusts"]

DTYPES: Final = ("auto", "float32", "float16", "bfloat16", "float64")
"""Names that ``dtype`` takes; a ``torch.dtype`` of the same name is taken too."""

_COMMON: Final = (
    OptionSpec(name="dtype", help="Weights' dtype: auto keeps the checkpoint's.", types=(object,), default="auto"),
    OptionSpec(name="device", help="Device name such as cpu or cuda:0; None chooses.", types=(object,), default=None),
    OptionSpec(
        name="trust_remote_code", help="Run Python code that the checkpoint ships.", types=(bool,), default=False
    ),
)


def check_options(spec: BackendSpec, given: Mapping[str, Any], extra: Sequence[OptionSpec] = ()) -> dict[str, Any]:
    """All options of ``spec``, and ``extra`` ones of a trunk on it, with defaults filled in.

    Raises:
        RequestError: a keyword is unknown, or its value is of the wrong type or not a valid choice.
    """
    known = {option.name: option for option in (*_COMMON, *spec.options, *extra)}
    for name in given:
        if name not in known:
            raise RequestError(f"backend {spec.name!r}: " + unknown_name("option", name, known))
    values = {name: _value(spec, option, given) for name, option in known.items()}
    values["dtype"] = _dtype(values["dtype"])
    values["device"] = None if values["device"] is None else str(values["device"])
    return values


def trusts(given: Mapping[str, Any]) -> bool:
    """Whether the checkpoint's own code may run, which is asked before the other options can be checked.

    Raises:
        RequestError: it is neither true nor false.
    """
    value = given.get("trust_remote_code", False)
    if not isinstance(value, bool):
        raise RequestError(f"option 'trust_remote_code' is bool, not {value!r}")
    return value


def _value(spec: BackendSpec, option: OptionSpec, given: Mapping[str, Any]) -> Any:
    if option.name not in given:
        return option.default
    value = given[option.name]
    if value is None and option.default is None:
        return None
    # bool is an int to Python, never to a user who was asked for a number.
    wrong_bool = isinstance(value, bool) and not {bool, object} & set(option.types)
    if wrong_bool or not isinstance(value, option.types):
        wanted = " or ".join(kind.__name__ for kind in option.types)
        raise RequestError(f"backend {spec.name!r}: option {option.name!r} is {wanted}, not {value!r}")
    if option.choices and value not in option.choices:
        raise RequestError(f"backend {spec.name!r}: " + unknown_name(option.name, str(value), map(str, option.choices)))
    return value


def _dtype(value: Any) -> str:
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise RequestError(unknown_name("dtype", name, DTYPES))
    return name
