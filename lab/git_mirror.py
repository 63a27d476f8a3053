"""The lab's git server: a stand-in for FlashQLA's SM70/SM75 fork, served as plain files.

The real repository holds GPU kernels that nothing in the lab can run. The stand-in has the same
layout, the same refusal to import on anything but SM90 and the same legacy entry point, so that
checkout, pinning, patching and the import test go through the same code as on a real box. Its
legacy kernel is the same recurrence written with plain torch operations.

The commit is built from the text in this file with a fixed author and date: its id is a constant
(:data:`COMMIT`) and can be pinned in an inventory. Git's "dumb" HTTP protocol needs no program on
the server, only the files that ``git update-server-info`` lists.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote

REPOSITORY = "weicj/FlashQLA-SM70-SM75"
#: The same repository under a name that says what it is; the lab's own stack uses this one.
ALIAS = "vllm-turing-lab/FlashQLA"
BRANCHES = ("main", "sm70-sm75-gdn-forward")
COMMIT = "2c661223dcab998f4bb4ac86947a39c65e13f8b0"
AUTHOR = "vllm-turing lab <lab@vllm-turing.invalid>"
DATE = "2026-05-18T00:00:00+00:00"
SUBJECT = "Stand-in for the SM70/SM75 fork of FlashQLA"
URL_PREFIX = "/git/"

_PACKAGE = '''\
"""Stand-in for FlashQLA (SM70/SM75 fork): the layout and the import rules, none of the kernels."""

__version__ = "0.1.0"

from flash_qla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]
'''

_OPS = '''\
"""Operators of the stand-in."""

from .gated_delta_rule import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]
'''

_GATED_DELTA_RULE = '''\
"""The gated delta rule: the SM90 kernel and, beside it, the legacy one."""

from .chunk import chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule"]
'''

_CHUNK = '''\
"""The SM90 kernel. The guard is the one thing here that the stand-in has in common with it."""


def _target_compute_version():
    """Return the compute capability of the first card, or "none"."""
    import torch

    if not torch.cuda.is_available():
        return "none"
    return "%d.%d" % torch.cuda.get_device_capability(0)


if _target_compute_version() != "9.0":
    raise ValueError("FlashQLA now support sm90 only.")


def chunk_gated_delta_rule(*args, **kwargs):
    """Stand-in: the lab has no SM90 card."""
    raise RuntimeError("the lab's stand-in for FlashQLA has no SM90 kernel")
'''

_LEGACY = '''\
"""The forward pass for SM70 and SM75."""

from .sm_legacy import chunk_gated_delta_rule_fwd_legacy

__all__ = ["chunk_gated_delta_rule_fwd_legacy"]
'''

_SM_LEGACY = '''\
"""Forward pass of the gated delta rule, token by token, in plain torch.

