"""Trains models that were written for other trainers."""
