"""Which weights of a run are measured and exported."""

from finetune.checkpoint.access import build_access
from finetune.config.run_config import RunConfig
from finetune.run.machine import Machine
from finetune.train.weights import AveragedWeights, LiveWeights, Weights, averaging


def make_weights(config: RunConfig, machine: Machine) -> Weights:
    """Return the weights that count in this run: the average where the optimizer keeps one, else those that learn."""
    found = averaging(config.train)
    if found is None:
        return LiveWeights()
    key, formula = found
    return AveragedWeights(build_access(machine.accelerator, machine.model, machine.optimizer), key, formula)
