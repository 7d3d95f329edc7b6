"""The ways of saving memory that `memory.py` compares, each a trainer that takes steps with the product's own parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch.profiler import record_function
from transformers.utils import is_bitsandbytes_available

from finetune.config.sections.model import FromConfigSection, LoraSection, ModelSection
from finetune.config.sections.train import OptimizerSection
from finetune.model.activations import offload_activations
from finetune.model.adapters.build import add_adapter
from finetune.model.adapters.context import AdapterContext
from finetune.model.loading.load import load_model
from finetune.runtime.parameters import InitContext
from finetune.train.optim.optimizers import begin_step, build_optimizer
from finetune.train.optim.parameter_groups import list_parameters
from finetune.train.update import Update, UpdateInBackward

ROWS, LENGTH, VOCABULARY = 4, 256, 1024
SHAPE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4}
SIZES = {"rows": ROWS, "length": LENGTH, "vocabulary": VOCABULARY, **SHAPE}
SIZES["text"] = f"Llama, 6 layers of 256, vocabulary {VOCABULARY}, batch {ROWS} x {LENGTH}"


@dataclass(frozen=True)
class Variant:
    """Keys of `model` and `train.optimizer` that differ from plain float32 with AdamW."""

    model: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraSection | None = None
    precision: str = "fp32"

    def fits(self, device: str) -> bool:
        """Tell whether it can be run here."""
        if self.model.get("activation_offload") and device != "cuda":
            return False
        return self.optimizer.get("name") != "adamw_8bit" or is_bitsandbytes_available()


ROUNDED = {"stochastic_rounding": True, "state_dtype": "int8"}
VARIANTS = {
    "plain": Variant(),
    "checkpointing": Variant({"gradient_checkpointing": True}),
    "checkpointing, one in 2": Variant({"gradient_checkpointing": 2}),
    "selective": Variant({"gradient_checkpointing": "selective"}),
    "offload": Variant({"activation_offload": True}),
    "in backward": Variant(optimizer={"in_backward": True}),
    "moments bfloat16": Variant(optimizer={"state_dtype": "bfloat16"}),
    "moments int8": Variant(optimizer={"state_dtype": "int8"}),
    "adamw_8bit (bitsandbytes)": Variant(optimizer={"name": "adamw_8bit"}),
    "all three": Variant({"gradient_checkpointing": True}, {"in_backward": True, "state_dtype": "int8"}),
    "bf16 stochastic, int8": Variant({"dtype": "bfloat16"}, ROUNDED),
    "lora": Variant(lora=LoraSection(rank=8)),
    "lora on bf16": Variant({"dtype": "bfloat16"}, lora=LoraSection(rank=8), precision="bf16"),
}


class Trainer:
    """A model, its optimizer and its update, as a run has them."""

    def __init__(self, variant: Variant, accelerator: Accelerator) -> None:
        self._precision, self._number, self.loss = variant.precision, 0, 0.0
        source = FromConfigSection(model_type="llama", values=SHAPE)
        section = ModelSection(from_config=source, **variant.model)
        model = load_model(section, head="causal_lm", init_context=InitContext(), seed=1, vocabulary_size=VOCABULARY)
        if variant.lora is not None:
            model = add_adapter(model, variant.lora, AdapterContext(seed=1))
        if section.activation_offload:
            offload_activations(model)
        rule = OptimizerSection(**variant.optimizer)
        self._built = build_optimizer(list_parameters(model), rule, learning_rate=1e-3, seed=1)
        self._model, optimizer = accelerator.prepare(model, self._built)
        if rule.in_backward:
            self._update: Update = UpdateInBackward(accelerator, self._model, optimizer)
        else:
            self._update = Update(accelerator, self._model, optimizer, max_gradient_norm=None)
        draw = torch.Generator().manual_seed(1)
        self._ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=draw).to(accelerator.device)

    def step(self) -> None:
        """Take one step, each phase under its name."""
        begin_step(self._built, step=self._number, learning_rate=1e-3)
        kind = self._ids.device.type
        with record_function("forward"), torch.autocast(kind, torch.bfloat16, enabled=self._precision == "bf16"):
            loss = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        with record_function("backward"):
            self._update.backward(loss)
        with record_function("step"):
            self._update(self._update.clip(), num_allowed=0)
        self._number += 1
        self.loss = loss.item()

    def held_bytes(self) -> int:
        """Return the bytes of weights and optimizer state, which are there between steps."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        tensors += [each for state in self._built.state.values() for each in state.values() if torch.is_tensor(each)]
        on_device = [each for each in tensors if each.device.type == self._ids.device.type]
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in on_device}
        return sum(storages.values())
