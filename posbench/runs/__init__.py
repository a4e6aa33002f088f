"""Run folders: who owns one, and what stands in it. Called, `posbench.runs(...)`, it reads them as a table."""
