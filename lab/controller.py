"""What the lab must know about the controller: archive, certificates, indexes, limits."""

from __future__ import annotations

import configparser
import os
import re
import resource
import shutil
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lab.command import Runner, run
from lab.errors import LabError

# Program -> package that brings it, the same names on Debian 12 and Ubuntu 24.04.
NEEDED = {
    "podman": "podman",
    "runc": "runc",
    "debootstrap": "debootstrap",
    "slirp4netns": "slirp4netns",
    "ssh": "openssh-client",
    "dpkg-deb": "dpkg",
    "apt-ftparchive": "apt-utils",
    "gpg": "gnupg",
    "gcc": "gcc",
    "ip": "iproute2",
    "git": "git",
}
NEEDED_FILES = {
    "/usr/include/stdio.h": "libc6-dev",
    # Podman 4 will not start without it, whatever network it is told to use.
    "/usr/lib/podman/netavark": "netavark",
}
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT")
PROXY_VARIABLES = ("http_proxy", "https_proxy", "no_proxy", "ftp_proxy", "all_proxy")
APT_OPTIONS = (
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
    "Acquire::http::Proxy",
    "Acquire::https::Proxy",
    "Acquire::Retries",
)
CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----\n.*?\n-----END CERTIFICATE-----\n?", re.DOTALL
)


@dataclass(frozen=True)
class AptSource:
    """One enabled binary source: address, suites, components and the keyring that signs it."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str = ""


@dataclass(frozen=True)
class Limits:
    """Resource limits a container may get here; podman's own defaults can be above them."""

    nofile: int
    nproc: int


@dataclass(frozen=True)
class Indexes:
    """Python package indexes that the controller itself uses."""

    index: str = ""
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Controller:
    """Everything about the controller that goes into a lab host."""

    distribution: str
    codename: str
    sources: tuple[AptSource, ...]
    apt_options: tuple[tuple[str, str], ...]
    proxies: tuple[tuple[str, str], ...]
    certificates: tuple[str, ...]
    indexes: Indexes = field(default_factory=Indexes)

    @property
    def base(self) -> AptSource:
        """The source that holds the distribution itself."""
        for source in self.sources:
            if self.codename in source.suites and "main" in source.components:
                return source
        raise LabError(
            f"No apt source of this machine offers '{self.codename} main'; "
            "add the distribution's own archive to /etc/apt."
        )


def parse_os_release(text: str) -> dict[str, str]:
    """Parse os-release text into its variables."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, mark, value = line.strip().partition("=")
        if mark and not name.startswith("#"):
            found[name] = value.strip().strip("\"'")
    return found


def parse_one_line_sources(text: str) -> list[AptSource]:
    """Parse the one-line format of sources.list; binary sources only."""
    found = []
    for raw in text.splitlines():
        line = raw.split("#", 1)[0].strip()
        match = re.fullmatch(r"deb\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)((?:\s+\S+)*)", line)
        if not match:
            continue
        options = dict(part.split("=", 1) for part in (match.group(1) or "").split() if "=" in part)
        found.append(
            AptSource(
                match.group(2),
                (match.group(3),),
                tuple(match.group(4).split()),
                options.get("signed-by", ""),
            )
        )
    return found


def parse_deb822_sources(text: str) -> list[AptSource]:
    """Parse the deb822 format of *.sources; enabled binary sources only."""
    found = []
    for block in re.split(r"\n\s*\n", text):
        fields: dict[str, str] = {}
        last = ""
        for line in block.splitlines():
            if line.startswith("#"):
                continue
            if line[:1].isspace() and last:
                fields[last] += "\n" + line.strip()
            elif ":" in line:
                name, value = line.split(":", 1)
                last = name.strip().lower()
                fields[last] = value.strip()
        enabled = fields.get("enabled", "yes").lower() not in ("no", "false", "0")
        if "deb" not in fields.get("types", "").split() or not enabled:
            continue
        signed_by = fields.get("signed-by", "")
        for uri in fields.get("uris", "").split():
            found.append(
                AptSource(
                    uri,
                    tuple(fields.get("suites", "").split()),
                    tuple(fields.get("components", "").split()),
                    # An embedded key block is no path: the default keyrings must do then.
                    signed_by if signed_by.startswith("/") and "\n" not in signed_by else "",
                )
            )
    return found


def read_apt_sources(etc_apt: Path) -> list[AptSource]:
    """All enabled binary sources below /etc/apt, in apt's own order."""
    found: list[AptSource] = []
    main = etc_apt / "sources.list"
    if main.is_file():
        found += parse_one_line_sources(main.read_text(encoding="utf-8", errors="replace"))
    parts = etc_apt / "sources.list.d"
    for path in sorted(parts.iterdir()) if parts.is_dir() else []:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        if path.suffix == ".list":
            found += parse_one_line_sources(text)
        elif path.suffix == ".sources":
            found += parse_deb822_sources(text)
    return found


