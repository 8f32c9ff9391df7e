"""Adapters that train models written for other trainers."""
