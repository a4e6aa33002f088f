"""Save a transformers model of Pythia's shape with random weights, to measure time and memory offline.

    python scripts/random_pythia.py random_pythia
    posbench evaluate random_pythia data=builtin length=2048,8192 blocks=8 windowed=false

Like Pythia-160M: 12 layers of 768 channels, 12 heads with a quarter of the channels rotated, 2,048 positions, 50,304
rows. The tokenizer is byte-level BPE, trained on the built-in corpus, which limits its tokens. The predictions are
meaningless. Its shape: https://huggingface.co/EleutherAI/pythia-160m.
"""

import argparse
from pathlib import Path

import torch
import transformers

from posbench.data.reading import builtin_modules
from posbench.data.tokenizer import train_bpe

VOCABULARY = 50_304

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("folder", type=Path, help="where to write it")
folder = parser.parse_args().folder

torch.manual_seed(0)
config = transformers.GPTNeoXConfig(
    vocab_size=VOCABULARY,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    max_position_embeddings=2048,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=0,
    dtype="float16",
)
transformers.GPTNeoXForCausalLM(config).half().save_pretrained(folder)
texts = (path.read_text(encoding="utf-8") for path in builtin_modules().values())
train_bpe(texts, VOCABULARY).save(folder / "tokenizer.json")
