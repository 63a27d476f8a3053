"""A key is stored only when its fingerprint is the wanted one."""

from __future__ import annotations

import pytest

from vllm_turing import apt_key

#: Made for this test with gpg; its fingerprint is what gpg says.
ARMOURED = b"""\
-----BEGIN PGP PUBLIC KEY BLOCK-----

mDMEaw3E/BYJKwYBBAHaRw8BAQdAwc7UowNXcEgxW3HNJWrCfBIpdO74riALhbc7
dbA5aV60J3Rlc3QgYXJjaGl2ZSA8dGVzdEB2bGxtLXR1cmluZy5pbnZhbGlkPoiQ
BBMWCAA4FiEEpFogQcdDELt5wXVDd/TJvjMEO7MFAmsNxPwCGwMFCwkIBwIGFQoJ
CAsCBBYCAwECHgECF4AACgkQd/TJvjMEO7OQtgD/XWTvKQV3wt0rBIdfGd67/4r0
NtEghQSLKsa/dJ6q7vcBAMAjV7j4iQ27wR5AxhOJoSekyjHt0OFdJ5troKDPDsYI
=KK34
-----END PGP PUBLIC KEY BLOCK-----
"""
FINGERPRINT = "A45A2041C74310BB79C1754377F4C9BE33043BB3"


def test_the_fingerprint_is_gpgs() -> None:
    assert apt_key.fingerprints(ARMOURED) == [FINGERPRINT]
    assert apt_key.fingerprints(apt_key.dearmor(ARMOURED)) == [FINGERPRINT]


def test_the_right_key_comes_out_binary() -> None:
    spaced = " ".join(FINGERPRINT[i : i + 4] for i in range(0, 40, 4)).lower()
    assert apt_key.verified(ARMOURED, spaced, "x")[:1] == b"\x98"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (ARMOURED, "not 'EB693B3035CD5710E231E123A4B469963BF863CC'"),
        (b"<html>captive portal</html>", "damaged"),
        (ARMOURED.replace(b"mDME", b"mDM"), "damaged"),
        (b"-----BEGIN PGP MESSAGE-----\n\nabc\n", "no OpenPGP public key block"),
        (apt_key.dearmor(ARMOURED)[:1] + b"\xff", "no OpenPGP|damaged"),
        (b"", "no OpenPGP public key"),
    ],
    ids=["another key", "a web page", "damaged", "a message", "cut", "empty"],
)
def test_everything_else_is_refused_in_one_sentence(data: bytes, words: str) -> None:
    with pytest.raises(apt_key.KeyProblem, match=words):
        apt_key.verified(data, "EB693B3035CD5710E231E123A4B469963BF863CC", "http://x/3bf863cc.pub")


def test_a_source_that_cannot_be_reached_is_named() -> None:
    with pytest.raises(
        apt_key.KeyProblem, match=r"'http://127\.0\.0\.1:1/k\.pub' cannot be fetched"
    ):
        apt_key.fetch("http://127.0.0.1:1/k.pub", sleep=lambda _s: None)
