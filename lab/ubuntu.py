"""How a box presents itself as Ubuntu 24.04 (values of the release's own files)."""

from __future__ import annotations

OS_RELEASE = """\
PRETTY_NAME="Ubuntu 24.04.4 LTS"
NAME="Ubuntu"
VERSION_ID="24.04"
VERSION="24.04.4 LTS (Noble Numbat)"
VERSION_CODENAME=noble
ID=ubuntu
ID_LIKE=debian
HOME_URL="https://www.ubuntu.com/"
SUPPORT_URL="https://help.ubuntu.com/"
BUG_REPORT_URL="https://bugs.launchpad.net/ubuntu/"
PRIVACY_POLICY_URL="https://www.ubuntu.com/legal/terms-and-policies/privacy-policy"
UBUNTU_CODENAME=noble
LOGO=ubuntu-logo
"""

LSB_RELEASE = """\
DISTRIB_ID=Ubuntu
DISTRIB_RELEASE=24.04
DISTRIB_CODENAME=noble
DISTRIB_DESCRIPTION="Ubuntu 24.04.4 LTS"
"""

DPKG_ORIGIN = """\
Vendor: Ubuntu
Vendor-URL: http://www.ubuntu.com/
Bugs: https://bugs.launchpad.net/ubuntu/+filebug
Parent: Debian
"""


def presentation() -> dict[str, str]:
    """Files of the box that say which distribution it is: path -> content."""
    return {
        "/usr/lib/os-release": OS_RELEASE,
        "/etc/lsb-release": LSB_RELEASE,
        "/etc/debian_version": "trixie/sid\n",
        "/etc/issue": "Ubuntu 24.04.4 LTS \\n \\l\n\n",
        "/etc/issue.net": "Ubuntu 24.04.4 LTS\n",
        "/etc/dpkg/origins/ubuntu": DPKG_ORIGIN,
    }
