"""Is the model folder complete? Answered from the files alone, in milliseconds.

A quantised model with a missing shard loads without an error and talks nonsense, and a shard that
is really an error page or a pointer file dies with ``HeaderTooLarge`` after minutes. Both show in
the index and in the first bytes of each shard, so nothing has to be hashed here; the sha256 sums
are the model role's subject.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: The safetensors library's own limit for a header.
LARGEST_HEADER = 100_000_000
_NEEDED = ("config.json", "tokenizer_config.json")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def problems(folder: str | Path) -> list[str]:
    """Return what is wrong with a model folder, one sentence each; empty when it is complete."""
    root = Path(folder)
    if not root.is_dir():
        return [
            f"model folder {str(root)!r} is not there; run site.yml so that hf_model fetches it"
        ]
    found: list[str] = []
    for name in _NEEDED:
        _, problem = _read_json(root / name)
        if problem:
            found.append(problem)
    shards, problem = _shards(root)
    if problem:
        found.append(problem)
    for name in shards:
        problem = shard_problem(root / name)
        if problem:
            found.append(problem)
    return found


def _shards(root: Path) -> tuple[list[str], str | None]:
    """Return the names of the weight files that the folder must hold."""
    index = root / _INDEX
    if not index.exists():
        if (root / _SINGLE).exists():
            return [_SINGLE], None
        loose = sorted(root.glob("*.safetensors"))
        if loose:
            return [], f"{index.name} is missing though {loose[0].name!r} is there; fetch it again"
        return [], f"no weights (*.safetensors) in {str(root)!r}; fetch the model again"
    data, problem = _read_json(index)
    if problem:
        return [], problem
    mapping = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(mapping, dict) or not mapping:
        return [], f"{_INDEX} holds no weight_map; fetch it again"
    names = sorted({str(name) for name in mapping.values()})
    for name in names:
        if Path(name).name != name:
            return (
                [],
                f"{_INDEX} names {name!r}, which is no plain file name; do not trust this model",
            )
    return names, None


def shard_problem(path: Path) -> str | None:
    """Check one safetensors file: its header must be sound and its size what the header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > LARGEST_HEADER or length > size - 8:
                return f"{path.name} ({size} bytes) is no safetensors file; fetch it again"
            header = json.loads(file.read(length))
    except FileNotFoundError:
        return f"{path.name} is missing; fetch the model again"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror}"
    except ValueError:
        return f"{path.name} ({size} bytes) has a broken header; fetch it again"
    ends = [
        entry["data_offsets"][1]
        for name, entry in (header.items() if isinstance(header, dict) else ())
        if name != "__metadata__" and isinstance(entry, dict) and "data_offsets" in entry
    ]
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        return f"{path.name} has {size} bytes but its header says {wanted}; fetch it again"
    return None


def _read_json(path: Path) -> tuple[Any, str | None]:
    """Decode one of the model's JSON files."""
    try:
        return json.loads(path.read_text(encoding="utf-8")), None
    except FileNotFoundError:
        return None, f"{path.name} is missing; fetch the model again"
    except OSError as error:
        return None, f"{path.name} cannot be read: {error.strerror}"
    except ValueError:
        return None, f"{path.name} is not JSON; fetch it again"
