"""The model: a GPT that knows no encoding, attention, and the loss."""

IGNORED = -100  # a label that is not scored, as torch's cross-entropy has it
