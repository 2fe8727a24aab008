"""URLs in messages and records, without their passwords."""

from __future__ import annotations

import re
from urllib.parse import unquote

# The password of a URL ends at the last @, as unescaped ones may be in it.
_PASSWORD = re.compile(r"(?P<user>://(?!/)[^:]*):(?P<secret>.*)@", re.DOTALL)
_QUERY_PASSWORD = re.compile(
    r"(?P<name>[?&][^=&]*(?:pass|pwd|secret|token|key|credential)[^=&]*=)(?P<secret>[^&]*)",
    re.DOTALL | re.IGNORECASE,
)


def without_password(url: str) -> str:
    """A storage's URL with `user:password@` cut to `user@`, and passwords of its query to `***`."""
    return _PASSWORD.sub(r"\g<user>@", _QUERY_PASSWORD.sub(r"\g<name>***", url))


def passwords(url: str) -> list[str]:
    """The passwords in a storage's URL, as they are written and as they are read."""
    without_query = _QUERY_PASSWORD.sub(r"\g<name>", url)
    secrets = [match["secret"] for match in _QUERY_PASSWORD.finditer(url)]
    secrets += [match["secret"] for match in _PASSWORD.finditer(without_query)]
    return [each for secret in secrets if secret for each in (secret, unquote(secret))]