The real file builds csrc/gdn_forward.cu at the first call. This one computes the same recurrence on
any device, so that an import test and a numeric test have something true to look at.
"""

from __future__ import annotations

import torch


def chunk_gated_delta_rule_fwd_legacy(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [B, T, Hv, D] and final state [B, Hv, Dv, Dk] of the recurrence."""
    tensors = [q, k, v, g, beta, *([] if initial_state is None else [initial_state])]
    if any(tensor.dtype != torch.float32 for tensor in tensors):
        raise ValueError("legacy GDN backend currently supports float32 tensors only")
    if any(not tensor.is_contiguous() for tensor in tensors):
        raise ValueError("legacy GDN tensors must be contiguous")
    batch, tokens, q_heads, dim = q.shape
    heads = v.shape[2]
    if dim not in (16, 32, 64, 128):
        raise ValueError("legacy GDN backend supports D in {16, 32, 64, 128}")
    if heads % q_heads:
        raise ValueError("Hv must be divisible by Hq")
    scale = dim**-0.5 if scale is None else scale
    q = q.repeat_interleave(heads // q_heads, dim=2)
    k = k.repeat_interleave(heads // q_heads, dim=2)
    state = q.new_zeros(batch, heads, dim, dim) if initial_state is None else initial_state.clone()
    out = torch.empty_like(v)
    for t in range(tokens):
        key = k[:, t, :, None, :]
        state = state * g[:, t].exp()[:, :, None, None]
        delta = (v[:, t] - (state * key).sum(3)) * beta[:, t][:, :, None]
        state = state + delta[:, :, :, None] * key
        out[:, t] = (state * (q[:, t] * scale)[:, :, None, :]).sum(3)
    return out, state
'''

_CUDA = """\
// The real fork has its SM70/SM75 forward kernel here. The stand-in's is written in torch:
// see ../sm_legacy.py.
"""

_SETUP = '''\
"""Packaging of the stand-in; hosts use the checkout through PYTHONPATH instead."""

from setuptools import find_packages, setup

setup(
    name="flash_qla",
    version="0.1.0",
    packages=find_packages(),
    license="MIT",
    python_requires=">=3.10",
    install_requires=["torch>=2.8", "tilelang==0.1.8", "apache-tvm-ffi==0.1.9"],
    zip_safe=False,
)
'''

_README = """\
# A stand-in

This is **not** FlashQLA. It is what the lab of vllm-turing serves in its place: the layout and the
import rules of https://github.com/weicj/FlashQLA-SM70-SM75, with none of its kernels.
"""

FILES: dict[str, str] = {
    ".gitignore": "__pycache__/\n*.py[cod]\nbuild/\n*.egg-info/\n",
    "README.md": _README,
    "flash_qla/__init__.py": _PACKAGE,
    "flash_qla/ops/__init__.py": _OPS,
    "flash_qla/ops/gated_delta_rule/__init__.py": _GATED_DELTA_RULE,
    "flash_qla/ops/gated_delta_rule/chunk/__init__.py": _CHUNK,
    "flash_qla/ops/gated_delta_rule/legacy/__init__.py": _LEGACY,
    "flash_qla/ops/gated_delta_rule/legacy/csrc/gdn_forward.cu": _CUDA,
    "flash_qla/ops/gated_delta_rule/legacy/sm_legacy.py": _SM_LEGACY,
    "setup.py": _SETUP,
}


class GitMirrorError(Exception):
    """The repository could not be built; the text says why in one sentence."""


def digests() -> dict[str, str]:
    """Return the sha256 of every file of the stand-in."""
    return {path: hashlib.sha256(text.encode()).hexdigest() for path, text in FILES.items()}


def repository_path(state_dir: Path) -> Path:
    """Return where the bare repository lies below the lab's state folder."""
    return state_dir / "git" / f"{REPOSITORY}.git"


def prepare(state_dir: Path) -> Path:
    """Build the bare repository unless it is there at the right commit; return its path.

    :raises GitMirrorError: git is missing, fails, or gives another commit than :data:`COMMIT`
    """
    target = repository_path(state_dir)
    if target.is_dir() and _head(target) == COMMIT:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        bare = Path(scratch) / "bare.git"
        commit = _build(Path(scratch) / "work", bare)
        if commit != COMMIT:
            raise GitMirrorError(
                f"the stand-in for {REPOSITORY} got commit '{commit}' and not '{COMMIT}': its "
                "files were changed, so set COMMIT in lab/git_mirror.py and the lab stack's pin"
            )
        shutil.rmtree(target, ignore_errors=True)
        bare.rename(target)
    return target


def _build(work: Path, bare: Path) -> str:
    """Commit :data:`FILES` in ``work``, copy it to ``bare``, return the commit's id."""
    for path, text in FILES.items():
        file = work / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(0o644)
    _git(work, "init", "--quiet", f"--initial-branch={BRANCHES[0]}")
    _git(work, "add", "--all", "--force")
    _git(work, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "-m", SUBJECT)
    for branch in BRANCHES[1:]:
        _git(work, "branch", branch)
    _git(work, "clone", "--quiet", "--bare", "--no-hardlinks", str(work), str(bare))
    # One pack and the lists that the dumb protocol reads in place of a server program.
    _git(bare, "repack", "-a", "-d", "--quiet")
    _git(bare, "update-server-info")
    return _git(bare, "rev-parse", "HEAD")


def _head(bare: Path) -> str:
    """Return the commit that a bare repository serves, or "" when it serves none."""
    try:
        return _git(bare, "rev-parse", "HEAD")
    except GitMirrorError:
        return ""


def _git(folder: Path, *arguments: str) -> str:
    """Run git without the user's own settings and return its output."""
    program = shutil.which("git")
    if program is None:
        raise GitMirrorError("git is not installed here: install the package 'git'")
    name, address = AUTHOR.rstrip(">").split(" <")
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        **{f"GIT_{role}_NAME": name for role in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{role}_EMAIL": address for role in ("AUTHOR", "COMMITTER")},
        **{f"GIT_{role}_DATE": DATE for role in ("AUTHOR", "COMMITTER")},
    }
    command = [program, "-c", "core.autocrlf=false", *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if done.returncode:
        raise GitMirrorError(f"git {arguments[0]} failed in '{folder}': {done.stderr.strip()}")
    return done.stdout.strip()


class GitHandler:
    """Answer requests below ``/git/`` with the files of the repositories."""

    def __init__(self, state_dir: Path) -> None:
        """Serve the repositories of one lab's state folder."""
        self._root = (state_dir / "git").resolve()

    def handle(self, request: BaseHTTPRequestHandler, path: str) -> bool:
        """Answer one request.

        :param request: the server's handler of it
        :param path: its path, query included
        :returns: False when the path is not ours
        """
        if not path.startswith(URL_PREFIX):
            return False
        if request.command not in ("GET", "HEAD"):
            request.send_error(405, "the lab's git mirror is read-only")
            return True
        name = unquote(path.partition("?")[0].removeprefix(URL_PREFIX))
        if name.startswith(f"{ALIAS}.git/"):
            name = f"{REPOSITORY}.git/{name.partition('.git/')[2]}"
        file = (self._root / name).resolve()
        if not file.is_relative_to(self._root) or not file.is_file():
            request.send_error(404, f"no such file: {name}")
            return True
        content = file.read_bytes()
        request.send_response(200)
        request.send_header("Content-Type", "application/octet-stream")
        request.send_header("Content-Length", str(len(content)))
        request.send_header("Cache-Control", "no-cache")
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(content)
        return True


def create_handler(state_dir: Path) -> GitHandler:
    """Return the handler that the lab's mirror process calls for every request."""
    return GitHandler(state_dir)


def main() -> int:
    """Print the commit and the digests, for the lab's pins."""
    with tempfile.TemporaryDirectory() as scratch:
        print(_build(Path(scratch) / "work", Path(scratch) / "bare.git"))
    for path, digest in digests().items():
        print(digest, path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
