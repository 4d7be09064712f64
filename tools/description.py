"""The links of Markdown files, and README.md's made absolute in a wheel and in an sdist.

Both carry README.md as their description, which PyPI shows on a page of its own: a relative link or picture leads
nowhere there. Where project.urls of pyproject.toml has a repository, the links of the description lead to the tag of
the version there. Without one they stay as they are, and the table of `make release` says so.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import re
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

#: A link of Markdown that is relative and leads to a file: what is between its parentheses.
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?=\))")

#: Files that a page shows: their address is that of the bytes, not that of a page about them.
_PICTURES = {".png", ".svg"}

_METADATA = re.compile(r"[^/]+\.dist-info/METADATA|[^/]+/PKG-INFO")


class Description(NamedTuple):
    """What a wheel or an sdist says of itself (METADATA or PKG-INFO), with the fields that its links need."""

    text: str
    version: str
    #: That of project.urls; "" without one.
    repository: str

    @classmethod
    def parse(cls, text: str) -> Description:
        """Reads the fields at its beginning."""
        head = text.partition("\n\n")[0]
        version = re.search(r"^Version: (\S+)$", head, re.MULTILINE)
        url = re.search(r"^Project-URL: repository, (\S+?)/?$", head, re.MULTILINE | re.IGNORECASE)
        return cls(text, version[1] if version else "", url[1].removesuffix(".git") if url else "")

    def relative(self) -> list[str]:
        """Where its relative links lead."""
        return [found["target"] for found in LINK.finditer(self.text)]

    def absolute(self) -> str:
        """The text with every link absolute; unchanged without a repository."""

        def lead(found: re.Match[str]) -> str:
            kind = "raw" if Path(found["target"]).suffix in _PICTURES else "blob"
            return f"{self.repository}/{kind}/v{self.version}/{found['target']}{found['anchor'] or ''}"

        return LINK.sub(lead, self.text) if self.repository else self.text


def of(path: Path) -> Description:
    """That of a wheel or an sdist."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            text = archive.read(next(filter(_METADATA.fullmatch, archive.namelist())))
    else:
        with tarfile.open(path) as archive:
            file = archive.extractfile(next(filter(_METADATA.fullmatch, archive.getnames())))
            assert file is not None, path
            text = file.read()
    return Description.parse(text.decode())


def complete(path: Path) -> None:
    """Makes the links in the description of a wheel or an sdist absolute, where they can be."""
    found = of(path)
    text = found.absolute().encode()
    if text == found.text.encode():
        return
    new = path.with_name(f"{path.name}.new")
    (_in_wheel if path.suffix == ".whl" else _in_sdist)(path, new, text)
    new.replace(path)


def _in_wheel(path: Path, new: Path, text: bytes) -> None:
    """Writes a wheel anew with another METADATA, whose digest is in RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(text).digest()).rstrip(b"=").decode()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(new, "w") as archive:
        for one in old.infolist():
            data = old.read(one)
            if _METADATA.fullmatch(one.filename):
                data = text
            elif one.filename.endswith(".dist-info/RECORD"):
                line = r"(?m)^(\S+\.dist-info/METADATA),.*$"
                data = re.sub(line, rf"\1,sha256={digest},{len(text)}", data.decode()).encode()
            archive.writestr(one, data, compresslevel=9)


def _in_sdist(path: Path, new: Path, text: bytes) -> None:
    """Writes an sdist anew with another PKG-INFO."""
    packed = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=packed, mode="w") as archive:
        for one in old:
            data = old.extractfile(one)
            if _METADATA.fullmatch(one.name):
                one.size, data = len(text), io.BytesIO(text)
            archive.addfile(one, data)
    new.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
