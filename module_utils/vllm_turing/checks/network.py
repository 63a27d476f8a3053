"""Checks that every place that something is fetched from answers, the weights' real host too."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from .. import apt_sources
from ..preflight_check import (
    Context,
    Outcome,
    check,
    failed,
    gib,
    passed,
    skipped,
    warned,
)
from ..preflight_host import Answer

#: Most bytes of the Hub's list of files that are read.
_TREE_LIMIT = 8 * 1024 * 1024

_CHOICES = (
    "choose another mirror (vllm_host_mirror_hub), set a proxy on the host, or copy the model to "
    "hf_model_path"
)


def sources(context: Context) -> dict[str, str]:
    """Return check id to the address that is asked; empty where nothing is to be asked."""
    wish, host = context.wish, context.host
    cuda = wish.stack.get("cuda") or {}
    tag = cuda.get("torch_tag", "") if isinstance(cuda, Mapping) else ""
    indexes = {str(i.get("name")) for i in wish.stack.get("indexes", []) if isinstance(i, Mapping)}
    pytorch = not wish.cpu and ("pytorch" in indexes or not wish.stack)
    found = {
        "network_python": _join(python_index(context), "uv/"),
        "network_pytorch": _join(wish.text("vllm_host_mirror_pytorch"), f"{tag or 'cu129'}/torch/")
        if pytorch
        else "",
        "network_vllm": _join(wish.text("vllm_host_mirror_vllm"), "")
        if not wish.cpu and ("vllm" in indexes or not wish.stack)
        else "",
        "network_nvidia": _join(wish.text("vllm_host_mirror_nvidia"), "InRelease"),
        "network_git": _join(wish.text("vllm_host_mirror_git"), ""),
        "network_hub": tree_url(context),
        # Small, and the plan needs it before the model is there.
        "model_config": shard_url(context, "config.json"),
        "network_apt": "",
    }
    for entry in apt_sources.read_all(host.root):
        if entry.enabled and entry.uri.startswith("http") and "nvidia" not in entry.uri:
            flat = set(entry.suite) <= set("./")
            found["network_apt"] = entry.uri + (
                "/InRelease" if flat else f"/dists/{entry.suite}/InRelease"
            )
            break
    if wish.text("vllm_host_mirror_apt"):
        found["network_apt"] = _join(wish.text("vllm_host_mirror_apt"), "dists/noble/InRelease")
    return found


def _join(base: str, path: str) -> str:
    return f"{base.rstrip('/')}/{path}" if base else ""


def tree_url(context: Context) -> str:
    """Return the Hub's address of the model's list of files."""
    wish = context.wish
    hub, repo = wish.text("vllm_host_mirror_hub"), wish.text("hf_model_repo")
    revision = quote(wish.text("hf_model_revision"), safe="")
    return _join(hub, f"api/models/{repo}/tree/{revision}?recursive=true") if hub and repo else ""


def shard_url(context: Context, path: str) -> str:
    """Return the Hub's address of one of the model's files."""
    wish = context.wish
    hub, repo = wish.text("vllm_host_mirror_hub"), wish.text("hf_model_repo")
    revision = quote(wish.text("hf_model_revision"), safe="")
    return _join(hub, f"{repo}/resolve/{revision}/{quote(path)}") if hub and repo else ""


def python_index(context: Context) -> str:
    """Return the package index that uv will use: the variable's, or the box's own.

    Empty when the box configures none: then uv's own default is used, which only uv knows.
    """
    own = context.wish.text("vllm_host_mirror_python")
    if own:
        return own
    host = context.host
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        value = environment(context).get(name)
        if value:
            return value
    for file in ("/etc/uv/uv.toml", "/etc/pip.conf", "/etc/xdg/pip/pip.conf"):
        match = re.search(
            r"^\s*(?:index-url|default-index|url)\s*=\s*[\"']?(https?://[^\s\"']+)",
            host.read(file) or "",
            re.MULTILINE,
        )
        if match:
            return match.group(1)
    return ""


def environment(context: Context) -> dict[str, str]:
    """Return the variables of ``/etc/environment``, which logins and roles see."""
    found = {}
    for line in (context.host.read("/etc/environment") or "").splitlines():
        key, mark, value = line.strip().removeprefix("export ").partition("=")
        if mark and re.fullmatch(r"\w+", key):
            found[key] = value.strip("\"'")
    return found


def answers(context: Context) -> Mapping[str, Answer]:
    """Ask all sources at the same time, once; id to answer."""
    if "network" not in context.memo:
        wanted = {name: url for name, url in sources(context).items() if url.startswith("http")}
        if not context.wish.flag("preflight_network"):
            wanted = {}
        with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as pool:
            found = dict(zip(wanted, pool.map(lambda n: _ask(context, n, wanted[n]), wanted),
                             strict=True))  # fmt: skip
        context.memo["network"] = found
    result: Mapping[str, Answer] = context.memo["network"]
    return result


def _ask(context: Context, name: str, url: str) -> Answer:
    timeout = float(context.wish.whole("preflight_network_timeout") or 5)
    limit = _TREE_LIMIT if name in ("network_hub", "model_config") else 1
    answer: Answer = context.host.fetch("GET", url, timeout=timeout, limit=limit)
    # The Hub sends a mirror's reader on within the same site: follow a few such steps.
    for _ in range(3):
        target = answer.headers.get("location", "")
        if answer.status not in (301, 302, 303, 307, 308) or not target:
            break
        url = urljoin(url, target)
        answer = context.host.fetch("GET", url, timeout=timeout, limit=limit)
    return answer


def model_files(context: Context) -> list[dict[str, Any]]:
    """Return the Hub's list of the model's files; empty when it did not tell."""
    answer = answers(context).get("network_hub")
    if answer is None or answer.status != 200:
        return []
    try:
        document = json.loads(answer.body)
    except ValueError:
        return []
    if not isinstance(document, list):
        return []
    return [entry for entry in document if isinstance(entry, dict) and entry.get("type") == "file"]


def _entry_size(entry: Mapping[str, Any]) -> int:
    lfs = entry.get("lfs")
    size = lfs.get("size") if isinstance(lfs, Mapping) else entry.get("size")
    return size if isinstance(size, int) and size > 0 else 0


def hub_size(context: Context) -> int:
    """Return the model's size in bytes by the Hub's list; 0 when it is unknown."""
    return sum(_entry_size(entry) for entry in model_files(context))


def model_config(context: Context) -> dict[str, Any]:
    """Return the model's config.json, from the host or else from the Hub; empty when neither."""
    answer = answers(context).get("model_config")
    fetched = answer.body.decode("utf-8", "replace") if answer and answer.status == 200 else ""
    text = context.host.read(f"{context.wish.text('hf_model_path')}/config.json") or fetched
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _needed(context: Context, name: str) -> bool:
    """Whether a run would still fetch from a source."""
    wish, host = context.wish, context.host
    if name == "network_hub":
        return not host.exists(f"{wish.text('hf_model_path')}/config.json")
    if name == "network_nvidia":
        return not wish.cpu and not host.exists(f"{wish.text('cuda_toolkit_home')}/bin/nvcc")
    return not host.exists(f"{wish.text('vllm_host_prefix')}/current/release.json")


