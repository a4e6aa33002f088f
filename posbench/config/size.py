"""How large a configuration's model is, and whether this machine can hold it: by arithmetic, before any work."""

from posbench import machine
from posbench.config.schema import Config, ModelConfig
from posbench.errors import UserError

_BYTES_OF_TRAINING = 16  # of a parameter: its value, its gradient and Adam's two averages, in fp32
_BYTES_OF_READING = 4
_BYTES_OF_LAYER = 25_000  # what its objects take in Python, beside its parameters
_GIB = 2**30


def parameters(config: Config, vocab_size: int) -> int:
    """Parameters of the model without those of its encoding; with a code that is concatenated it has a few less."""
    model = config.model
    width, matrices = model.d_model, 3 if model.mlp == "swiglu" else 2
    block = 2 * width + 4 * width**2 + matrices * width * hidden_width(model)
    tables = 1 if model.tie_embeddings else 2
    return model.n_layers * block + width + tables * vocab_size * width


def hidden_width(model: ModelConfig) -> int:
    """Channels of the feed-forward part, `model.d_ff` or what stands for its null."""
    if model.d_ff is not None:
        return model.d_ff
    # 8/3 of the width gives three matrices the parameters of two of 4 times it; rounded up to a multiple of 32.
    return -(-8 * model.d_model // 96) * 32 if model.mlp == "swiglu" else 4 * model.d_model


def memory(config: Config, training: bool) -> int:
    """Bytes that training, or reading one window, takes at the very least."""
    model, settings = config.model, config.training
    vocab_size = config.data.vocab_size if config.data.tokenizer == "bpe" else 257  # a file's is not known yet
    weights = parameters(config, vocab_size) * (_BYTES_OF_TRAINING if training else _BYTES_OF_READING)
    weights += model.n_layers * _BYTES_OF_LAYER
    if not training:
        return weights + settings.train_length * (model.d_model + hidden_width(model)) * 2
    # What a backward pass needs of each token: eight vectors a layer, both sides of the activation, and the logits.
    kept = model.n_layers * (8 * model.d_model + 2 * hidden_width(model)) + vocab_size
    return weights + settings.batch_size * settings.train_length * kept * (4 if settings.precision == "fp32" else 2)


def fits(config: Config) -> bool:
    """Whether the CPU of this machine can hold the model."""
    limit = machine.memory_limit("cpu")
    return limit is None or memory(config, training=False) <= limit[0]


def refuse_too_large(config: Config, device: str, training: bool) -> None:
    """Refuse what cannot be held, before any of it is made.

    Args:
        device: that it would run on.
        training: whether it would be trained, not read only.

    Raises:
        UserError: the model would need more memory than there is, with the estimate.
    """
    for where, trained in ((device, training), ("cpu", False)):  # it is built on the CPU
        limit, needed = machine.memory_limit(where), memory(config, trained)
        if limit is not None and needed > limit[0]:
            n_parameters = parameters(config, 0)
            what = "training" if trained else "the model"
            raise UserError(
                f"{what} needs at least {needed / _GIB:,.1f} GiB ({n_parameters:,} parameters beside the tables, "
                f"{config.training.batch_size} x {config.training.train_length} tokens), there are "
                f"{limit[0] / _GIB:,.1f} GiB ({limit[1]}): lower model.n_layers, model.d_model or training.batch_size; "
                f"{machine.MEMORY}=GIB sets another limit"
            )
