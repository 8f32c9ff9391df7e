"""Trackers: destinations of metrics besides `metrics.jsonl`. One module for each service."""
