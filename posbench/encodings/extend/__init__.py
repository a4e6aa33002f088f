"""Context extension: a trained encoding made to reach beyond its training length, without further training.

A method returns a new encoding that shares the trained one's parameters; the trained one is not changed. The annotation
of its first parameter lists the encodings that it supports. A wrapper applies it to those of its inner encodings. A
factor s is length / train_length by default (dynamic: nothing changes up to the training length). A fixed s gives the
same model at every length, at a price at the training length too.
"""

# The methods, each a function of that name in the module.
NAMES = {
    "pi": "frequencies",
    "ntk": "frequencies",
    "dynamic_ntk": "frequencies",
    "ntk_by_parts": "frequencies",
    "yarn": "frequencies",
    "llama3": "frequencies",
    "longrope": "frequencies",
    "abf": "frequencies",
    "clipped_rope": "frequencies",
    "rerope": "far_pairs",
    "leaky_rerope": "far_pairs",
    "self_extend": "far_pairs",
    "dual_chunk": "far_pairs",
    "alibi_pi": "squeezed",
    "interpolate": "squeezed",
}
