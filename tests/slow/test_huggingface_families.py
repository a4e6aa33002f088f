"""Every rotary family with every extension that transformers has: whether the library turns as posbench defines it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import LENGTH, MODELS, VOCABULARY, save

from posbench.evaluation.variants import Variant
from posbench.huggingface import building, rope
from posbench.huggingface import folder as folders
from posbench.huggingface.subject import HuggingFaceModel

pytest.importorskip("transformers")
LONG = 2 * LENGTH
METHODS = ("pi", "ntk", "dynamic_ntk", "dynamic_ntk:factor=3", "ntk_by_parts", "yarn", "yarn:factor=8", "llama3",
           "longrope", "longrope:factor=4", "abf")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in MODELS if folders.FAMILIES[kind].position == "rope"])
def test_every_extension_of_every_rotary_family(tmp_path: Path, kind: str) -> None:
    save(kind, tmp_path / kind)
    checkpoint = folders.read(tmp_path / kind)
    config = building.configuration(checkpoint, LONG)
    model = building.built(checkpoint, config, building.tensors_of(checkpoint), "fp32")
    subject = HuggingFaceModel(checkpoint, model, kind, LENGTH, torch.device("cpu"), "fp32")
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (1, LONG + 1))
    plain, turned = subject.nll(ids, LONG, 0), rope.turns_of(config, LENGTH)
    for text in METHODS:
        varied = subject.varied(Variant(extension=text), LONG).subject
        assert isinstance(varied, HuggingFaceModel) and varied.extension is not None
        assert np.abs(varied.nll(ids, LONG, 0) - plain).mean() > 1e-4, text
        assert rope.agrees(varied.reading, varied.extension.turns, LONG), text
        assert not rope.agrees(varied.reading, turned, LONG), text
