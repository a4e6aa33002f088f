"""Run folders: who owns one, and what stands in it."""
