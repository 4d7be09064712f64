"""Valid values of BAGUA_TLS and its files. Everything else is a ValueError before anything is sent."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

import bagua
from bagua import config
from tests.certificates import Authority


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BAGUA_TLS", "BAGUA_TLS_CERT", "BAGUA_TLS_KEY", "BAGUA_TLS_CA", "BAGUA_JOB_SECRET"):
        monkeypatch.delenv(name, raising=False)


def refused(match: str) -> None:
    # No process listens at the port: an attempt to communicate would take until the timeout.
    with pytest.raises(ValueError, match=match):
        bagua.init(0, 2, "tcp://127.0.0.1:9", timeout=1000)


def set_all(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_tls_needs_a_secret_or_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_TLS", "1")
    refused("BAGUA_TLS=1 needs BAGUA_JOB_SECRET")
    monkeypatch.setenv("BAGUA_JOB_SECRET", "s")
    assert config.settings().tls is not None
    monkeypatch.setenv("BAGUA_TLS", "0")
    assert config.settings().tls is None
    monkeypatch.setenv("BAGUA_TLS", "perhaps")
    refused("BAGUA_TLS='perhaps'")


def test_a_part_of_the_files_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BAGUA_TLS_CERT", "a.pem")
    refused("BAGUA_TLS_CERT set without BAGUA_TLS")
    monkeypatch.setenv("BAGUA_TLS", "1")
    refused("set without BAGUA_TLS_KEY and BAGUA_TLS_CA")


def test_certificates_that_fit_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    set_all(monkeypatch, Authority(tmp_path / "ca").issue("rank"))
    assert config.settings().tls is not None


def test_files_that_cannot_be_used_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ca, other = Authority(tmp_path / "ca"), Authority(tmp_path / "other")
    good = ca.issue("rank")
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no PEM")
    encrypted, encrypted_pkcs1 = str(tmp_path / "encrypted.pem"), str(tmp_path / "encrypted_pkcs1.pem")
    for form in ([encrypted], [encrypted_pkcs1, "-traditional"]):
        options = ["-aes128", "-passout", "pass:word", "-in", good["BAGUA_TLS_KEY"]]
        subprocess.run(["openssl", "pkey", *options, "-out", *form], check=True)
    cases = [
        ({"BAGUA_TLS_CERT": str(tmp_path / "none")}, r"BAGUA_TLS_CERT='.*none' cannot be read: No such file"),
        ({"BAGUA_TLS_KEY": str(tmp_path)}, r"BAGUA_TLS_KEY='.*' cannot be read: Is a directory"),
        ({"BAGUA_TLS_CERT": str(garbage)}, "the certificate: no certificate in PEM"),
        ({"BAGUA_TLS_KEY": str(garbage)}, "the private key: no private key in PEM"),
        ({"BAGUA_TLS_KEY": encrypted}, "the private key: it is encrypted"),
        ({"BAGUA_TLS_KEY": encrypted_pkcs1}, "the private key: it is encrypted"),
        ({"BAGUA_TLS_CA": str(garbage)}, "the CA: no certificate in PEM"),
        ({"BAGUA_TLS_KEY": ca.issue("second")["BAGUA_TLS_KEY"]}, "the private key: it is not that of the certificate"),
        ({"BAGUA_TLS_CA": str(other.certificate)}, "the certificate: the other ranks would refuse it"),
    ]
    for changed, why in cases:
        set_all(monkeypatch, good | changed)
        refused(re.escape(why) if "\\" not in why and "*" not in why else why)
