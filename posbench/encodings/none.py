"""No positional encoding (NoPE).

Nothing is added anywhere:  logits_ij = q_i·k_j / sqrt(d).  Without a causal mask such a model cannot tell a sentence
from its shuffle; with one, order enters only through the number of keys that each query sees.

Source: Haviv et al., "Transformer Language Models without Positional Encodings Still Learn Positional Information"
(2022), arXiv:2203.16634; Kazemnejad et al. (2023), arXiv:2305.19466.
Beyond training length: defined everywhere; loss usually rises, since attention spreads over more keys than trained.
Checked against: torch scaled_dot_product_attention.
"""

from posbench.encodings.base import Encoding


class NoPE(Encoding):
    name = "none"
