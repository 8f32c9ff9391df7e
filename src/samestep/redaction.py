"""Hides secrets in what samestep prints, writes and sends to trackers: by the names of settings."""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"token|.*(access|api|auth|bearer|bot|github|hf|hub|refresh|session|wandb)[_-]?token"
    r"|.*(password|passwd|passphrase|secret|credentials?)|.*(access|api|auth|private|secret)[_-]?key(_id)?",
    re.IGNORECASE,
)


def hide_secrets(value: Any, name: str = "") -> Any:
    """Return a value in which the texts whose names are those of secrets are replaced by "(hidden)".

    Args:
        value: a setting, or a mapping or list of settings; at any depth.
        name: the setting's name.

    Example::

        >>> hide_secrets({"api_key": "x7", "pad_token": "<pad>", "db": {"password": "y", "port": 1}})
        {'api_key': '(hidden)', 'pad_token': '<pad>', 'db': {'password': '(hidden)', 'port': 1}}
    """
    if isinstance(value, Mapping):
        return {key: hide_secrets(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        hidden = [hide_secrets(inner, name) for inner in value]
        return hidden if isinstance(value, list) else tuple(hidden)
    return HIDDEN if isinstance(value, str | bytes) and value and _SECRET.fullmatch(name) else value
