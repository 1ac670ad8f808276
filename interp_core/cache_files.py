"""A cache as one safetensors file: all tensors, and in its metadata whatever else a cache knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from interp_core._version import __version__
from interp_core.address import Address, parse_address
from interp_core.cache_rows import is_pairwise
from interp_core.durable import replacing
from interp_core.errors import AddressError, ModelUnavailable, RequestError
from interp_core.scalars import whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from interp_core.cache import Cache

__all__ = ["read_cache", "write_cache"]

_METADATA: Final = "interp_cache"
_FORMAT: Final = 1


def write_cache(cache: Cache, path: str | Path) -> Path:
    """Write ``cache``; a file that is there already is replaced when the new one is whole.

    Raises:
        RequestError: there is nothing to save, or the file cannot be written.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    if not len(cache):
        raise RequestError("this cache is empty: there is nothing to save")
    meta: dict[str, Any] = {name: getattr(cache, name) for name in ("tokens", "lengths", "offsets", "positions")}
    meta |= {"format": _FORMAT, "model_id": cache.model_id, "addresses": list(map(str, cache))}
    meta["entries"] = {str(address): counts for address, counts in cache.entries.items()}
    meta["versions"] = {"interp-core": __version__, "torch": torch.__version__}
    try:
        with replacing(path) as part:
            save_file(_separate(cache), str(part), metadata={_METADATA: json.dumps(meta)})
    except (OSError, SafetensorError) as error:
        raise RequestError(f"{path} cannot be written: {error}") from error
    return Path(path)


def read_cache(path: str | Path) -> tuple[dict[Address, Tensor], dict[str, Any]]:
    """Tensors, and the other fields of a cache, of a file that :func:`write_cache` wrote.

    Raises:
        ModelUnavailable: the file is missing, spoiled, not a saved cache, or of a later release.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            written = (file.metadata() or {}).get(_METADATA)
            if written is None:
                raise ModelUnavailable(f"{path} is a safetensors file, but not one that Cache.save wrote")
            meta = json.loads(written)
            if meta.get("format", _FORMAT) != _FORMAT:
                raise ModelUnavailable(
                    f"{path} is a cache of format {meta['format']!r}, and this release ({__version__}) reads {_FORMAT}"
                )
            # In the order of the capture, which the format does not keep.
            names = meta.get("addresses", file.keys())
            if sorted(names) != sorted(file.keys()):
                raise ValueError("it does not hold the tensors that it names")
            tensors = {parse_address(name): file.get_tensor(name) for name in names}
        fields = _fields(meta)
        _check_layout(tensors, fields)
    except (OSError, SafetensorError, AddressError, LookupError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ModelUnavailable):
            raise
        raise ModelUnavailable(f"{path} cannot be read as a saved cache: {error}") from error
    return tensors, fields


def _separate(cache: Cache) -> dict[str, Tensor]:
    """Tensors by name, on the CPU. The format has no shared memory: of tensors that share, all but one are copied."""
    tensors = {str(a): t.detach().contiguous().cpu() for a, t in cache.items()}
    owners = {t.untyped_storage().data_ptr(): name for name, t in tensors.items()}
    for name, tensor in tensors.items():
        if owners[tensor.untyped_storage().data_ptr()] != name:
            tensors[name] = tensor.clone()
    return tensors


def _fields(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Everything beside the tensors, checked."""
    model_id = meta.get("model_id")
    if not (model_id is None or isinstance(model_id, str)):
        raise TypeError(f"its model_id is {model_id!r}")
    return {
        "tokens": tuple(map(_numbers, meta["tokens"])),
        "lengths": _numbers(meta["lengths"]),
        "offsets": _numbers(meta["offsets"]),
        "positions": None if meta["positions"] is None else tuple(map(_numbers, meta["positions"])),
        "entries": {parse_address(key): _numbers(counts) for key, counts in meta.get("entries", {}).items()},
        "model_id": model_id,
    }


def _numbers(values: Any) -> tuple[int, ...]:
    found = tuple(map(whole_number, values))
    if any(number is None or number < 0 for number in found):
        raise ValueError(f"{values!r} are not whole numbers from 0")
    return tuple(number for number in found if number is not None)


def _check_layout(tensors: Mapping[Address, Tensor], fields: Mapping[str, Any]) -> None:
    """Refuse a layout that is not that of the tensors: reading by it would give other rows."""
    lengths, offsets = fields["lengths"], fields["offsets"]
    per_prompt = [fields[name] for name in ("tokens", "positions") if fields[name]]
    if len(lengths) != len(offsets) or any(len(rows) != len(lengths) for rows in per_prompt):
        raise ValueError("its layout is not of one number of prompts")
    needed = max((o + n for o, n in zip(offsets, lengths, strict=True)), default=0)
    for address, tensor in tensors.items():
        axis = -2 if is_pairwise(address) else 1
        if lengths and (tensor.dim() < 2 or tensor.shape[0] != len(lengths) or tensor.shape[axis] < needed):
            raise ValueError(f"{address} has shape {list(tensor.shape)}, which its layout does not describe")
