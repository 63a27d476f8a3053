"""apt's text output: versions and their origin, transactions, reasons, retries (case 59)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from driver_kit import NVIDIA, POLICY_FILES, UBUNTU, V159, V173

from vllm_turing import apt_client, apt_lock
from vllm_turing.apt_client import Apt, AptError
from vllm_turing.run import Result

POLICY = f"""\
libnvidia-compute-580:
  Installed: {V159}
  Candidate: {V173}
  Version table:
     {V173} 500 (phased 20%)
        500 {UBUNTU}
     580.159.04-1ubuntu1 -1
         -1 {NVIDIA}
 *** {V159} 100
        100 /var/lib/dpkg/status
nvidia-driver-999:
  Installed: (none)
  Candidate: (none)
  Version table:
"""


def test_versions_carry_the_origin_of_their_index() -> None:
    table = apt_client.parse_policy(POLICY, apt_client.parse_policy_files(POLICY_FILES))
    versions = {c.version: set(c.origins) for c in table["libnvidia-compute-580"]}
    # The installed version that no index has any more is no offer.
    assert versions == {V173: {"Ubuntu"}, "580.159.04-1ubuntu1": {"NVIDIA"}}
    assert table["nvidia-driver-999"] == []


def test_a_simulated_transaction_is_read() -> None:
    text = (
        f"Inst libnvidia-compute-580 [{V159}] ({V173} Ubuntu:24.04/noble-updates [amd64])\n"
        "Inst nvidia-firmware-580-580.173.02 (580.173.02-0ubuntu0.24.04.1 NVIDIA CUDA:x [amd64])\n"
        "Remv cuda-toolkit-12-9 [12.9.1-1]\nPurg nvidia-dkms-535:amd64 [535.1-1]\n"
        f"Conf libnvidia-compute-580 ({V173} Ubuntu:24.04/noble-updates [amd64])\n"
    )
    simulation = apt_client.Simulation(apt_client.parse_simulation(text))
    assert simulation.installs["libnvidia-compute-580"].old == V159
    assert simulation.installs["libnvidia-compute-580"].new == V173
    assert simulation.installs["nvidia-firmware-580-580.173.02"].old is None
    assert set(simulation.removes) == {"cuda-toolkit-12-9", "nvidia-dkms-535"}


@pytest.mark.parametrize(
    ("stderr", "words"),
    [
        (
            "W: GPG error: https://developer.download.nvidia.cn/compute/cuda/repos/ubuntu2404/x86_64"
            "  InRelease: The following signatures couldn't be verified because the public key "
            "is not available: NO_PUBKEY A4B469963BF863CC\nE: The repository is not signed.",
            "key missing: the signing key A4B469963BF863CC of "
            "'https://developer.download.nvidia.cn/compute/cuda/repos/ubuntu2404/x86_64'",
        ),
        (
            "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 2345 "
            "(unattended-upgr)\nE: Unable to acquire the dpkg frontend lock",
            "another package manager is at work: process 2345 (unattended-upgr)",
        ),
        (
            "The following packages have unmet dependencies:\n nvidia-driver-580 : Depends: "
            "libnvidia-gl-580 (= 580.159.03-0ubuntu0.24.04.1) but 580.173.02 is to be installed\n"
            "E: Unable to correct problems, you have held broken packages.",
            "nvidia-driver-580 depends libnvidia-gl-580",
        ),
        ("E: Unable to correct problems, you have held broken packages.", "packages on hold"),
        (
            "Consult /var/lib/dkms/nvidia/580.173.02/build/make.log for more information.\n"
            "dpkg: error processing package nvidia-dkms-580 (--configure):\n"
            "E: Sub-process /usr/bin/dpkg returned an error code (1)",
            "nvidia-dkms-580 cannot be configured: the module was not built, see "
            "/var/lib/dkms/nvidia/580.173.02/build/make.log",
        ),
        ("E: Version '1' for 'nvidia-utils-580' was not found", "no source has nvidia-utils-580=1"),
        ("E: Unable to locate package cuda-nvcc-12-9", "no source has cuda-nvcc-12-9"),
    ],
)
def test_the_raw_line_is_never_the_only_message(stderr: str, words: str) -> None:
    text = apt_client.explain(Result(("apt-get",), 100, "", stderr))
    assert words in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("stderr", "passes"),
    [
        ("Err:1 http://x noble InRelease\n  Temporary failure resolving 'x'", True),
        ("E: Failed to fetch http://x/a.deb  503  Service Unavailable [IP: 1.2.3.4 80]", True),
        ("E: Failed to fetch http://x/Packages  Hash Sum mismatch", True),
        ("E: Failed to fetch http://x/a.deb  404  Not Found [IP: 1.2.3.4 80]", False),
        ("E: Unable to correct problems, you have held broken packages.", False),
        ("W: GPG error: http://x InRelease: NO_PUBKEY A4B469963BF863CC timed out", False),
    ],
)
def test_only_what_passes_by_itself_is_tried_again(stderr: str, passes: bool) -> None:
    tries: list[Sequence[str]] = []

    def runner(argv: Sequence[str], **_options: Any) -> Result:
        tries.append(argv)
        return Result(tuple(argv), 100, "", stderr)

    apt = Apt(runner, sleep=lambda _s: None, wait_for_lock=lambda _t: 0.0)
    with pytest.raises(AptError):
        apt.update()
    assert len(tries) == (3 if passes else 1)


def test_no_dialog_and_no_service_restart_in_a_transaction() -> None:
    seen: dict[str, Any] = {}

    def runner(argv: Sequence[str], **options: Any) -> Result:
        seen.update(options, argv=list(argv))
        return Result(tuple(argv), 0)

    Apt(runner, wait_for_lock=lambda _t: 0.0).install(["x=1"])
    assert seen["env"]["DEBIAN_FRONTEND"] == "noninteractive"
    assert seen["env"]["NEEDRESTART_SUSPEND"] == "1"
    assert seen["env"]["NEEDRESTART_MODE"] == "l"
    assert "Dpkg::Options::=--force-confold" in seen["argv"]
    assert not any("unauthenticated" in word for word in seen["argv"])


# -- the lock (case 59) ---------------------------------------------------------------------------

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(1, flush=True)
time.sleep(60)
"""


