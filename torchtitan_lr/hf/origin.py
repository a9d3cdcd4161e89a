# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a run's first weights come from: what an import notes, and what a card says of it."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, snapshot_download

from torchtitan_lr.config.files import read_json, read_regular
from torchtitan_lr.config.paths import user_path
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.loading import named_step, read_record
from torchtitan_lr.hf.shards import write_json

ORIGIN = "origin.json"
"""Beside an import's checkpoint: the fields of `Origin`."""

_PATTERNS = ["*.json", "*.safetensors", "tokenizer*", "*.jinja", "README.md"]
"""Files of a repository on the Hub that an import reads."""


@dataclass(frozen=True)
class Origin:
    """Weights that a run started from.

    Attributes:
        name: What they are called, such as ``HuggingFaceTB/SmolLM2-135M``; "" if unknown.
        repository: Their name on the Hub; "" if they have none.
        license: Their licence as a model card names it, such as ``apache-2.0``; "" if unknown.
    """

    name: str = ""
    repository: str = ""
    license: str = ""


def find_model(name: str) -> tuple[Path, str]:
    """Find the folder of a model: one of this machine, else of the Hub, downloaded if need be.

    Returns:
        The folder, and the name on the Hub; "" for a folder of this machine.

    Raises:
        ConfigError: The Hub has no such model, or cannot be reached.
    """
    folder = user_path(name, "DIR")
    parts = name.split("/")
    if folder.exists() or len(parts) != 2 or not all(parts) or parts[0] in (".", "..", "~"):
        return folder, ""
    try:
        return Path(snapshot_download(name, allow_patterns=_PATTERNS, etag_timeout=5)), name
    # Not found, gated, no network: each version and each layer below has exceptions of its own.
    except Exception as error:
        want = f"a folder, or a model of the Hub that can be read here ({type(error).__name__}); on"
        want += f" a machine with a network `hf download {name} --local-dir FOLDER` writes a folder"
        raise ConfigError("DIR", name, want) from error


def write_origin(folder: Path, repository: str, out: Path) -> None:
    """Note where an import comes from; the licence is that of the folder's model card.

    Args:
        folder: The folder of the model.
        repository: Its name on the Hub, or "".
        out: The folder of the import.
    """
    licence = None
    with suppress(Exception):  # no card, or one that is no YAML
        card = ModelCard(read_regular(folder / "README.md").decode())
        licence = card.data.to_dict().get("license")
    name = repository or folder.resolve().name
    found = Origin(name, repository, licence if isinstance(licence, str) else "")
    write_json(out / ORIGIN, asdict(found))


def origin_of(step_dir: Path) -> Origin | None:
    """Return what the run of a checkpoint started from; None for random weights.

    An imported checkpoint, of step 0, is its own origin.
    """
    step_dir = named_step(step_dir)
    imported = step_dir.parent.parent / ORIGIN
    if step_dir.name == "step-0":
        return _read(imported) if imported.is_file() else None
    section = read_record(step_dir).get("checkpoint")
    start = section.get("initial_load_path") if isinstance(section, dict) else None
    if not start or not isinstance(start, str):
        return None
    return _read(Path(start).parent.parent / ORIGIN) or _other_run(Path(start)) or Origin()


def _read(path: Path) -> Origin | None:
    try:
        found: dict[str, Any] = read_json(path)
        return Origin(**{key: str(found[key]) for key in asdict(Origin())})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _other_run(step_dir: Path) -> Origin | None:
    """Name the run of a checkpoint by its model; nothing of its place is told."""
    with suppress(ConfigError):
        model = read_record(step_dir).get("model")
        step = step_dir.name.removeprefix("step-")
        if isinstance(model, dict):
            return Origin(f"{model.get('name')} {model.get('flavor')}, step {step}")
    return None
