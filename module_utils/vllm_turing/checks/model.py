"""Checks of a model's folder: everything named is there, and is what it claims to be."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

from ..preflight_check import (
    Context,
    Outcome,
    check,
    failed,
    gib,
    listing,
    passed,
    skipped,
    warned,
)

_POINTER = b"version https://git-lfs.github.com/spec/"
#: A header larger than this is none (the limit of the safetensors library).
_MOST_HEADER = 100_000_000

_MENDED = "hf_model"


def folders(context: Context) -> list[str]:
    """Return the model folders that serve, or would: the wanted one, and those of other units."""
    paths = [context.wish.text("hf_model_path")]
    paths += [path for unit in context.foreign_units if (path := unit.option("model"))]
    return [path for path in dict.fromkeys(paths) if path.startswith("/") and _there(context, path)]


def _there(context: Context, path: str) -> bool:
    return context.host.is_dir(path) or context.host.is_link(path)


def _absent(context: Context) -> Outcome:
    return skipped(
        f"no model yet; role hf_model fetches it to '{context.wish.text('hf_model_path')}'"
    )


def indexes(context: Context, path: str) -> tuple[dict[str, Any], list[str]]:
    """Return what the index files map to, and what is wrong with them.

    :returns: shard name to the index that names it; sentences
    """
    shards: dict[str, Any] = {}
    wrong: list[str] = []
    for file in context.host.glob(path, "*.safetensors.index.json"):
        name = file.rsplit("/", 1)[-1]
        try:
            mapping = json.loads(context.host.read(file, 64 * 1024 * 1024) or "")["weight_map"]
            names = {str(value) for value in mapping.values()}
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong.append(f"{name} is no index (JSON with a weight_map)")
            continue
        for shard in sorted(names):
            if shard.startswith("/") or ".." in shard.split("/"):
                wrong.append(f"{name} names '{shard}', outside the folder")
            else:
                shards[shard] = name
    return shards, wrong


@check("model", "model_files")
def model_files(context: Context) -> Outcome:
    """Check that every file that the model's indexes name is there."""
    places = folders(context)
    if not places:
        return _absent(context)
    host = context.host
    seen, stray = [], []
    for path in places:
        if not host.is_dir(path):
            target = host.link_target(path)
            return failed(
                f"'{path}' is a dangling link to '{target}'",
                path,
                "rm the link and run site.yml --tags model",
                _MENDED,
            )
        present = {name for name in host.listdir(path) if name.endswith(".safetensors")}
        shards, wrong = indexes(context, path)
        split = [name for name in present if re.search(r"-of-\d+\.safetensors$", name)]
        has_index = bool(host.glob(path, "*.safetensors.index.json"))
        if wrong:
            return failed(
                f"{listing(wrong)} in '{path}'", path, "run site.yml --tags model", _MENDED
            )
        if split and not has_index:
            return failed(
                f"model.safetensors.index.json is missing in '{path}', which has {len(split)} "
                "shards",
                path,
                "run site.yml --tags model",
                _MENDED,
            )
        missing = sorted(
            shard for shard in shards if not host.size(f"{path}/{shard}")
        )  # an empty file is missing, too
        if missing:
            return failed(
                f"{len(missing)} of {len(shards)} weight files are missing in '{path}': "
                f"{listing(missing)}",
                f"{shards[missing[0]]}",
                "run site.yml --tags model (only the missing files are fetched)",
                _MENDED,
            )
        if not host.exists(f"{path}/config.json"):
            return failed(
                f"config.json is missing in '{path}'", path, "run site.yml --tags model", _MENDED
            )
        if not present:
            return failed(
                f"no weights (*.safetensors) in '{path}'",
                path,
                "run site.yml --tags model",
                _MENDED,
            )
        if shards:
            stray += [f"{path}/{name}" for name in sorted(present - set(shards))]
        seen.append(f"{len(shards) or len(present)} weight files in {path}")
    if stray:
        return warned(
            f"files that no index names: {listing(stray)}; vLLM loads every *.safetensors there",
            "model.safetensors.index.json",
            "move them out of the folder",
        )
    return passed(listing(seen))


@check("model", "model_pointers")
def model_pointers(context: Context) -> Outcome:
    """Check that no file is a pointer of git-lfs or a web page."""
    places = folders(context)
    if not places:
        return _absent(context)
    pointers, pages, count = [], [], 0
    for path in places:
        for name in context.host.listdir(path):
            start = context.host.read_bytes(f"{path}/{name}", 512)
            if start is None:
                continue
            count += 1
            if start.startswith(_POINTER):
                size = re.search(rb"^size (\d{1,15})$", start, re.MULTILINE)
                real = f", real size {gib(int(size.group(1)))}" if size else ""
                pointers.append(f"{name} (LFS pointer{real})")
            elif re.match(rb"\s*<(!doctype html|html)", start, re.IGNORECASE):
                pages.append(f"{name} (a web page)")
    if pointers or pages:
        return failed(
            f"not the real content: {listing([*pointers, *pages])}",
            listing(places),
            "run site.yml --tags model (just those files are fetched); git clone needs git-lfs",
            _MENDED,
        )
    if not count:
        return skipped("no file of the model can be read")
    return passed(f"{count} files looked into")


