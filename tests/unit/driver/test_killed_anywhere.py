"""A run killed at any command converges when started again.

Killed before the command, after it took effect, or in the middle of a transaction: half of the
packages changed, and one of them unpacked but not configured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from driver_kit import (
    COMPUTE,
    UBUNTU,
    V159,
    V173,
    Box,
    healthy_kernel,
    host,
    installed,
    loaded,
    offered,
    wish,
)

from vllm_turing import nvidia_apply, nvidia_driver
from vllm_turing.run import Result


class Killed(BaseException):
    """The run was killed."""


class KillableBox(Box):
    """A box on which the run dies at its N-th command; 0 never."""

    at = 0
    when = "before"
    count = 0

    def __call__(self, argv: Sequence[str], **options: Any) -> Result:
        KillableBox.count += 1
        if KillableBox.count == KillableBox.at:
            if KillableBox.when == "after":
                super().__call__(argv, **options)
            elif KillableBox.when == "half" and argv[0] == "apt-get" and "-s" not in argv:
                self.half(list(argv), options)
            raise Killed
        return super().__call__(argv, **options)

    def half(self, argv: list[str], options: dict[str, Any]) -> None:
        """Carry out the first half of a transaction and leave its last package half done."""
        start = argv.index("install") + 1 if "install" in argv else len(argv)
        named = [word for word in argv[start:] if not word.startswith("--")]
        done = named[: len(named) // 2]
        switches = [word for word in argv[start:] if word.startswith("--")]
        super().__call__([*argv[:start], *switches, *done], **options)
        changed = [n for n in self.packages if any(f"{n}=" in w or f"/{n}_" in w for w in done)]
        if changed:
            version, _state = self.packages[changed[-1]]
            self.packages[changed[-1]] = (version, "iU")


def run(box: Box, version: str) -> nvidia_driver.Plan:
    wanted = wish(version=version, release_foreign_holds=False)
    seen = host(box, wanted)
    plan = nvidia_driver.make_plan(wanted, seen)
    if plan.changes:
        nvidia_apply.apply(plan, wanted, seen)
    return plan


def back(box: Box, version: str) -> None:
    wanted = wish(version=version)
    nvidia_apply.restore(wanted, host(box, wanted), "a test")


def fresh(box: Box) -> None:
    healthy_kernel(box, "580.159.03")
    offered(box, (V159, UBUNTU), (V173, UBUNTU))


def with_old(box: Box) -> None:
    fresh(box)
    installed(box, V159)
    loaded(box, "580.159.03")
    for name in COMPUTE:
        box.write(f"/var/cache/apt/archives/{name}_{V159}_amd64.deb")
    run(box, "580.159.03")
    healthy_kernel(box, "580.173.02")


def with_new(box: Box) -> None:
    with_old(box)
    run(box, "580.173.02")


def with_another_branch(box: Box) -> None:
    fresh(box)
    box.packages["libnvidia-compute-535"] = ("535.274.02-0ubuntu0.24.04.1", "ii")
    box.packages["nvidia-dkms-535"] = ("535.274.02-0ubuntu0.24.04.1", "ii")
    box.packages["nvidia-kernel-common-470"] = ("470.256.02-0ubuntu1", "rc")
    box.packages["cuda-toolkit-12-9"] = ("12.9.1-1", "ii")


@pytest.mark.parametrize("when", ["before", "after", "half"])
@pytest.mark.parametrize(
    ("prepare", "act", "version", "result"),
    [
        (fresh, run, "580.159.03", V159),
        (with_old, run, "580.173.02", V173),
        (with_another_branch, run, "580.159.03", V159),
        (with_new, back, "580.159.03", V159),
    ],
    ids=["install", "upgrade", "branch switch", "way back"],
)
def test_killed_at_every_command_in_turn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Box], None],
    act: Callable[[Box, str], Any],
    version: str,
    result: str,
    when: str,
) -> None:
    monkeypatch.setattr(nvidia_apply.Apt, "_wait", lambda _self: None)
    KillableBox.when = when
    for at in range(1, 200):
        KillableBox.at = 0
        box = KillableBox(tmp_path / f"{at}", live=True)
        prepare(box)
        KillableBox.at, KillableBox.count = at, 0
        try:
            act(box, version)
        except Killed:
            killed = True
        else:
            killed = False
        KillableBox.at = 0
        act(box, version)
        healthy_kernel(box, result.split("-")[0])
        loaded(box, result.split("-")[0])
        drivers = {n: p for n, p in box.packages.items() if n.startswith(("libnvidia", "nvidia"))}
        # A fresh box gets the metapackage; a compute-only host stays one.
        wanted = [*COMPUTE, *(["nvidia-driver-580"] if prepare is fresh else [])]
        assert drivers == dict.fromkeys(wanted, (result, "hi")), at
        last = run(box, version)
        assert last.action in ("none", "repair"), (at, last.steps)
        assert run(box, version).action == "none", at
        if prepare is with_another_branch:
            assert box.packages["cuda-toolkit-12-9"] == ("12.9.1-1", "ii")
        if not killed:
            break
    else:
        pytest.fail("the run never came to its end")
    assert at >= 8
