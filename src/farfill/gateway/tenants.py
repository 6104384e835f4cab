"""Who calls: API keys, compared in constant time. Not here: what a tenant may use (there are no quotas yet)."""

import hashlib
import hmac
from collections.abc import Sequence
from typing import Final

from farfill.errors import ClientError
from farfill.gateway.settings import Tenant

ANYBODY: Final = "anybody"  # the tenant's name where there are none
_BEARER: Final = "bearer "


class Tenants:
    """Keeps digests only: the keys themselves stand in the configuration."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._digests = [(_digest(tenant.api_key.encode()), tenant.name) for tenant in tenants]

    def authenticate(self, authorization: str | None) -> str:
        """The tenant's name for an `Authorization` header.

        Raises:
            ClientError: `unauthorized`. The message never repeats what was sent.
        """
        if not self._digests:
            return ANYBODY
        if authorization is None or not authorization.lower().startswith(_BEARER):
            raise ClientError("unauthorized", "send an API key: 'Authorization: Bearer <key>'")
        # Surrogates stand for header bytes that are no UTF-8: no key has them, and they must not end in a crash.
        given = _digest(authorization[len(_BEARER) :].strip().encode("utf-8", "surrogateescape"))
        found: str | None = None
        for digest, name in self._digests:  # all of them, so that the time does not tell which
            if hmac.compare_digest(digest, given):
                found = name
        if found is None:
            raise ClientError("unauthorized", "this API key is not known here")
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