def safetensors_problem(context: Context, path: str) -> str:
    """Return what is wrong with the structure of a safetensors file; empty when nothing is.

    The format: eight bytes length, that much JSON, then the data; every tensor's ``data_offsets``
    lie inside and the last one ends with the file.
    """
    host = context.host
    size = host.size(path) or 0
    start = host.read_bytes(path, 8)
    if start is None:
        return "cannot be read"
    if len(start) < 8 or start.startswith(_POINTER[:8]):
        return f"is no safetensors file ({size} bytes)"
    (length,) = struct.unpack("<Q", start)
    if length > _MOST_HEADER or length + 8 > size:
        return f"is cut off or no safetensors file (header of {length} bytes, {size} bytes in all)"
    try:
        header = json.loads(host.read_bytes(path, length, 8) or b"")
        ends = [
            int(entry["data_offsets"][1])
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return "has an unreadable header"
    expected = 8 + length + max(ends, default=0)
    if expected != size:
        return f"has {size} bytes, its header promises {expected}"
    return ""


@check("model", "model_safetensors")
def model_safetensors(context: Context) -> Outcome:
    """Check that every weight file has the size that its own header promises."""
    places = folders(context)
    if not places:
        return _absent(context)
    wrong, count = [], 0
    for path in places:
        for file in context.host.glob(path, "*.safetensors"):
            count += 1
            problem = safetensors_problem(context, file)
            if problem:
                wrong.append(f"{file.rsplit('/', 1)[-1]} {problem}")
    if wrong:
        return failed(
            listing(wrong),
            listing(places),
            "run site.yml --tags model (just those files are fetched)",
            _MENDED,
        )
    return passed(f"{count} files") if count else skipped("no weight file")


@check("model", "model_links")
def model_links(context: Context) -> Outcome:
    """Check that no file of the model is a dangling link."""
    places = folders(context)
    if not places:
        return _absent(context)
    host = context.host
    names = [(path, name) for path in places for name in host.listdir(path)]
    dangling = [
        f"{name} -> {host.link_target(f'{path}/{name}')}"
        for path, name in names
        if host.is_link(f"{path}/{name}") and not host.exists(f"{path}/{name}")
    ]
    if dangling:
        return failed(
            f"links that lead nowhere: {listing(dangling)} (the cache they point into is gone)",
            listing(places),
            "run site.yml --tags model",
            _MENDED,
        )
    if not names:
        return skipped("the model's folder is empty or cannot be read")
    linked = sum(host.is_link(f"{path}/{name}") for path, name in names)
    return passed(f"{linked} links, all lead somewhere" if linked else "no links")


@check("model", "model_readable")
def model_readable(context: Context) -> Outcome:
    """Check that the account that serves can read every file of the model."""
    places = folders(context)
    if not places:
        return _absent(context)
    user = context.wish.text("vllm_host_user")
    account = context.accounts.get(user)
    if account is None:
        return skipped(f"account '{user}' is not there yet")
    uid, gid, _ = account
    host = context.host
    files = [
        f"{path}/{name}"
        for path in places
        for name in host.listdir(path)
        if host.exists(f"{path}/{name}") and not host.is_dir(f"{path}/{name}")
    ]
    closed = [file for file in files if not host.may(file, uid, [gid], 4)]
    if closed:
        return failed(
            f"'{user}' cannot read {len(closed)} of {len(files)} files: {listing(closed, 2)}",
            f"resolves to {host.resolve(closed[0])}, {host.owner(closed[0])}",
            f"chmod a+rX on the folders above, or chown them to {user}",
            _MENDED,
        )
    return passed(f"'{user}' can read {len(files)} files") if files else skipped("no file to read")


@check("model", "model_leftovers")
def model_leftovers(context: Context) -> Outcome:
    """Check that no remains of broken downloads take room."""
    places = folders(context)
    if not places:
        return _absent(context)
    host = context.host
    found = []
    size = 0
    for path in places:
        base = f"{path}/.cache/huggingface/download"
        for file in [*host.glob(base, "*.incomplete"), *host.glob(path, "*.incomplete")]:
            found.append(file)
            size += host.size(file) or 0
    if found:
        return warned(
            f"{len(found)} unfinished downloads take {gib(size)}",
            found[0],
            f"rm '{found[0].rsplit('/', 1)[0]}'/*.incomplete (safe while nothing downloads)",
        )
    return passed("none")