def distribution_sources(sources: Iterable[AptSource], codename: str) -> list[AptSource]:
    """Keep the sources of the distribution itself, not third parties' archives."""
    kept = []
    for source in sources:
        suites = tuple(s for s in source.suites if re.fullmatch(rf"{codename}(-[a-z]+)?", s))
        components = tuple(
            # without 'restricted': the real driver packages must not meet the lab's
            c
            for c in source.components
            if c in ("main", "universe")
        )
        if suites and "main" in components and source.uri.startswith(("http://", "https://")):
            kept.append(AptSource(source.uri, suites, components, source.signed_by))
    return kept


def parse_apt_config(dump: str) -> list[tuple[str, str]]:
    """Pick the options that decide how an archive is reached out of 'apt-config dump'."""
    found: dict[str, str] = {}
    for match in re.finditer(r'^(\S+) "(.*)";$', dump, re.MULTILINE):
        name, value = match.groups()
        if value and any(name == o or name.startswith(o + "::") for o in APT_OPTIONS):
            found[name] = value
    return sorted(found.items())


def proxies(environment: Mapping[str, str]) -> list[tuple[str, str]]:
    """Proxy variables of the environment, lower-case names, empty ones left out."""
    found = {}
    for name in PROXY_VARIABLES:
        value = environment.get(name) or environment.get(name.upper())
        if value:
            found[name] = value
    return sorted(found.items())


def split_certificates(bundle: str) -> list[str]:
    """Split a PEM bundle into its certificates."""
    return [m.group(0).strip() + "\n" for m in CERTIFICATE.finditer(bundle)]


def local_certificates(
    environment: Mapping[str, str],
    bundle: Path = SYSTEM_BUNDLE,
    public: Path = Path("/usr/share/ca-certificates"),
) -> list[str]:
    """Certificates this machine trusts beyond the public ones (a company's or a proxy's)."""
    bundles = [bundle, *(Path(environment[v]) for v in BUNDLE_VARIABLES if environment.get(v))]
    known = set()
    for path in public.rglob("*.crt") if public.is_dir() else []:
        known.update(split_certificates(path.read_text(encoding="ascii", errors="replace")))
    found: dict[str, None] = {}
    for path in bundles:
        if path.is_file():
            text = path.read_text(encoding="ascii", errors="replace")
            found.update(dict.fromkeys(c for c in split_certificates(text) if c not in known))
    # Without the public set nothing can be told apart; the whole bundle is carried then.
    return list(found)


