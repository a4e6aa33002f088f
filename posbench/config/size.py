"""How large a configuration's model is, and whether this machine can hold it: by arithmetic, before any work."""

from collections.abc import Iterator
from typing import Literal

from posbench import machine
from posbench.config.schema import Config, ModelConfig
from posbench.config.shape import on_meta
from posbench.errors import UserError

Purpose = Literal["build", "evaluate", "train"]  # what is done with a model; each takes what the one before takes
_BYTES_OF_TRAINING = 16  # of a parameter: its value, its gradient and Adam's two averages, in fp32
_BYTES_OF_READING = 4
_BYTES_OF_LAYER = 25_000  # what its objects take in Python, beside its parameters
_MORE_THAN_THERE_IS = 2**80


def parameters(config: Config, vocab_size: int) -> int:
    """Parameters of the model without those of its encoding; with a code that is concatenated it has a few less."""
    model = config.model
    width, matrices = model.d_model, 3 if model.mlp == "swiglu" else 2
    block = 2 * width + 4 * width**2 + matrices * width * hidden_width(model)
    tables = 1 if model.tie_embeddings else 2
    return model.n_layers * block + width + tables * vocab_size * width


def vocabulary(config: Config) -> int:
    """Tokens of the tokenizer that a configuration names; of bytes, for a file's is not known before it is read."""
    return config.data.vocab_size if config.data.tokenizer == "bpe" else 257


def hidden_width(model: ModelConfig) -> int:
    """Channels of the feed-forward part, `model.d_ff` or what stands for its null."""
    if model.d_ff is not None:
        return model.d_ff
    # 8/3 of the width gives three matrices the parameters of two of 4 times it; rounded up to a multiple of 32.
    return -(-8 * model.d_model // 96) * 32 if model.mlp == "swiglu" else 4 * model.d_model


def _needs(config: Config, purpose: Purpose) -> Iterator[tuple[int, str, str]]:
    """Bytes taken at the very least, more each time, by what, and which keys would lower that."""
    model, settings = config.model, config.training
    vocab_size = vocabulary(config)
    of_parameter = _BYTES_OF_TRAINING if purpose == "train" else _BYTES_OF_READING
    needed = parameters(config, vocab_size) * of_parameter + model.n_layers * _BYTES_OF_LAYER
    yield needed, "the model", "model.n_layers, model.d_model or data.vocab_size"
    needed += _of_encoding(config, of_parameter)
    yield needed, f"the model with '{config.encoding.name}'", "the encoding's options or training.train_length"
    if purpose == "build":
        return
    longest = round(config.evaluation.ratios[-1] * settings.train_length)
    window = longest * (model.d_model + hidden_width(model)) * 2
    yield needed + window, f"a window of {longest:,} tokens", "the last of evaluation.ratios"
    if purpose == "train":
        # What a backward pass needs of a token: eight vectors a layer, both sides of the activation, and the logits.
        block = 8 * model.d_model + 2 * hidden_width(model)
        blocks = model.n_layers * model.d_model + block if config.runtime.checkpointing else model.n_layers * block
        kept = blocks + vocab_size
        needed += settings.batch_size * settings.train_length * kept * (4 if settings.precision == "fp32" else 2)
        batch = f"training on {settings.batch_size:,} x {settings.train_length:,} tokens"
        yield needed, batch, "training.batch_size, model.n_layers or model.d_model"


def _of_encoding(config: Config, of_parameter: int) -> int:
    """Bytes of the encoding's parameters and tables, by building it as shapes only, which takes no memory."""
    try:
        encoding = on_meta(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        # More than 64 bits can count; else it is an encoding from elsewhere whose constructor reads its numbers.
        return _MORE_THAN_THERE_IS if "verflow" in str(error) else 0
    learned = sum(parameter.numel() for parameter in encoding.parameters())
    return learned * of_parameter + sum(table.nbytes for table in encoding.buffers())


def fits(config: Config) -> bool:
    """Whether the CPU of this machine can hold the model. Raises UserError if an option of the encoding is wrong."""
    limit = machine.memory_limit("cpu")
    return limit is None or all(needed <= limit[0] for needed, *_ in _needs(config, "build"))


def refuse_too_large(config: Config, device: str, purpose: Purpose) -> None:
    """Refuse what needs more memory than the device has, with the estimate, and wrong options of the encoding."""
    wanted: dict[str, Purpose] = {"cpu": "build"}  # where every model is made
    wanted[device] = purpose
    for where, what in wanted.items():
        if (limit := machine.memory_limit(where)) is None:
            continue
        for needed, of, keys in _needs(config, what):
            if needed > limit[0]:
                raise UserError(
                    f"{of} needs at least {_gib(needed)} ({parameters(config, 0):,} parameters beside the tables), "
                    f"there are {_gib(limit[0])} ({limit[1]}): lower {keys}; {machine.MEMORY}=GIB sets another limit"
                )


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size < 2**70 else "2^40 GiB"
