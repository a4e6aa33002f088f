"""Context extension: a trained encoding made to reach beyond its training length, without further training.

A method takes the trained encoding and gives back another that shares its parameters; nothing is written to the trained
one. Which encodings a method is for, the annotation of its first parameter says; an encoding around others hands it on
to those that it is for. Where a method has a factor s, it is length / train_length by default (dynamic: nothing changes
up to the training length), or fixed (the same model at every length, which has a price at the training length too).
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