def _source(context: Context, name: str, what: str, variable: str) -> Outcome:
    """Judge one source by its answer."""
    url = sources(context)[name]
    if not url and name == "network_python":
        return skipped("this box configures no package index; uv's own default is not asked")
    if not url:
        return skipped(f"this stack fetches nothing from {what}")
    if url.startswith("file:"):
        path = urlsplit(url).path
        if context.host.exists(path):
            return passed(f"{path} is there")
        return failed(f"{what}: '{path}' is not there", url, f"set {variable}")
    if not url.startswith("http"):
        return skipped(f"{what} is no address that can be asked: '{url}'")
    answer = answers(context).get(name)
    if answer is None:
        return skipped("not asked (preflight_network: false)")
    place = urlsplit(url).netloc.rpartition("@")[2]
    if answer.status == 0:
        status = failed if _needed(context, name) else warned
        return status(
            f"{what} does not answer: '{place}' ({answer.error})",
            url,
            f"set {variable} to a mirror that this host reaches, or a proxy in /etc/environment",
        )
    if answer.status == 429:
        return warned(f"{what}: rate limited by '{place}'", url, "wait some minutes")
    if answer.status >= 500:
        return warned(f"{what}: '{place}' answers {answer.status}", url, "try again later")
    if answer.status == 404:
        return warned(
            f"{what}: '{place}' answers, but has not what is wanted (404)", url, f"check {variable}"
        )
    return passed(f"{place} answers ({answer.status})", url)


