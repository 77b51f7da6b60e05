"""Continue a training of Lightning: init.training=true."""

from __future__ import annotations

from framework.checkpoint import find_weights
from framework.checkpoint.weights_file import read_content
from framework.config.schema import Config
from framework.errors import CheckpointError, ConfigError
from framework.optim.optimizer import restore_optimizer
from framework.optim.schedule import Schedules
from framework.optim.several import join_states
from framework.remote.weights import weights_path
from framework.training.trainer import Trainer
from framework.types import hooks


def load_initial_training(trainer: Trainer, config: Config) -> None:
    """Load the states of optimizers and schedules from `init_from`, and begin after its last epoch.

    Raises:
        CheckpointError: the file lacks them, or they don't fit.
        ConfigError: the task can't read them, or the model is sharded.
    """
    state = trainer.state
    path = weights_path(str(config.init_from), cache=config.path.cache)
    readers = hooks([state.task], "initial_training")
    files = find_weights(path)
    if not readers or files is None:
        raise ConfigError(
            "init.training=true continues a training of Lightning's, from its .ckpt file and with task=lightning, and "
            f"init_from is {path}.\nLeave out init.training to load weights only. A run of the framework continues "
            "with resume=RUN."
        )
    if state.strategy.forward_communicates or config.peft is not None:
        raise ConfigError(
            "init.training=true loads the optimizer of a whole model, which adapters and sharded models don't have.\n"
            "Use strategy=ddp without peft, or leave out init.training to load weights only."
        )

    training = readers[0](read_content(files[0]), source=path)
    try:
        restore_optimizer(state.optimizer, join_states(training.optimizers))
    except ValueError as error:
        raise CheckpointError(
            f"The optimizers in {path} don't fit those of this run: {error}\nKeep configure_optimizers as it was, and "
            "optimizer=lightning; or leave out init.training to load weights only."
        ) from error

    schedule = state.schedule
    schedules = list(schedule.named.values()) if isinstance(schedule, Schedules) else [schedule]
    for own_schedule, saved in zip(schedules, training.schedules, strict=False):
        own_schedule.load_state_dict(saved)
    trainer.progress.epoch = training.epoch
    trainer.progress.step = training.step
