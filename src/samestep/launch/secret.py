"""The secret that the nodes of a launch share. docs/security.md describes the threat model."""

import hmac
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from samestep.errors import Error
from samestep.files import open_regular, read_bytes
from samestep.world.environment import SECRET, take_secret
from samestep.world.workdir import PREFIX, make_private, read_private

SECRET_BYTES = 32
MIN_SECRET = 16  # characters
MAX_SECRET_BYTES = 1 << 16


def make_secret() -> str:
    """Return a new secret, as hexadecimal digits."""
    return secrets.token_hex(SECRET_BYTES)


def read_secret(file: str | None) -> str:
    """Return the secret from the file that `--rdzv-secret` names, else from SAMESTEP_RDZV_SECRET; "" if neither is set.

    Removes the variable, so that child processes do not inherit it. Raises Error if the file cannot be read, other
    users can read it, or the secret is too short.
    """
    secret = take_secret().strip()
    source = SECRET
    if file is not None:
        source = f"--rdzv-secret {file}"
        try:
            mode = Path(file).stat().st_mode
            secret = read_bytes(Path(file), MAX_SECRET_BYTES, is_given=True).decode().strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise Error(
                f"{source} cannot be read ({reason}): name a file that holds the secret", code="SS508"
            ) from None
        if stat.S_IMODE(mode) & 0o077:
            raise Error(f"{source} can be read by other users: chmod 600 {file}", code="SS508")
    if (file is not None or secret) and len(secret) < MIN_SECRET:
        raise Error(
            f"{source} has {len(secret)} characters: use at least {MIN_SECRET} random ones, such as `openssl rand "
            "-hex 32` prints",
            code="SS508",
        )
    return secret


def share_secret() -> str:
    """Return the secret that all launchers of this user on this machine share. The first call creates it.

    It is in a directory that only this user can enter, so that no other user can join at a loopback address. Raises
    Error if that directory belongs to another user, or cannot be written.
    """
    file = Path(tempfile.gettempdir()) / f".{PREFIX}{os.geteuid()}" / "secret"
    try:
        make_private(file.parent)
        if not file.exists():
            partial = file.with_name(secrets.token_hex(8))
            try:
                with open(partial, "x", opener=open_regular) as opened:
                    os.fchmod(opened.fileno(), 0o600)
                    opened.write(make_secret())
                with suppress(FileExistsError):  # another launcher was faster
                    os.link(partial, file)
            finally:
                partial.unlink(missing_ok=True)
        secret = read_private(file).decode()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise Error(
            f"the secret of this user's launchers, {file}, cannot be made ({reason}): set {SECRET}", code="SS508"
        ) from None
    if len(secret) < MIN_SECRET:
        raise Error(f"{file} is damaged: remove it", code="SS508")
    return secret


def derive_key(secret: str, purpose: str) -> str:
    """Derive a key for another purpose, from which the secret cannot be computed."""
    return hmac.new(secret.encode(), f"samestep key for {purpose}".encode(), "sha256").hexdigest()
