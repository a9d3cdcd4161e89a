# Copyright (c) the torchtitan_lr authors. Licensed under the BSD-3-Clause license.
"""Where a run's first weights come from: what an import notes, and what a card says of it."""

from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import ModelCard

from torchtitan_lr.config.files import read_json, read_regular
from torchtitan_lr.errors import ConfigError
from torchtitan_lr.hf.export import write_json
from torchtitan_lr.models.flavors import SUFFIX
from torchtitan_lr.training.loading import read_record

ORIGIN = "origin.json"
"""Beside an import's checkpoint: the fields of `Origin`."""


@dataclass(frozen=True)
class Origin:
    """Weights that a run started from; texts are empty where they are unknown."""

    name: str = ""
    """Such as ``HuggingFaceTB/SmolLM2-135M``."""
    repository: str = ""
    """Their name on the Hub."""
    license: str = ""
    """As a model card names it, such as ``apache-2.0``."""


def write_origin(folder: Path, repository: str, out: Path) -> None:
    """Note where an import comes from, with the licence of the folder's model card."""
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
    step_dir = step_dir.resolve()
    start: object = str(step_dir)
    if step_dir.name != "step-0":
        section = read_record(step_dir).get("checkpoint")
        start = section.get("initial_load_path") if isinstance(section, dict) else None
    elif not (step_dir.parent.parent / ORIGIN).is_file():
        return None
    if not start or not isinstance(start, str):
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = read_json(Path(start).parent.parent / ORIGIN)
        return Origin(**{key: str(found[key]) for key in asdict(Origin())})
    with suppress(ConfigError, KeyError, TypeError):  # a step of another run; no place is told
        model, step = read_record(Path(start))["model"], Path(start).name.removeprefix("step-")
        flavor = str(model["flavor"])
        size = "" if flavor.endswith(SUFFIX) else f" {flavor}"
        return Origin(f"{model['name']}{size}, step {step}")
    return Origin()
