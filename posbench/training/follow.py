"""What the other processes of a run do: their share of every update and of the evaluation, and nothing else.

They make the calls of `train.train` that concern all processes, in its order. The run folder, the tracker and the
terminal are the first one's, which also says where training stands.
"""

import logging

from posbench import machine
from posbench.config.schema import Config
from posbench.data.prepared import prepare
from posbench.data.problems import TaskData
from posbench.data.tokens import Tokens
from posbench.errors import Stopped
from posbench.evaluation.job import evaluated, evaluation_of
from posbench.model import build
from posbench.processes import World
from posbench.terminal.signals import ended_in_words, stop_signals
from posbench.training.step import Learner, learner_for, learning_rate, tell_progress, update
from posbench.training.train import Standing, due, validate


def follow(config: Config, world: World) -> None:
    """Help the first process to train and evaluate a configuration, to the end.

    Raises:
        Stopped: a signal asked one of the processes for an end.
        PosbenchError: what ended another process, or this one, which the first then says.
    """
    logging.getLogger("posbench").handlers = [logging.NullHandler()]
    device = world.device(machine.resolve(config.runtime.device))
    dtype = machine.resolve_precision(config.training.precision, device)
    machine.set_threads(config.runtime.threads or world.threads)
    with ended_in_words():
        world.from_first()  # the first has made what the others read
        tokens = prepare(config.data, config.runtime.cache)
        model = build(config, tokens.tokenizer.vocab_size, tokens.tokenizer.texts).to(device)
        with machine.out_of_memory_as_failure("a smaller training.batch_size, with more training.accumulation,"):
            _fit(learner_for(model, config, device, dtype, world), tokens, config)
        step = config.training.steps
        asked = evaluation_of("", model, tokens, config, step, device, world)
        for _ in evaluated(asked, world.from_first()):
            pass


def _fit(learner: Learner, tokens: Tokens | TaskData, config: Config) -> None:
    training, world = config.training, learner.world
    step, weights, optimizer, scale = _standing(world)
    if weights is not None:
        learner.model.load_state_dict(weights)
    if optimizer is not None:
        learner.optimizer.load_state_dict(optimizer)
    if learner.scale is not None:
        learner.scale.resume(scale or {})
    batches = tokens.batches(training, config.seed)
    with stop_signals(second_interrupts=True) as world.received:
        while step < training.steps:
            learner.model.train()
            update(learner, batches.batch(step), step, learning_rate(step, training.steps, training))
            step += 1
            if due(config.runtime.validate_every_steps, step, training.steps):
                validate(learner, tokens, training)
            if (stopped := world.stopped_by()) and step < training.steps:
                raise Stopped(stopped, f"stopped after step {step}")
    tell_progress(learner.model, 1.0)


def _standing(world: World) -> Standing:
    said = world.from_first()
    assert isinstance(said, Standing)
    return said
