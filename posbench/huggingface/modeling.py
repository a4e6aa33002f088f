"""posbench's model as a class of transformers, for what no stock architecture has.
Importing this registers it.
"""

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import local_torch_dtype

from posbench import __version__, encodings
from posbench.config.schema import Config, ModelConfig, validate
from posbench.model.gpt import GPT

KIND, FILE = "posbench", "modeling_posbench.py"
# the content of that file
IMPORT = f"from {__name__} import PosbenchConfig, PosbenchForCausalLM\n"
REMARK = (
    f" **It needs posbench {__version__}, which is not on PyPI (the package there is"
    " another project), and `trust_remote_code=True`**; after `import"
    " posbench.huggingface.modeling` it loads without that. It has no key-value cache,"
    " and refuses padding: all inputs of a batch have one length."
)

_REFUSED = (
    "position_ids",
    "inputs_embeds",
    "past_key_values",
    "output_hidden_states",
    "output_attentions",
)


class PosbenchConfig(transformers.PretrainedConfig):  # type: ignore[no-untyped-call, misc, unused-ignore]
    """The settings of `exported_settings`: a run's sections `model` and `encoding`, and
    what its encoding is built from.
    """

    model_type = KIND


class PosbenchForCausalLM(transformers.PreTrainedModel, transformers.GenerationMixin):  # type: ignore[no-untyped-call, misc, unused-ignore]
    """A run's model. It has no key-value cache, so `generate()` reads the whole text
    again for every token.
    """

    config_class = PosbenchConfig
    main_input_name = "input_ids"
    base_model_prefix = "model"
    _input_embed_layer = "tokens"  # what `get_input_embeddings` returns

    def __init__(self, config: PosbenchConfig) -> None:
        super().__init__(config)
        self.model = _initial_model(config)
        self.post_init()  # type: ignore[no-untyped-call, unused-ignore]

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Compute the tables that are not saved, which the library leaves unset. All
        weights come from the folder.
        """
        names = module._non_persistent_buffers_set
        if not names:
            return
        path = next(path for path, part in self.model.named_modules() if part is module)
        computed = _initial_model(self.config).get_submodule(path)
        for name in names:
            module.get_buffer(name).copy_(computed.get_buffer(name))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        **options: Any,
    ) -> CausalLMOutput:
        """Return logits of ids (B, T), and the loss of labels (B, T), which it shifts;
        ValueError for padding or a cache.

        Args:
            logits_to_keep: of the last so many tokens; 0: of all.
            num_items_in_batch: the labels of an update, over which `Trainer` takes the
                mean if it accumulates several batches; None: the mean of these.
        """
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "padding: posbench's models read whole sequences; expected inputs of"
                " one length"
            )
        for name in _REFUSED:
            option = options.get(name)
            if option is not None and option is not False:
                raise ValueError(
                    f"{name}: posbench's models read whole texts, from their beginning"
                    " and without a cache, and return logits; expected input_ids only"
                )
        hidden = self.model.hidden(input_ids)  # (B, T, D)
        logits = self.model.logits(hidden[:, -logits_to_keep:])
        loss = None
        if labels is not None:
            every = self.model.logits(hidden) if logits_to_keep else logits
            loss = self.loss_function(
                every,
                labels,
                vocab_size=every.shape[-1],
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
        self, input_ids: Any, *_: Any, attention_mask: Any = None, **options: Any
    ) -> Any:
        # `generate` refuses an argument that this does not name
        return {"input_ids": input_ids, "attention_mask": attention_mask}


def _initial_model(config: Any) -> GPT:
    """Return the model with initial weights, on the CPU whatever the loader's device
    is; in the loader's dtype, but for the encoding, whose angles and biases need fp32.
    """
    model = validate(ModelConfig, config.model)
    options = dict(config.encoding)
    name = options.pop("name")
    asked = torch.get_default_dtype()  # the loader sets it
    with local_torch_dtype(torch.float32), torch.device("cpu"):
        shape = model.shape(config.train_length, tuple(config.vocabulary))
        gpt = GPT(model, config.vocab_size, encodings.build(name, shape, options))
    for part in gpt.children():
        if part is not gpt.encoding:
            part.to(asked)
    return gpt


def exported_settings(config: Config, vocabulary: tuple[str, ...]) -> dict[str, Any]:
    """Return the configuration of a run's model for `PosbenchForCausalLM`;
    `vocabulary`: token texts by id.
    """
    module = FILE.removesuffix(".py")
    return {
        "model_type": KIND,
        "model": dataclasses.asdict(config.model),
        "encoding": {"name": config.encoding.name, **config.encoding.options},
        "train_length": config.original_length,
        "vocabulary": vocabulary,
        "posbench_version": __version__,
        "hidden_size": config.model.d_model,
        "num_hidden_layers": config.model.n_layers,
        "num_attention_heads": config.model.n_heads,
        "tie_word_embeddings": False,
        "use_cache": False,
        "architectures": ["PosbenchForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{module}.PosbenchConfig",
            "AutoModelForCausalLM": f"{module}.PosbenchForCausalLM",
        },
    }


transformers.AutoConfig.register(KIND, PosbenchConfig)
transformers.AutoModelForCausalLM.register(PosbenchConfig, PosbenchForCausalLM)
