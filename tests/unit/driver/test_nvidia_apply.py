"""A plan carried out, killed, started again, and taken back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from driver_kit import (
    COMPUTE,
    KERNEL,
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
from vllm_turing.nvidia_apply import ApplyError
from vllm_turing.run import Result


@pytest.fixture
def live(box: Box, monkeypatch: pytest.MonkeyPatch) -> Box:
    """A box whose packages really change, without locks to wait for."""
    box.live = True
    monkeypatch.setattr(nvidia_apply.Apt, "_wait", lambda _self: None)
    return box


def run(box: Box, **over: Any) -> nvidia_driver.Plan:
    """Plan and apply; the module's own two steps."""
    wanted = wish(**over)
    seen = host(box, wanted)
    plan = nvidia_driver.make_plan(wanted, seen)
    if plan.changes:
        nvidia_apply.apply(plan, wanted, seen)
    return plan


def debs(box: Box, version: str, *names: str) -> None:
    for name in names or COMPUTE:
        box.write(f"/var/cache/vllm-turing/driver/{version}/{name}_{version}_amd64.deb")


def test_install_then_nothing_more(live: Box) -> None:
    healthy_kernel(live, "580.159.03")
    offered(live, (V159, UBUNTU))
    assert run(live).action == "install"
    assert {live.packages[name] for name in COMPUTE} == {(V159, "hi")}
    loaded(live, "580.159.03")
    assert run(live).action == "none"
    record = nvidia_driver.Record("/var/lib/vllm-turing", live.root).read()
    assert (record["package_version"], record["complete"]) == (V159, True)


def test_an_upgrade_keeps_the_old_packages_and_releases_and_sets_the_holds(live: Box) -> None:
    installed(live)
    healthy_kernel(live, "580.159.03")
    loaded(live, "580.159.03")
    offered(live, (V159, UBUNTU), (V173, UBUNTU))
    run(live)
    for name in COMPUTE:
        live.write(f"/var/cache/apt/archives/{name}_{V159}_amd64.deb")
    healthy_kernel(live, "580.173.02")
    assert run(live, version="580.173.02").action == "change"
    assert {live.packages[name] for name in COMPUTE} == {(V173, "hi")}
    kept = live.root / f"var/cache/vllm-turing/driver/{V159}"
    assert len(list(kept.glob("*.deb"))) == len(COMPUTE)
    verbs = [words[1] for words in live.ran if words[0] == "apt-mark"]
    assert verbs[-2:] == ["unhold", "hold"]
    previous = nvidia_apply.previous(wish(), live.root)
    assert previous["complete"] is True
    assert previous["packages"] == dict.fromkeys(COMPUTE, V159)


def upgraded(live: Box) -> None:
    test_an_upgrade_keeps_the_old_packages_and_releases_and_sets_the_holds(live)


def test_the_previous_driver_comes_back_without_network_and_stays(live: Box) -> None:
    upgraded(live)
    live.ran.clear()
    wanted = wish(version="580.173.02")
    nvidia_apply.restore(wanted, host(live, wanted), "nvidia-smi sees no card")
    assert {live.packages[name] for name in COMPUTE} == {(V159, "hi")}
    (transaction,) = live.commands("apt-get")
    # apt knows no archive in this call, so that nothing can be fetched from one.
    assert "Dir::Etc::sourceparts=/dev/null" in transaction
    assert "Dir::Etc::sourcelist=/dev/null" in transaction
    assert not [word for word in transaction if word.endswith(f"={V159}")]
    record = nvidia_driver.Record("/var/lib/vllm-turing", live.root).read()
    assert record["failed"] == {"version": "580.173.02", "reason": "nvidia-smi sees no card"}
    healthy_kernel(live, "580.159.03")
    assert run(live).action == "none"


def test_a_way_back_that_lacks_a_package_is_refused_by_name(live: Box) -> None:
    upgraded(live)
    path = live.root / f"var/cache/vllm-turing/driver/{V159}/nvidia-utils-580_{V159}_amd64.deb"
    path.unlink()
    wanted = wish()
    with pytest.raises(ApplyError, match=f"nvidia-utils-580 {V159} has gone"):
        nvidia_apply.restore(wanted, host(live, wanted))
    assert live.packages["nvidia-utils-580"] == (V173, "hi")


def test_a_way_back_that_fails_leaves_the_holds_on(live: Box) -> None:
    upgraded(live)
    live.simulations[f"nvidia-utils-580_{V159}"] = Result((), 100, "", "E: broken\n")
    wanted = wish()
    with pytest.raises(ApplyError, match=r"the previous driver is not back: .*E: broken"):
        nvidia_apply.restore(wanted, host(live, wanted))
    assert {live.packages[name] for name in COMPUTE} == {(V173, "hi")}