@check("network", "network_apt")
def network_apt(context: Context) -> Outcome:
    """Check that Ubuntu's archive answers."""
    return _source(context, "network_apt", "the package archive", "vllm_host_mirror_apt")


@check("network", "network_nvidia")
def network_nvidia(context: Context) -> Outcome:
    """Check that NVIDIA's repository answers."""
    return _source(context, "network_nvidia", "NVIDIA's repository", "vllm_host_mirror_nvidia")


@check("network", "network_python")
def network_python(context: Context) -> Outcome:
    """Check that the Python package index answers."""
    return _source(context, "network_python", "the Python index", "vllm_host_mirror_python")


@check("network", "network_pytorch")
def network_pytorch(context: Context) -> Outcome:
    """Check that the index of PyTorch's CUDA wheels answers."""
    return _source(context, "network_pytorch", "PyTorch's index", "vllm_host_mirror_pytorch")


@check("network", "network_vllm")
def network_vllm(context: Context) -> Outcome:
    """Check that the index of vLLM's CUDA wheels answers."""
    return _source(context, "network_vllm", "vLLM's index", "vllm_host_mirror_vllm")


@check("network", "network_git")
def network_git(context: Context) -> Outcome:
    """Check that the git server answers."""
    outcome = _source(context, "network_git", "the git server", "vllm_host_mirror_git")
    if "404" in outcome.summary:
        # The prefix itself need not be a page; repositories lie below it.
        return passed("the git server answers", outcome.evidence)
    return outcome


@check("network", "network_hub")
def network_hub(context: Context) -> Outcome:
    """Check that the Hub answers and has the model at the wanted revision."""
    outcome = _source(context, "network_hub", "the Hub", "vllm_host_mirror_hub")
    answer = answers(context).get("network_hub")
    if answer is None or answer.status == 0:
        return outcome
    wish = context.wish
    name = f"'{wish.text('hf_model_repo')}' at '{wish.text('hf_model_revision')}'"
    status = failed if _needed(context, "network_hub") else warned
    if answer.status in (401, 403):
        return status(
            f"the Hub refuses {name} ({answer.status}): private, gated or misspelt",
            tree_url(context),
            "check hf_model_repo; for a gated model give the host a token (hf auth login)",
        )
    if answer.status == 404:
        return status(
            f"the Hub has no {name}",
            tree_url(context),
            "check hf_model_repo and hf_model_revision",
        )
    if answer.status == 200 and not model_files(context):
        return status(
            f"the Hub's list of files of {name} cannot be read",
            tree_url(context),
            "check vllm_host_mirror_hub: the mirror has to speak the Hub's protocol",
        )
    if answer.status == 200:
        return passed(
            f"{len(model_files(context))} files, {gib(hub_size(context))}", tree_url(context)
        )
    return outcome