def python_indexes(environment: Mapping[str, str], files: Iterable[Path]) -> Indexes:
    """Package indexes from the variables and files of pip and uv; folders are left out."""
    index = ""
    extra: list[str] = []
    for path in files:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        if path.suffix == ".toml":
            try:
                data = tomllib.loads(text)
            except tomllib.TOMLDecodeError:
                continue
            index = str(data.get("index-url", index))
            extra += [str(u) for u in data.get("extra-index-url", [])]
            for entry in data.get("index", []):
                if entry.get("default"):
                    index = str(entry.get("url", index))
        else:
            parser = configparser.RawConfigParser(strict=False)
            try:
                parser.read_string(text)
            except configparser.Error:
                continue
            index = parser.get("global", "index-url", fallback=index)
            extra += parser.get("global", "extra-index-url", fallback="").split()
    for name in ("PIP_INDEX_URL", "UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        index = environment.get(name) or index
    for name in ("PIP_EXTRA_INDEX_URL", "UV_EXTRA_INDEX_URL"):
        extra += environment.get(name, "").split()
    remote = [u for u in dict.fromkeys(extra) if u.startswith(("http://", "https://"))]
    return Indexes(index if index.startswith(("http://", "https://")) else "", tuple(remote))


def limits() -> Limits:
    """Hard limits of this process: a container asking for more would not start here.

    Podman lowers its own process limit to 32768, so no more than that can be asked for where the
    capability to raise it again is missing.
    """

    def within(kind: int, ceiling: int) -> int:
        hard = resource.getrlimit(kind)[1]
        return ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)

    return Limits(within(resource.RLIMIT_NOFILE, 1048576), within(resource.RLIMIT_NPROC, 32768))


def oci_runtime(cgroup_root: Path = Path("/sys/fs/cgroup")) -> str:
    """Name the OCI runtime that works here: crun refuses the hybrid cgroup layout."""
    unified = (cgroup_root / "cgroup.controllers").is_file()
    order = ("crun", "runc") if unified else ("runc",)
    for program in order:
        if shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin"):
            return program
    raise LabError(f"No OCI runtime is installed; install the package '{order[-1]}'.")


def require_root() -> None:
    """Raise LabError unless the process is root: containers, mounts and packages need it."""
    if os.geteuid() != 0:
        raise LabError(
            f"The lab needs root and runs as user id '{os.geteuid()}'; start it with sudo."
        )


def missing_packages() -> list[str]:
    """Return the packages that the controller lacks for the lab."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    lacking = {pkg for prog, pkg in NEEDED.items() if not shutil.which(prog, path=path)}
    lacking |= {pkg for name, pkg in NEEDED_FILES.items() if not Path(name).exists()}
    return sorted(lacking)


def install_packages(packages: list[str], log: Path, runner: Runner = run) -> None:
    """Install packages on the controller with apt; raise LabError that names what is missing."""
    if not shutil.which("apt-get"):
        raise LabError(
            f"The lab needs {', '.join(packages)} and this machine has no apt-get; install them."
        )
    try:
        runner(["apt-get", "-q", "update"], timeout=300, log=log)
        runner(
            ["apt-get", "-q", "-y", "--no-install-recommends", "install", *packages],
            timeout=900,
            log=log,
        )
    except LabError as error:
        raise LabError(
            f"The packages '{' '.join(packages)}' could not be installed (no network?); "
            f"see '{log}'."
        ) from error


def detect(environment: Mapping[str, str] | None = None, runner: Runner = run) -> Controller:
    """Look at this machine and return what a lab host takes over from it."""
    env = os.environ if environment is None else environment
    release = parse_os_release(Path("/etc/os-release").read_text(encoding="utf-8"))
    distribution = release.get("ID", "")
    codename = release.get("VERSION_CODENAME", "")
    if distribution not in ("debian", "ubuntu") or not codename:
        raise LabError(
            f"The lab builds on Debian 12 or Ubuntu 24.04, and this machine is '{distribution}'."
        )
    config = [
        Path("/etc/xdg/pip/pip.conf"),
        Path("/etc/pip.conf"),
        Path.home() / ".config/pip/pip.conf",
        Path.home() / ".pip/pip.conf",
        Path("/etc/uv/uv.toml"),
        Path.home() / ".config/uv/uv.toml",
    ]
    return Controller(
        distribution=distribution,
        codename=codename,
        sources=tuple(distribution_sources(read_apt_sources(Path("/etc/apt")), codename)),
        apt_options=tuple(parse_apt_config(runner(["apt-config", "dump"]))),
        proxies=tuple(proxies(env)),
        certificates=tuple(local_certificates(env)),
        indexes=python_indexes(env, config),
    )
