"""A run's trained model, from its folder alone: no text is needed, and nothing is
written.
"""

from pathlib import Path

import torch
from torch import Tensor

from posbench.config.schema import Config, StartConfig
from posbench.data.tokenizer import Tokenizer, from_file
from posbench.errors import UserError
from posbench.files import sha256
from posbench.model.gpt import GPT, build
from posbench.randomness import generator
from posbench.run import TOKENIZER, checkpoint
from posbench.run.folder import load_config
from posbench.run.saved import load_record

TEMPERATURE = 0.8  # of sampling


def tokenizer_of(folder: Path) -> Tokenizer:
    """Return the tokenizer that a run was trained with. Raises UserError if it is
    missing or not that of the record.
    """
    tokenizer = from_file(folder / TOKENIZER)
    if load_record(folder).tokenizer_sha256 not in (None, tokenizer.sha256):
        raise UserError(
            f"{folder / TOKENIZER} is not the tokenizer that the run was trained with"
        )
    return tokenizer


def model_of(folder: Path, config: Config, tokenizer: Tokenizer) -> GPT:
    """Return a run's model with the weights of its newest complete checkpoint, on the
    CPU, in eval mode.
    """
    model = build(config, tokenizer.vocab_size, tokenizer.texts)
    model.load_state_dict(checkpoint.trained(folder).weights())
    return model.eval()


def start_weights(start: StartConfig) -> dict[str, Tensor]:
    """Return the weights of the run that training begins from. Raises UserError if they
    are gone or have changed.
    """
    saved = checkpoint.at(Path(start.run), start.steps)
    if saved:
        digest = sha256(saved.path / checkpoint.WEIGHTS).hex()
        if digest == start.weights_sha256:
            return saved.weights()
    raise UserError(
        f"start.run is {start.run}: its weights are not those that this run was to"
        " begin from"
    )


@torch.inference_mode()
def sample(folder: Path, prompt: str, tokens: int = 200, seed: int = 0) -> str:
    """Return a prompt and its continuation, sampled token by token. The model sees the
    last `train_length` tokens.
    """
    config = load_config(folder)
    if config.data.task:
        raise UserError(
            f"{folder} was trained on {config.data.name}: expected a run on text"
        )
    tokenizer = tokenizer_of(folder)
    model = model_of(folder, config, tokenizer)
    rng = generator(seed, "sample", 0)
    ids = tokenizer.encode([prompt])[0].tolist()
    for _ in range(tokens):
        seen = torch.tensor([ids[-config.training.train_length :]])
        logits = model.logits(model.hidden(seen).float())[0, -1]  # (vocab_size,)
        probabilities = (logits / TEMPERATURE).softmax(-1)
        ids.append(int(torch.multinomial(probabilities, 1, generator=rng)))
    return tokenizer.decode(ids)