def test_the_holder_of_a_real_lock_is_named_and_waited_for(tmp_path: Path) -> None:
    lock = tmp_path / "lock-frontend"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        held = apt_lock.holder(str(lock))
        assert held is not None
        assert held.pid == process.pid
        assert held.command.startswith("python")
        with pytest.raises(apt_lock.LockTimeout, match=f"process {process.pid} .*do not delete"):
            apt_lock.wait(0.2, [str(lock)])
        process.kill()
    start = time.monotonic()
    apt_lock.wait(10, [str(lock)])
    assert time.monotonic() - start < 2
    assert lock.exists()


def test_a_lock_file_without_a_process_is_no_lock(tmp_path: Path) -> None:
    stale = tmp_path / "lock"
    stale.write_text("")
    assert apt_lock.holder(str(stale)) is None
    assert apt_lock.wait(5, [str(stale), str(tmp_path / "absent")]) < 1
    assert stale.exists()


def test_forty_seconds_of_unattended_upgrades_are_waited_out() -> None:
    now = [0.0]
    held = apt_lock.Holder("/var/lib/dpkg/lock-frontend", 2345, "unattended-upgr")

    def sleep(seconds: float) -> None:
        now[0] += seconds

    waited = apt_lock.wait(
        600,
        ["x"],
        find=lambda _path: held if now[0] < 40 else None,
        sleep=sleep,
        clock=lambda: now[0],
    )
    assert 40 <= waited < 45
