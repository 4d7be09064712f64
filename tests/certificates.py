"""A certificate authority for tests, by the program `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


class Authority:
    """Signs certificates. Its files are PEM, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("certificates need the program `openssl`")
        folder.mkdir()
        self._folder = folder
        self.certificate = folder / "ca.pem"
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-subj", "/CN=CA of a test", "-keyout", "ca.key", "-out", "ca.pem"),
            *("-addext", "keyUsage=critical,keyCertSign"),
        )

    def issue(self, name: str, *, days: int = 2) -> dict[str, str]:
        """Environment variables of a rank with a new certificate."""
        self._openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        extensions = self._folder / "extensions"
        extensions.write_text("basicConstraints=critical,CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth\n")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", str(days), "-extfile", "extensions", "-out", f"{name}.pem"),
        )
        return {
            "BAGUA_TLS": "1",
            "BAGUA_TLS_CERT": str(self._folder / f"{name}.pem"),
            "BAGUA_TLS_KEY": str(self._folder / f"{name}.key"),
            "BAGUA_TLS_CA": str(self.certificate),
        }

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._folder, check=True, capture_output=True)
