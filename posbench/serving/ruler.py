"""RULER (Hsieh et al., 2024, arXiv:2404.06654) by lm-evaluation-harness: `posbench
evaluate RUN|MODEL task=ruler`.

The harness makes the problems and scores the answers. The model reads a problem as it
reads a document, and answers with the likeliest token each time. Rows have the protocol
`ruler`; `evaluation.blocks` is the number of problems.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from importlib import metadata
from typing import Any, cast

import numpy as np
import tokenizers
import torch

from posbench.config.schema import EvaluationConfig
from posbench.data.tokenizer import Tokenizer
from posbench.errors import Undefined, UserError
from posbench.evaluation.evaluate import Evaluation
from posbench.evaluation.models import AS_TRAINED, Subject, Variant
from posbench.evaluation.plan import Planned, lengths_of
from posbench.huggingface.load import library_errors, transformers
from posbench.huggingface.subject import HuggingFaceModel, prepare
from posbench.run.rows import RULER, EvaluationRow, plain

TASKS = [
    f"niah_{kind}_{number}" for kind in ("single", "multikey") for number in (1, 2, 3)
]
TASKS += [
    "niah_multiquery",
    "niah_multivalue",
    "vt",
    "cwe",
    "fwe",
    "qa_squad",
    "qa_hotpot",
]
# tokens: the shortest length, and how far a prompt with its answer may exceed its
# length
LEAST, BEYOND = 512, 192


def check(settings: EvaluationConfig, train_length: int) -> list[int]:
    """Return the lengths to evaluate; UserError if none is long enough, or if the
    harness is not installed.
    """
    if not all(map(importlib.util.find_spec, ("lm_eval", "nltk", "wonderwords"))):
        raise UserError(
            "task=ruler needs lm-evaluation-harness: pip install"
            " 'lm_eval[ruler]>=0.4.13'"
        )
    if not (lengths := lengths_of(settings, train_length, LEAST)):
        raise UserError(
            f"task=ruler needs a length of {LEAST} tokens or more, such as"
            " length=4096,8192"
        )
    return lengths


def planned(evaluation: Evaluation) -> list[Planned]:
    """Return the rows of all tasks at every length, as trained and with each extension."""
    settings, train_length, rows = (
        evaluation.settings,
        evaluation.subject.train_length,
        list[Planned](),
    )
    lengths = check(settings, train_length)
    digest = hashlib.sha256(
        f"{metadata.version('lm_eval')} {settings.blocks}".encode()
    ).hexdigest()
    variants = [AS_TRAINED, *(Variant(extension=text) for text in settings.extensions)]
    for variant, length in (
        (variant, length) for variant in variants for length in lengths
    ):
        row = evaluation.row(
            protocol=RULER,
            length=length,
            length_ratio=length / train_length,
            extension=variant.name,
        )
        subject = evaluation.subject
        try:
            subject, facts = subject.varied(variant, length + BEYOND)
            row = dataclasses.replace(
                row, extension_options=plain(facts), targets_sha256=digest
            )
        except Undefined as error:
            row = dataclasses.replace(row, status="undefined", reason=str(error))
        score = functools.partial(scored_row, evaluation, subject)
        rows += [(dataclasses.replace(row, task=task), score) for task in TASKS]
    return rows


def scored_row(
    evaluation: Evaluation, subject: Subject, row: EvaluationRow
) -> EvaluationRow:
    """Return a row with the mean score of its problems; `undefined` if the harness
    cannot make them.
    """
    try:
        with (
            library_errors("lm-evaluation-harness cannot make it", Undefined),
            tempfile.TemporaryDirectory() as folder,
            open(os.devnull, "w") as devnull,
            contextlib.redirect_stdout(devnull),
            contextlib.redirect_stderr(devnull),
        ):
            scores = [
                sample[str(row.length)]
                for sample in _samples(evaluation, subject, row, folder)
            ]
    except Undefined as error:
        return dataclasses.replace(row, status="undefined", reason=str(error))
    return dataclasses.replace(
        row, accuracy=float(np.mean(scores)), n_blocks=len(scores)
    )


def _samples(
    evaluation: Evaluation, subject: Subject, row: EvaluationRow, folder: str
) -> list[dict[str, Any]]:
    """Return the harness's record of each problem of a row. It reads the tokenizer from
    `folder`, written here.
    """
    from lm_eval import evaluator
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager, ruler

    tokenizer, name = cast(Tokenizer, evaluation.tokenizer), str(row.task)
    name = name if name.startswith("niah") else f"ruler_{name}"

    class Answers(LM):  # type: ignore[misc, unused-ignore]
        loglikelihood = loglikelihood_rolling = None  # RULER asks for neither

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            texts, options = zip(*(request.args for request in requests), strict=True)
            prompts = (
                [tokenizer.separator, *ids.tolist()] for ids in tokenizer.encode(texts)
            )
            max_tokens = (option["max_gen_toks"] for option in options)
            return [
                tokenizer.decode(_answer(subject, *pair))
                for pair in zip(prompts, max_tokens, strict=True)
            ]

    # the harness would search forever for a 500-token example, or a problem, where none
    # fits
    if row.task == "vt":
        from lm_eval.tasks.ruler.vt_utils import generate_input_output as text_of

        example, problem = map(
            len, tokenizer.encode([text_of(5, 1, 4, True)[0], text_of(10, 1, 4)[0]])
        )
        if example > 440 or example + problem + 90 > row.length:
            raise Undefined(
                f"these are too few tokens: its example has {example}, its shortest"
                f" problem {problem}"
            )
    # The harness would run code from a model's folder, so this folder has only a
    # tokenizer.
    inner = tokenizers.Tokenizer.from_str(json.dumps(tokenizer.description))
    transformers().PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(
        folder
    )
    problems = {"tokenizer": folder, "max_seq_lengths": [row.length]}
    manager = TaskManager(
        include_defaults=False, include_path=[*ruler.__path__], metadata=problems
    )
    limits: dict[str, Any] = {"limit": evaluation.settings.blocks, "bootstrap_iters": 0}
    # the harness takes a mean even over no problems
    with contextlib.suppress(ZeroDivisionError):
        results = evaluator.simple_evaluate(
            Answers(), tasks=[name], task_manager=manager, **limits
        )
        return list(results["samples"][name])
    raise Undefined(f"none of its problems fits into {row.length:,} tokens")


def _answer(subject: Any, ids: list[int], limit: int) -> list[int]:
    """Return at most `limit` tokens after `ids`, the likeliest each time; the token
    that begins documents ends them.
    """
    end, length = ids[0], len(ids)
    if isinstance(subject, HuggingFaceModel):
        inputs = torch.tensor([ids], device=subject.model.device)
        prepare(subject.model, length + limit)
        options = {
            "attention_mask": torch.ones_like(inputs),
            "max_new_tokens": limit,
            "pad_token_id": end,
        }
        tokens = subject.model.generate(
            inputs, do_sample=False, repetition_penalty=1.0, **options
        )
        return list(tokens[0, length:].tolist())
    # posbench's models have no key-value cache
    while len(ids) < length + limit and ids[length:][-1:] != [end]:
        mask = np.arange(len(ids))[None] == len(ids) - 1
        ids = [
            *ids,
            int(next(subject.logits(np.array([[*ids, end]]), mask, 0)).argmax()),
        ]
    return ids[length:]
