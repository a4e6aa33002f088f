"""exp(n A / L) at each position by torch's matrix exponential, for a skew-symmetric A of blocks."""

import torch


def generator(entries, width):
    """A skew-symmetric matrix, from what stands above its diagonal, row by row."""
    matrix, left = torch.zeros(width, width, dtype=entries.dtype), iter(entries)
    for i in range(width):
        for j in range(i + 1, width):
            unit = torch.zeros(width, width, dtype=entries.dtype)
            unit[i, j], unit[j, i] = 1, -1
            matrix = matrix + unit * next(left)
    return matrix


def moved(above, shape, q, k, positions):
    """`above` (heads or 1, blocks, entries): what stands above the diagonal of each block, row by row."""
    above = above.expand(shape.n_heads, -1, -1)
    width = shape.head_dim // above.shape[1]
    heads = [torch.block_diag(*(generator(entries, width) for entries in blocks)) for blocks in above]
    step = torch.stack(heads) / shape.train_length  # (H, Dh, Dh)
    rotation = torch.linalg.matrix_exp(positions[:, None, :, None, None] * step[:, None])  # (1|B, H, T, Dh, Dh)
    return {"q": (rotation @ q[..., None])[..., 0], "k": (rotation @ k[..., None])[..., 0]}
