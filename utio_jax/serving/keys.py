# SPDX-License-Identifier: Apache-2.0
"""API keys: a file of their SHA-256 hashes, read again when it changes."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from pathlib import Path

_LINE = re.compile(r"([0-9a-fA-F]{64})(?:\s+(\S+))?")

_MOMENT = 10**9
"""Nanoseconds in which a file may change twice and look the same: clocks of files are coarse."""


class Keys:
    """Keys that are let in. The file holds hashes alone, so who reads it learns none."""

    def __init__(self, file: Path) -> None:
        """Reads a file: on each line the SHA-256 of a key in hex, and a name for logs if wanted.

        Raises:
          ValueError: it cannot be read, a line is something else, or it holds none.
        """
        self._file = file
        self._read: tuple[int, ...] | None = None
        self._names: dict[bytes, str] = {}
        self._load()
        if not self._names:
            raise ValueError(
                f"Wanted at least one key in {file}. Got none. Make one: openssl rand -hex 24, and "
                "write its SHA-256 there: printf %s KEY | sha256sum."
            )

    def name_of(self, authorization: str | None) -> str | None:
        """Returns the name of the key in a header `Authorization: Bearer KEY`; None: no such key.

        All hashes are compared, each in constant time: how long it takes tells nothing.
        """
        try:
            self._load()
        except ValueError:  # Half-written: the next request reads it again. Nobody is let in.
            return None
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogatepass")).digest()
        found = None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found if scheme.lower() == "bearer" and key else None

    def _load(self) -> None:
        try:
            stat = self._file.stat()
            found = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if found == self._read:
                return
            # Of a file that has just changed it may not be the last change of this moment.
            settled = time.time_ns() - stat.st_mtime_ns > _MOMENT
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            self._names, self._read = {}, None
            raise ValueError(f"Wanted a file of keys at {self._file}. {error}.") from error
        names = {}
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None:
                self._names, self._read = {}, None
                raise ValueError(
                    "Wanted lines of a key's SHA-256 in 64 hex digits, and a name if wanted. Got "
                    f"something else in line {number} of {self._file}: printf %s KEY | sha256sum."
                )
            digest, name = match.groups()
            names[bytes.fromhex(digest)] = name or digest[:8].lower()
        self._names, self._read = names, found if settled else None
