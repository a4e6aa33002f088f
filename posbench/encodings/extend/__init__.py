"""Context extension: a trained encoding made to reach beyond its training length, without further training.

A method returns a new encoding that shares the trained one's parameters; the trained one is not changed. The annotation
of its first parameter lists the encodings that it supports. A wrapper applies it to those of its inner encodings. A
factor s is length / train_length by default (dynamic: nothing changes up to the training length). A fixed s gives the
same model at every length, at a price at the training length too.
"""

_METHODS = {
    "frequencies": ("pi", "ntk", "dynamic_ntk", "ntk_by_parts", "yarn", "llama3", "longrope", "abf", "clipped_rope"),
    "far_pairs": ("rerope", "leaky_rerope", "self_extend", "dual_chunk"),
    "squeezed": ("alibi_pi", "interpolate"),
}
# The module of each method, which is a function of that name.
NAMES = {name: module for module, names in _METHODS.items() for name in names}
