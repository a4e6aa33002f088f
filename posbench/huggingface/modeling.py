"""posbench's model as a class of transformers, for encodings that no stock architecture has.

A folder of `posbench export RUN DIR code=true` imports these two classes. Importing this module registers them, so
that transformers then loads such a folder without trust_remote_code.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (  # type: ignore[import-untyped, unused-ignore]
    AutoConfig,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from posbench import __version__, encodings
from posbench.config.schema import Config, ModelConfig, validate
from posbench.encodings.base import Shape
from posbench.model.gpt import GPT

KIND = "posbench"
FILE = "modeling_posbench.py"
REMARK = (
    f"**It needs posbench {__version__}, which is not on PyPI (the package there is another project), and "
    "`trust_remote_code=True`**; after `import posbench.huggingface.modeling` it loads without that. It has no "
    "key-value cache, and refuses padding: all inputs of a batch have one length."
)


class PosbenchConfig(PretrainedConfig):  # type: ignore[no-untyped-call, misc, unused-ignore]
    """What `posbench export` writes about a run's model."""

    model_type = KIND

    def __init__(
        self,
        model: Mapping[str, Any] | None = None,
        encoding: Mapping[str, Any] | None = None,
        train_length: int = 1,
        vocabulary: tuple[str, ...] = (),
        posbench_version: str = __version__,
        **others: Any,
    ) -> None:
        """Keep the sections `model` and `encoding` of a run, its training length in tokens, and token texts by id."""
        self.model, self.encoding, self.train_length = dict(model or {}), dict(encoding or {}), train_length
        self.vocabulary, self.posbench_version = list(vocabulary), posbench_version
        self.hidden_size = self.model.get("d_model", 0)
        self.num_hidden_layers = self.model.get("n_layers", 0)
        self.num_attention_heads = self.model.get("n_heads", 0)
        super().__init__(**{"use_cache": False, "tie_word_embeddings": False} | others)


class PosbenchForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call, misc, unused-ignore]
    """A run's model. It has no key-value cache, so `generate()` reads the whole text again for every token."""

    config_class = PosbenchConfig
    main_input_name = "input_ids"
    base_model_prefix = "model"
    _input_embed_layer = "tokens"  # what `get_input_embeddings` returns

    def __init__(self, config: PosbenchConfig) -> None:
        super().__init__(config)
        self.model = _built(config)
        self.post_init()  # type: ignore[no-untyped-call, unused-ignore]

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        """As of every model of transformers; tables that are no weights, which it leaves unset, are computed again."""
        loaded = super().from_pretrained(*args, **options)
        made: Any = loaded[0] if isinstance(loaded, tuple) else loaded
        tables = dict(_built(made.config).named_buffers())
        with torch.no_grad():
            for name, buffer in made.model.named_buffers():
                if name not in made.model.state_dict():
                    module, _, last = name.rpartition(".")
                    setattr(made.model.get_submodule(module), last, tables[name].to(buffer.device))
        return loaded

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Nothing: all weights come from the folder."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> CausalLMOutput:
        """Logits of token ids (B, T), and the loss of labels (B, T), which are shifted here.

        Raises:
            ValueError: padding, or positions or embeddings from elsewhere.
        """
        if attention_mask is not None and not bool((attention_mask != 0).all()):
            raise ValueError("padding: posbench's models read whole sequences; expected inputs of one length")
        if position_ids is not None or inputs_embeds is not None:
            raise ValueError("posbench's models choose positions and embeddings by themselves: expected input_ids only")
        hidden = self.model.hidden(input_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else logits_to_keep
        logits = self.model.logits(hidden if isinstance(kept, int) else hidden[:, kept])
        loss = None
        if labels is not None:
            every = self.model.logits(hidden[:, :-1]).float().flatten(0, 1)
            loss = F.cross_entropy(every, labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(self, input_ids: Any, *_: Any, **given: Any) -> Any:
        return {"input_ids": input_ids, "attention_mask": given.get("attention_mask")}


def _built(config: PosbenchConfig) -> GPT:
    """The model with initial weights, on the CPU and in fp32 whatever the loader's defaults are."""
    model = validate(ModelConfig, config.model, "model")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            shape = Shape(
                model.d_model,
                model.n_heads,
                model.n_layers,
                config.train_length,
                vocabulary=tuple(config.vocabulary),
                token_rms=model.token_rms,
            )
            options = {name: value for name, value in config.encoding.items() if name != "name"}
            return GPT(model, config.vocab_size, encodings.build(config.encoding["name"], shape, options))
    finally:
        torch.set_default_dtype(before)


def settings_of(config: Config, vocabulary: tuple[str, ...]) -> dict[str, Any]:
    """The configuration of a run's model as the class of this file; `vocabulary`: token texts by id."""
    return {
        "model": dataclasses.asdict(config.model),
        "encoding": {"name": config.encoding.name, **config.encoding.options},
        "train_length": config.original_length,
        "vocabulary": vocabulary,
        "architectures": [PosbenchForCausalLM.__name__],
        "auto_map": {
            "AutoConfig": f"{FILE[:-3]}.{PosbenchConfig.__name__}",
            "AutoModelForCausalLM": f"{FILE[:-3]}.{PosbenchForCausalLM.__name__}",
        },
        "use_cache": False,
    }


def import_line() -> str:
    """The module that `auto_map` names."""
    return f"from {__name__} import {PosbenchConfig.__name__}, {PosbenchForCausalLM.__name__}\n"


AutoConfig.register(KIND, PosbenchConfig)
AutoModelForCausalLM.register(PosbenchConfig, PosbenchForCausalLM)
