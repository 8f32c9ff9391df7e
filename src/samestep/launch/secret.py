"""The secret that the nodes of a launch share. docs/security.md describes the threat model."""

import hmac

from samestep.errors import Error
from samestep.world.environment import SECRET, take_secret

MIN_SECRET = 16  # characters


def read_secret() -> str:
    """Return the secret from SAMESTEP_RDZV_SECRET; "" if it is not set.

    Removes the variable, so that child processes do not inherit it. Raises Error if the secret is too short.
    """
    secret = take_secret().strip()
    if secret and len(secret) < MIN_SECRET:
        raise Error(
            f"{SECRET} has {len(secret)} characters: use at least {MIN_SECRET} random ones, such as `openssl rand "
            "-hex 32` prints",
            code="SS508",
        )
    return secret


def derive_key(secret: str, purpose: str) -> str:
    """Derive a key for another purpose, from which the secret cannot be computed."""
    return hmac.new(secret.encode(), f"samestep key for {purpose}".encode(), "sha256").hexdigest()
