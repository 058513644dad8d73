"""Encrypted connections to the database."""

import ssl
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from storage.errors import SettingsError

MODES = ("disable", "require", "verify-ca", "verify-full")


class DatabaseAddress(NamedTuple):
    """A URL without the options that say how to encrypt, and what they said; None: not encrypted."""

    url: str
    encryption: ssl.SSLContext | None


def database_address(url: str, ca_file: Path | None) -> DatabaseAddress:
    """Takes libpq's `sslmode` and `sslrootcert` out of a PostgreSQL URL: the driver knows neither.

    As in libpq, `require` checks no certificate unless there is an authority to check it against. Without `sslmode`, a
    certificate authority of the settings asks for `verify-full`.

    Raises:
        SettingsError: the mode is unknown, or the authority's file cannot be read.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    root = options.pop("sslrootcert", None) or (str(ca_file) if ca_file else None)
    mode = options.pop("sslmode", "verify-full" if root else "disable")
    plain = urlunsplit(parts._replace(query=urlencode(options)))
    if mode not in MODES:
        raise SettingsError(f"PLATEMAKER_DATABASE_URL: sslmode must be one of {', '.join(MODES)}.")
    if mode == "disable":
        return DatabaseAddress(plain, None)
    try:
        context = ssl.create_default_context(cafile=root)
    except OSError as exc:
        raise SettingsError(f"PLATEMAKER_DATABASE_URL: sslrootcert {root} holds no certificates.") from exc
    context.check_hostname = mode == "verify-full"
    if mode == "require" and root is None:
        context.verify_mode = ssl.CERT_NONE
    return DatabaseAddress(plain, context)
