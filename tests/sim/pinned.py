"""Scenarios in which a promise was broken once, or which find a planted fault: what was wrong -> scenario."""

PINNED: dict[str, str] = {}
