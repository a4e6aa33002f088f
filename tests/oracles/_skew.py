"""exp(n A / L) at each position by torch's matrix exponential, for a skew-symmetric A of blocks."""

import torch


def moved(above, shape, q, k, positions):
    """`above` (heads or 1, blocks, entries): what stands above the diagonal of each block, row by row."""
    above = above.expand(shape.n_heads, -1, -1)
    width = shape.head_dim // above.shape[1]
    heads = []
    for head in range(shape.n_heads):
        blocks = []
        for entries in above[head]:
            block, left = torch.zeros(width, width, dtype=above.dtype), iter(entries)
            for i in range(width):
                for j in range(i + 1, width):
                    unit = torch.zeros(width, width, dtype=above.dtype)
                    unit[i, j], unit[j, i] = 1, -1
                    block = block + unit * next(left)
            blocks.append(block)
        heads.append(torch.block_diag(*blocks))
    generator = torch.stack(heads) / shape.train_length  # (H, Dh, Dh)
    rotation = torch.linalg.matrix_exp(positions[:, None, :, None, None] * generator[:, None])  # (1|B, H, T, Dh, Dh)
    return {"q": (rotation @ q[..., None])[..., 0], "k": (rotation @ k[..., None])[..., 0]}
