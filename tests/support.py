"""What several test files need: a model that trains in milliseconds from the command line, and a text for it."""

# Two updates of a very small model.
TINY = [
    "tracking=none",
    "data=text",
    "data.tokenizer=bytes",
    "model.n_layers=1",
    "model.d_model=16",
    "model.n_heads=2",
    "training.train_length=16",
    "training.batch_size=4",
    "training.tokens=128",
    "training.warmup_tokens=0",
    "evaluation.ratios=[1,2]",
    "evaluation.targets=8",
    "evaluation.blocks=8",
    "evaluation.bootstrap=20",
    "runtime.device=cpu",
    "runtime.threads=1",
    "runtime.cache=cache",
]
TEXT = " ".join(f"word{i * i % 97} follows number {i}." for i in range(3000))
