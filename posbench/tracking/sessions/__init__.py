"""Trackers: a class per file with the methods of `Session`, made as `cls(config,
run)`.
"""