@check("network", "network_shard")
def network_shard(context: Context) -> Outcome:
    """Check that the host that really sends the weights answers."""
    wish = context.wish
    weights = [e for e in model_files(context) if str(e.get("path", "")).endswith(".safetensors")]
    if not weights:
        return skipped("the Hub did not tell the model's files")
    largest = max(weights, key=_entry_size)
    url = shard_url(context, str(largest["path"]))
    timeout = float(wish.whole("preflight_network_timeout") or 5)
    hub = urlsplit(url).netloc
    status = failed if _needed(context, "network_hub") else warned
    for _ in range(4):
        answer: Answer = context.host.fetch("HEAD", url, timeout=timeout, limit=1)
        place = urlsplit(url).netloc
        if answer.status == 0 and place != hub:
            return status(
                f"'{hub}' answered, but sends the weights from '{place}', which does not answer "
                f"({answer.error})",
                url,
                _CHOICES,
            )
        if answer.status == 0:
            return status(
                f"'{place}' does not answer for a weight file ({answer.error})", url, _CHOICES
            )
        target = answer.headers.get("location", "")
        if answer.status not in (301, 302, 303, 307, 308) or not target:
            break
        url = urljoin(url, target)
    if answer.status == 429:
        return warned(f"rate limited by '{place}'", url, "wait some minutes")
    # Signed addresses are often valid for GET alone: a refusal of HEAD still is an answer.
    if answer.status in (200, 206, 403, 405):
        size = answer.headers.get("content-length", "")
        if answer.status == 200 and size == "0":
            return warned(
                f"'{place}' says that {largest['path']} has 0 bytes",
                url,
                "sizes come from the Hub's list instead; if the download fails, " + _CHOICES,
            )
        return passed(f"weights come from '{place}'", url.split("?")[0])
    return status(f"'{place}' answers {answer.status} for {largest['path']}", url, _CHOICES)


@check("network", "network_proxy")
def network_proxy(context: Context) -> Outcome:
    """Check that Proxy settings are complete and of one mind."""
    found = {**environment(context)} if context.host.exists("/etc/environment") else {}
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "no_proxy", "NO_PROXY"):
        if name in os.environ:
            found.setdefault(name, os.environ[name])
    apt = ""
    for file in [
        "/etc/apt/apt.conf",
        *(f"/etc/apt/apt.conf.d/{n}" for n in context.host.listdir("/etc/apt/apt.conf.d")),
    ]:
        match = re.search(
            r"Acquire::https?::[Pp]roxy\s+\"([^\"]+)\"", context.host.read(file) or ""
        )
        apt = match.group(1) if match else apt
    http = found.get("http_proxy") or found.get("HTTP_PROXY") or ""
    https = found.get("https_proxy") or found.get("HTTPS_PROXY") or ""
    if not http and not https:
        if apt and apt.upper() != "DIRECT":
            return warned(
                f"apt uses the proxy '{_without_password(apt)}', everything else none",
                "/etc/apt/apt.conf.d",
                "if the host needs it, write https_proxy and http_proxy to /etc/environment",
            )
        if not context.host.exists("/etc/environment"):
            return skipped("no proxy is seen; /etc/environment is not there")
        return passed("no proxy")
    if not https:
        return warned(
            f"http_proxy is set ('{_without_password(http)}'), https_proxy is not: "
            "most downloads go past it",
            "/etc/environment",
            "set https_proxy, too",
        )
    none = found.get("no_proxy") or found.get("NO_PROXY") or ""
    if "127.0.0.1" not in none and "localhost" not in none:
        return warned(
            "no_proxy lacks localhost and 127.0.0.1: requests to the service itself would go to "
            "the proxy",
            "/etc/environment",
            "add no_proxy=localhost,127.0.0.1",
        )
    return passed(f"https_proxy '{_without_password(https)}'")


def _without_password(address: str) -> str:
    return re.sub(r"//[^/@]*@", "//", address)