def test_a_failed_transaction_is_one_sentence_and_leaves_a_way_back(live: Box) -> None:
    installed(live)
    healthy_kernel(live, "580.159.03")
    loaded(live, "580.159.03")
    offered(live, (V159, UBUNTU), (V173, UBUNTU))
    debs(live, V159)
    run(live)
    wanted = wish(version="580.173.02")
    seen = host(live, wanted)
    plan = nvidia_driver.make_plan(wanted, seen)
    live.simulations["nvidia-dkms-580="] = Result(
        (), 100, "", "E: Sub-process /usr/bin/dpkg returned an error code (1)\n"
    )
    with pytest.raises(ApplyError, match="the packages cannot be installed"):
        nvidia_apply.apply(plan, wanted, seen)
    record = nvidia_driver.Record("/var/lib/vllm-turing", live.root).read()
    assert record["complete"] is False
    live.simulations.clear()
    nvidia_apply.restore(wanted, host(live, wanted))
    assert {live.packages[name] for name in COMPUTE} == {(V159, "hi")}


def test_a_killed_upgrade_goes_on_and_its_snapshot_is_not_spoilt(live: Box) -> None:
    upgraded(live)
    # Killed in the middle: two packages are still old, nothing is held.
    for name in COMPUTE:
        live.packages[name] = (V173, "ii")
    live.packages["nvidia-utils-580"] = (V159, "ii")
    live.packages["nvidia-dkms-580"] = (V173, "iU")
    plan = run(live, version="580.173.02")
    assert plan.action == "change"
    assert {live.packages[name] for name in COMPUTE} == {(V173, "hi")}
    assert nvidia_apply.previous(wish(), live.root)["package_version"] == V159
    assert run(live, version="580.173.02").action == "none"


def test_a_stale_initramfs_is_rebuilt(live: Box) -> None:
    healthy_kernel(live, "580.159.03")
    offered(live, (V159, UBUNTU))
    image = live.write(f"/boot/initrd.img-{KERNEL}")
    live.write("/etc/modprobe.d/vllm-turing-nouveau.conf", "blacklist nouveau\n")
    os.utime(image, (1, 1))
    live.answers["update-initramfs"] = Result((), 0)
    run(live)
    assert ["update-initramfs", "-u", "-k", KERNEL] in live.ran
    live.answers["update-initramfs"] = Result((), 1, "", "No space left on device\n")
    with pytest.raises(ApplyError, match=r"update-initramfs failed .* No space left on device"):
        run(live)


def test_a_module_that_does_not_build_names_its_log(live: Box) -> None:
    installed(live)
    healthy_kernel(live, None)
    offered(live, (V159, UBUNTU))
    live.write("/var/lib/dkms/nvidia/580.159.03/build/make.log", "nv.c:1: error: broken\n")
    live.answers["dkms install"] = Result((), 10, "", "Error! Bad return status\n")
    with pytest.raises(ApplyError) as error:
        run(live)
    assert "Bad return status" in str(error.value)
    assert "see /var/lib/dkms/nvidia/580.159.03/build/make.log" in str(error.value)


def test_packages_of_older_drivers_are_thrown_away(live: Box) -> None:
    debs(live, "570.1-0ubuntu1")
    upgraded(live)
    folder = live.root / "var/cache/vllm-turing/driver"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [V159, V173]


def test_the_record_cannot_be_led_astray_by_a_link(live: Box, tmp_path: Path) -> None:
    folder = live.root / "var/lib/vllm-turing"
    folder.mkdir(parents=True)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "driver.json").symlink_to(victim)
    nvidia_driver.Record("/var/lib/vllm-turing", live.root).write({"a": 1})
    assert victim.read_text() == "precious"
    assert not (folder / "driver.json").is_symlink()


def test_release_lets_go_of_our_holds_only_and_keeps_the_driver(live: Box) -> None:
    healthy_kernel(live, "580.159.03")
    offered(live, (V159, UBUNTU))
    run(live)
    live.packages["firefox"] = ("1", "hi")
    wanted = wish()
    told = nvidia_apply.release(wanted, host(live, wanted), check=True)
    assert live.packages["nvidia-utils-580"][1] == "hi"
    assert nvidia_apply.release(wanted, host(live, wanted)) == told
    assert {live.packages[name] for name in COMPUTE} == {(V159, "ii")}
    assert live.packages["firefox"][1] == "hi"
    assert not (live.root / nvidia_driver.PREFERENCES.lstrip("/")).exists()
    assert nvidia_apply.release(wanted, host(live, wanted)) == []
