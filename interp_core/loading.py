"""From a model id to a profile, and to a lazy model: nothing here touches a weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any

from interp_core.backend import Adoption, BackendSpec
from interp_core.configuration import read_configuration
from interp_core.contained import call_plugin
from interp_core.errors import BackendUnavailable, PluginUnavailable, RequestError
from interp_core.facts import ModelFacts
from interp_core.host import PluginHost, default_host
from interp_core.lazy import load_object
from interp_core.options import check_options, trusts
from interp_core.registry import build_profile, choose_architecture, complete_facts, own_configurations
from interp_core.session import Session, lock_of

if TYPE_CHECKING:
    from interp_core.model import InterpModel
    from interp_core.profile import ModelProfile

__all__ = ["choose_backend", "inspect_model", "load_model"]

AUTO = "auto"


def load_model(
    model_id_or_path: str | PathLike[str] | Any,
    backend: str = AUTO,
    *,
    dtype: Any = "auto",
    device: str | None = None,
    tokenizer: Any = None,
    host: PluginHost | None = None,
    **options: Any,
) -> InterpModel:
    """A lazy model: its configuration is read now, its weights at ``warmup()`` or first use.

    Args:
        model_id_or_path: a checkpoint folder, or the id of one on the hub; or a model that is in memory already, such
            as a transformers model, which is run as it is: neither copied nor changed nor moved, so it takes no load
            options.
        backend: a registered backend's name, or ``"auto"`` for the best that is available here.
        dtype: ``"auto"`` (the checkpoint's), or a dtype's name, or a ``torch.dtype``.
        device: a device's name; ``None`` lets the backend choose.
        tokenizer: a transformers tokenizer to use; ``None`` for the checkpoint's own.
        host: the plugins to use; ``None`` for all that are installed.
        **options: what the backend understands beyond these; unknown ones are refused by name.

    Raises:
        ModelUnavailable: the configuration cannot be read, or describes no decoder.
        BackendUnavailable: the backend is not installed, or cannot run here.
        PluginUnavailable: the plugin that owns the backend is installed but broken.
        PluginConflict: two plugins claim the model equally.
        RequestError: an option is unknown or not valid.
    """
    from interp_core.model import InterpModel

    given = {"dtype": dtype, "device": device, **options}
    if isinstance(model_id_or_path, (str, PathLike)):
        return InterpModel(_profile(model_id_or_path, backend, given, host, runnable=True), tokenizer=tokenizer)
    adoption, spec, passed = _adopted(model_id_or_path, backend, given, host or default_host())
    profile = _profile_of(adoption.model_id, adoption.config, spec, adoption.options, host or default_host(), passed)
    lock = lock_of(model_id_or_path)
    session = Session(profile, make=lambda _, profile, options: adoption.make(profile, options), lock=lock)
    return InterpModel(profile, session, tokenizer=tokenizer, in_memory=True)


def inspect_model(
    model_id_or_path: str | PathLike[str], backend: str = AUTO, *, host: PluginHost | None = None, **options: Any
) -> ModelProfile:
    """What :func:`load_model` would give, as a profile without a model.

    The backend's engine need not be installed or run here: only its plugin.

    Raises:
        ModelUnavailable, PluginUnavailable, PluginConflict, RequestError: as :func:`load_model`.
        BackendUnavailable: no plugin registers the backend.
    """
    return _profile(model_id_or_path, backend, options, host, runnable=False)


def choose_backend(
    name: str, host: PluginHost, *, runnable: bool, skip: Mapping[str, str] | None = None
) -> tuple[BackendSpec, dict[str, str]]:
    """The named backend, or the best-ranked available one, and why others were passed over.

    Raises:
        BackendUnavailable: there is none; every "no" is named with its reason.
        PluginUnavailable: the plugin that owns the name is broken.
    """
    if not isinstance(name, str):
        raise RequestError(f"backend is a name, not {name!r}")
    if name == AUTO:
        return _climb(host.backends.values(), host, runnable=runnable, skip=skip or {})
    spec = host.backends.get(name)
    if spec is None:
        raise host.explain_missing_backend(name)
    if runnable:
        found = call_plugin("its availability probe", spec.owner, spec.probe)
        if not found.ok:
            raise BackendUnavailable(f"backend {name!r} (of {spec.owner}) cannot run here: {found.reason}")
    return spec, {}


def _climb(
    specs: Iterable[BackendSpec], host: PluginHost, *, runnable: bool, skip: Mapping[str, str]
) -> tuple[BackendSpec, dict[str, str]]:
    passed: dict[str, str] = {}
    ranked = sorted(specs, key=lambda s: (s.rank is None, -(s.rank or 0), s.name))
    chosen: BackendSpec | None = None
    for spec in ranked:
        reason = _reason_against(spec, chosen, skip)
        if reason:
            passed[spec.name] = reason
        else:
            chosen = spec
    if chosen is not None:
        return chosen, passed
    if not runnable:
        # Nothing can run here, but a question about a configuration needs no engine.
        for spec in ranked:
            if spec.rank is not None:
                return spec, passed
    raise BackendUnavailable(_nothing_available(passed, host))


def _reason_against(spec: BackendSpec, chosen: BackendSpec | None, skip: Mapping[str, str]) -> str:
    if spec.rank is None:
        return "it is never chosen automatically; name it to use it"
    if spec.name in skip:
        return skip[spec.name]
    if chosen is not None:
        return f"{chosen.name!r} ranks higher and is available"
    try:
        found = call_plugin("its availability probe", spec.owner, spec.probe)
    except PluginUnavailable as error:
        return str(error)
    return "" if found.ok else found.reason


def _nothing_available(passed: Mapping[str, str], host: PluginHost) -> str:
    if passed:
        listed = "; ".join(f"{name}: {reason}" for name, reason in passed.items())
        return f"no backend can run here. {listed}"
    broken = [f"{r.name} ({r.distribution} {r.version}): {r.reason}" for r in host.records if r.status != "active"]
    if broken:
        return "no backend is usable; installed plugins: " + "; ".join(broken)
    return "no backend is installed: pip install interp-eager (Hugging Face transformers) or interp-vllm (vLLM)"


def _profile(
    model: str | PathLike[str], backend: str, options: dict[str, Any], host: PluginHost | None, *, runnable: bool
) -> ModelProfile:
    if not isinstance(model, (str, PathLike)):
        raise RequestError(f"a model is a folder or an id, not {type(model).__name__}")
    host = host or default_host()
    host.load()
    spec, passed = choose_backend(backend, host, runnable=runnable)
    config = read_configuration(
        fspath(model), trust_remote_code=trusts(options), classes=own_configurations(host.architectures.values())
    )
    return _profile_of(fspath(model), config, spec, options, host, passed)


def _profile_of(
    model_id: str,
    config: Any,
    spec: BackendSpec,
    options: Mapping[str, Any],
    host: PluginHost,
    passed: Mapping[str, str],
) -> ModelProfile:
    facts = ModelFacts.from_config(config)
    architecture = choose_architecture(facts, _config_keys(config), host.architectures.values())
    own = () if architecture is None else tuple(architecture.options.get(spec.name, ()))
    checked = check_options(spec, options, own)
    return build_profile(
        model_id=model_id,
        facts=complete_facts(config, facts, architecture),
        architecture=architecture,
        spec=spec,
        backends=host.backends,
        capabilities=host.capabilities,
        options=checked,
        passed_over=passed,
    )


def _adopted(
    model: Any, backend: str, given: Mapping[str, Any], host: PluginHost
) -> tuple[Adoption, BackendSpec, dict[str, str]]:
    """A model in memory, as the named backend, or the first that takes it, describes it."""
    host.load()
    others = {name: "it takes no model in memory" for name, spec in host.backends.items() if not spec.adopt}
    if len(others) == len(host.backends):
        raise RequestError(f"a model is a folder or an id, not {type(model).__name__}")
    set_ = sorted(name for name, value in given.items() if value not in (None, "auto"))
    if set_:
        raise RequestError(
            f"a model in memory is run as it is, so it takes no load options; given: {', '.join(set_)}. Change the "
            "model itself before, or load it from its checkpoint"
        )
    if backend not in (AUTO, *host.backends) or backend in others:
        choose_backend(backend, host, runnable=True)
        able = ", ".join(sorted(set(host.backends) - set(others))) or "none that is installed"
        raise RequestError(f"backend {backend!r} loads checkpoints and takes no model in memory; those that do: {able}")
    spec, passed = choose_backend(backend, host, runnable=True, skip=others)
    adopt: Callable[[Any], Adoption] = load_object(spec.adopt)
    return adopt(model), spec, passed


def _config_keys(config: Any) -> frozenset[str]:
    inner = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    return frozenset(key for source in (config, inner) for key, value in vars(source).items() if value is not None)
