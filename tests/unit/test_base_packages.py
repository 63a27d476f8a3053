"""base_packages: dpkg answers, apt is asked only for what is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_turing import base_packages
from vllm_turing.apt_client import Apt
from vllm_turing.base_packages import BasePackagesError, Plan
from vllm_turing.run import Result

LISTED = "git\tamd64\t1:2.43\tii \nold\tamd64\t1\trc \nhalf\tamd64\t1\tiU \nkept\tamd64\t1\thi \n"


class FakeHost:
    """Answers dpkg-query and apt-get from texts and remembers what was asked."""

    def __init__(self, simulation: str = "", fails: str = "") -> None:
        self.calls: list[tuple[str, ...]] = []
        self.simulation, self.fails = simulation, fails

    def __call__(self, argv: Sequence[str], **_: Any) -> Result:
        command = tuple(argv)
        self.calls.append(command)
        if self.fails and self.fails in command:
            return Result(command, 100, stderr="E: Unable to locate package gpg\n")
        if command[0] == "dpkg-query":
            return Result(command, 0, stdout=LISTED)
        return Result(command, 0, stdout=self.simulation if "-s" in command else "")

    def apt(self) -> Apt:
        return Apt(self, wait_for_lock=lambda _: 0.0, sleep=lambda _: None)

    def ran(self, word: str) -> bool:
        return any(word in call and "-s" not in call for call in self.calls)


def test_what_dpkg_has_is_not_missing() -> None:
    plan = base_packages.make_plan(["git", "old", "half", "kept", "new"], FakeHost())
    assert plan.missing == ("old", "half", "new")


def test_nothing_missing_asks_no_apt() -> None:
    host = FakeHost()
    base_packages.install(Plan(()), host.apt())
    assert host.calls == []


def test_what_is_missing_is_installed() -> None:
    host = FakeHost("Inst gpg (2.4 Ubuntu:24.04/noble [amd64])\n")
    base_packages.install(Plan(("gpg",)), host.apt())
    assert host.ran("update")
    assert host.ran("install")


def test_nothing_is_removed_for_it() -> None:
    host = FakeHost("Remv nvidia-driver-580 [580.159.03]\nInst gpg (2.4 Ubuntu:24.04 [amd64])\n")
    with pytest.raises(BasePackagesError, match="would remove nvidia-driver-580"):
        base_packages.install(Plan(("gpg",)), host.apt())
    assert not host.ran("install")


def test_an_unknown_package_is_named() -> None:
    host = FakeHost(fails="-s")
    with pytest.raises(BasePackagesError, match="gpg"):
        base_packages.install(Plan(("gpg",)), host.apt())
    assert not host.ran("install")
