"""A positional encoding for posbench. Imported only when the encoding is asked for."""
